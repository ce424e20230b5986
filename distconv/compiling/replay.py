"""Cases of compiled programs: a graph on given layouts is traced, and replayed by autograd.

A replay is one autograd function, whose forward and backward passes are the traced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distconv.compiling import trace
from distconv.compiling.capture import CapturedPasses, Warn, captured
from distconv.compiling.program import Existing, Program, TracedCall, TracedStep, Value
from distconv.compiling.trace import Trace, traced
from distconv.device.kinds import KINDS, random_states, set_random_states
from distconv.grid.interface import Grid
from distconv.model.gradient_reduction import GradientReduction
from distconv.ops.conv.functions import chosen_method
from distconv.tensor.base import shards_of
from distconv.tensor.dispatch import UnsupportedOperation, enter_call
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import is_owned
from distconv.torch_private import ShardFunction, hooks_of

MOST_TRACES = 8
"""The most traced calls of a case from which one with a backward pass must come."""

_DEVICES = ("cpu", *KINDS)
"""The kinds of devices on which a program may run by autocast."""


def is_expanded(x: Tensor) -> bool:
    """Return whether several elements of a tensor share one place in memory, as after expand()."""
    return any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _stays(x: Tensor) -> bool:
    """Return whether an input of a graph is a parameter or buffer, the same in all calls of a case.

    Other inputs may be another tensor in each call.
    """
    if isinstance(x, DistTensor):
        return False
    return isinstance(x, nn.Parameter) or is_owned(x) or (x.is_leaf and x.requires_grad)


def key_of(inputs: Sequence[Tensor]) -> Any:
    """Return by which a call's case differs from others of a graph: layouts, parameters, modes."""
    about = tuple(
        (x.cuts, x.grid)
        if isinstance(x, DistTensor)
        else (x.stride(), x.requires_grad, id(x) if _stays(x) else None)
        for x in inputs
    )
    modes = (
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
    )
    return about, modes, chosen_method()


class Case:
    """A graph of the serial program on inputs of given layouts; it is traced, and then replayed.

    Parameters
    ----------
    graph: a function of the graph's inputs that returns a tuple of tensors.
    reductions: the sums of gradients of the parallelized modules that the program calls.
    number: the number of the case, the same on all ranks.
    backend: a backend of torch.compile, or None.

    Attributes
    ----------
    is_left: whether the program runs as it is, after an obstacle.
    source: the Python source of the replayed functions; "" before the first replay.
    """

    def __init__(
        self,
        graph: Callable[..., Sequence[Tensor]],
        reductions: Sequence[GradientReduction],
        number: int,
        backend: str | None,
    ) -> None:
        self._graph, self._reductions, self._backend = graph, reductions, backend
        self._traces: list[_Traced] = []
        self._replayed: _Replayed | None = None
        self.number, self.is_left, self.source = number, False, ""

    @property
    def is_replayed(self) -> bool:
        """Return whether the next call is a replay."""
        return self._replayed is not None

    @property
    def state(self) -> int:
        """Return a number that says what the next call does, for comparison between ranks."""
        return (self.number + 1) * 2 * (MOST_TRACES + 1) + len(self._traces) * 2 + self.is_replayed

    @property
    def words(self) -> str:
        """Return `state` in words."""
        return "which it replays" if self.is_replayed else f"with {len(self._traces)} traces"

    def decide(self, grid: Grid, warn: Warn) -> None:
        """Decide with all ranks whether to replay, after each traced call. Collective.

        `warn` is called on one rank if the case runs as it is, with that and the reason.
        """
        if self.is_replayed or not self._traces:
            return
        complete = next((x for x in self._traces if x.complete), None)
        why = next((x.trace.obstacle for x in self._traces if x.trace.obstacle), "")
        if complete is None and len(self._traces) == MOST_TRACES:
            why = "no backward pass has followed; call it under torch.no_grad() where none will"
        ready, reasons = zip(*grid.all_gather_object((complete is not None, why)), strict=True)
        found = next(filter(None, reasons), "")
        self.is_left = bool(found)
        if self.is_left and grid.rank == reasons.index(found):
            warn("runs as it is", found)
        if all(ready) and complete is not None and not found:
            self._replayed = _Replayed(complete, self._backend, grid, warn)
            self.source = self._replayed.source
        if self.is_left or self.is_replayed:
            self._traces.clear()

    def run(self, inputs: Sequence[Tensor], grid: Grid) -> list[Tensor]:
        """Trace or replay a call, and return what the graph computes. Collective."""
        for reduction in self._reductions:
            reduction.prepare()
        if self._replayed is not None:
            case: Any = self._replayed
            given = shards_of([inputs[i] for i in case.given])
            passes: Any = _Once(case, given)
        else:
            case = self._traced(inputs, grid)
            self._traces.append(case)
            given, passes = shards_of([inputs[i] for i in case.given]), _Live(case)
        if any(case.differentiable):
            ends = (x for x in (*given, *case.leaves) if x.requires_grad)
            blocks = _Apart.apply(passes, *ends)
            for reduction in self._reductions:
                reduction.keep_for(blocks)
        else:
            blocks = passes.forward(None)
        return [rebuilt(x) for rebuilt, x in zip(case.rebuilders, blocks, strict=True)]

    def _traced(self, inputs: Sequence[Tensor], grid: Grid) -> _Traced:
        """Run and trace the graph. Where it has no rule for a function, leave all as it was."""
        states = random_states()
        buffers = [x for x in inputs if not (isinstance(x, (DistTensor, nn.Parameter)))]
        before = [x.detach().clone() for x in buffers]
        try:
            return _Traced(self._graph, inputs, grid)
        except UnsupportedOperation:
            set_random_states(states)
            with torch.no_grad():
                for x, y in zip(buffers, before, strict=True):
                    x.copy_(y)
            self.is_left = True
            raise


class _Apart(ShardFunction):
    """The autograd function that stands for a whole graph, in traced and in replayed calls.

    Its inputs are the blocks and leaves that require gradients. The first argument, a `_Live` or
    `_Once`, computes both passes.
    """

    @staticmethod
    def forward(ctx: Any, passes: _Live | _Once, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        # A result on which the loss does not depend has no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        results = passes.forward(ctx)
        ctx.mark_non_differentiable(
            *(x for x, has in zip(results, passes.differentiable, strict=True) if not has)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, *ctx.passes.backward(ctx, gradients))


class _Traced:
    """The trace of one call of a graph, and of the backward pass through it.

    Attributes
    ----------
    given: the positions of the graph's inputs that may be other tensors in other calls.
    strides: the strides of the blocks of these inputs.
    blocks: the blocks of the results, of the autograd graph within the call.
    rebuilders: for each result, a function that makes it from its block.
    differentiable: for each result, whether it is differentiable.
    leaves: the parameters, and other leaves, whose gradients the backward pass makes.
    reached: for each result, whether the loss depends on it.
    gradient_strides: the strides of the gradients of the results that are reached.
    step: both passes, with the call of `trace.turn` between them.
    writes: whether it writes to one of the given inputs.
    complete: whether both passes are traced, or the only one.
    """

    def __init__(self, graph: Callable[..., Any], inputs: Sequence[Tensor], grid: Grid) -> None:
        self.grid, self.complete = grid, False
        self.reached: list[bool] = []
        self.gradient_strides: list[tuple[int, ...]] = []
        self.given = [i for i, x in enumerate(inputs) if not _stays(x)]
        # The graph within begins at these, and ends at the results.
        inner = [_beginning(x) if _begins(x) else x for x in inputs]
        blocks = shards_of([inner[i] for i in self.given])
        self.strides = [x.stride() for x in blocks]
        before = list(map(_version, blocks))
        self.trace = Trace(blocks)
        with traced(self.trace, grid):
            call = enter_call(self)
            results = graph(*inner)
            call.leave()
        written = [
            i for i, x, v in zip(self.given, blocks, before, strict=True) if v != _version(x)
        ]
        self.writes = bool(written)
        if any(_begins(inputs[i]) for i in written):
            self.trace.hinder("it writes to a tensor among its arguments")
        self.blocks, self.rebuilders = shards_of(results), list(map(_rebuilder, results))
        self.differentiable = [x.requires_grad for x in self.blocks]
        self.leaves = list(self.trace.leaves)
        self.inputs = [x for x in blocks if x.requires_grad]
        self._made = self.trace.standing_for(self.blocks)
        if any(isinstance(x, Existing) for x in self._made):
            self.trace.hinder("it returns a parameter or a buffer")
        self.trace.calls.append(TracedCall(trace.turn, ()))
        if not any(self.differentiable):
            self._finish([])

    def finish_backward(self, gradients: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
        """Note the end of the traced backward pass.

        `gradients`, of the results, were its inputs. `found`, of the inputs and of leaves, are its
        results; None for a tensor without a gradient.
        """
        self.gradient_strides = [x.stride() for x in gradients]
        self._finish(self.trace.standing_for(list(found)))

    def _finish(self, found: Sequence[Value | Existing | None]) -> None:
        now = self.trace
        self.step = TracedStep(
            now.inputs, now.calls, [*self._made, *found], now.constants
        ).reduced()
        self.complete = True


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _begins(x: Tensor) -> bool:
    return isinstance(x, DistTensor) or (x.requires_grad and not _stays(x))


def _beginning(x: Tensor) -> Tensor:
    """Return `x` as a leaf of the graph within, with this rank's part of the gradient of `x`."""
    y = x.detach()
    if isinstance(y, DistTensor):
        y.mark_summed_when_accumulated()  # by the hooks of `x`
    return y.requires_grad_(x.requires_grad)


def _rebuilder(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a tensor like `x` from a new block.

    For a plain `x` the function returns its argument.
    """
    if not isinstance(x, DistTensor):
        return lambda block: block
    y, shape = x if x.unmerged is None else x.unmerged, x.shape
    about = tuple(y.shape), y.cuts, y.grid

    def rebuilt(block: Tensor) -> Tensor:
        made = DistTensor(block, *about)
        return made if made.shape == shape else made.reshape(shape)

    return rebuilt


class _Live:
    """The passes of a call that is being traced: they run the graph's own autograd graph."""

    def __init__(self, call: _Traced) -> None:
        self._call, self.differentiable = call, call.differentiable
        self._results, call.blocks = call.blocks, []
        self._ends = [*call.inputs, *call.leaves]

    def forward(self, ctx: Any) -> list[Tensor]:
        if ctx is not None:
            # torch refuses a second backward pass where something has been saved.
            ctx.save_for_backward(torch.empty(0))
        return [x.detach() for x in self._results]

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        _ = ctx.saved_tensors
        call = self._call
        reached = [x is not None for x in gradients]
        given = [x.contiguous() if is_expanded(x) else x for x in gradients if x is not None]
        roots = list(compress(self._results, reached))
        if call.complete:
            return self._gradients(roots, given)
        call.reached = reached
        with traced(call.trace, call.grid):
            call.trace.go_on(given)
            found = self._gradients(roots, given)
        call.finish_backward(given, found)
        return found

    def _gradients(
        self, roots: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        # Hooks of leaves are called where `_Apart` hands out their gradients.
        hooks = [(of, dict(of)) for x in self._call.leaves if (of := hooks_of(x))]
        for of, _ in hooks:
            of.clear()
        try:
            return torch.autograd.grad(
                roots, self._ends, given, retain_graph=True, allow_unused=True
            )
        finally:
            for of, before in hooks:
                of.update(before)


class Passes:
    """The functions of both passes of a case.

    Attributes
    ----------
    forward: a function of the blocks of the inputs. It returns the blocks of the results, and
        behind these the tensors that the backward pass needs.
    backward: a function of these tensors, and of gradients of the results that are reached. It
        returns the gradients of inputs and leaves.
    """

    def __init__(self, forward: TracedStep, backward: TracedStep) -> None:
        first, second = Program(forward), Program(backward)
        self.forward, self.backward = first.run, second.run
        self.source = f"{first.source}\n\n{second.source}"


class _Replayed:
    """The program that replays one case.

    Parameters
    ----------
    call: a traced call of the case.
    """

    def __init__(self, call: _Traced, backend: str | None, grid: Grid, warn: Warn) -> None:
        self.given, self.strides, self.rebuilders = call.given, call.strides, call.rebuilders
        self.differentiable, self.reached = call.differentiable, call.reached
        self.gradient_strides, self.leaves = call.gradient_strides, call.leaves
        step, given = call.step, len(call.strides)
        turn = next(i for i, x in enumerate(step.calls) if x.function is trace.turn)
        first, second = step.calls[:turn], step.calls[turn + 1 :]
        own = len(self.differentiable)
        results, found = step.results[:own], step.results[own:]
        inputs, gradients = step.inputs[:given], step.inputs[given:]
        there = {*inputs, *(n for x in first for n in x.made)}
        used = dict.fromkeys(x for call in second for x in call.used)
        used |= dict.fromkeys(x for x in found if x is not None)
        kept = [x for x in used if isinstance(x, Value) and x.number in there]
        self.constants = [step.constants[x.number] for x in used if isinstance(x, Existing)]
        """The tensors that the backward pass reads, which must not change until then."""
        forward = TracedStep(inputs, first, [*results, *kept], step.constants)
        numbers = [*(x.number for x in kept), *gradients]
        backward = TracedStep(numbers, second, found, step.constants)
        if backend is not None:
            from distconv.compiling.graph import compiled  # which most programs do without

            forward, backward = compiled(forward, backend), compiled(backward, backend)
        self.passes = Passes(forward, backward)
        self.source = self.passes.source
        self._captured = None
        if backend is None:
            self._captured = captured(forward, backward, own, call.writes, grid, warn)
        self._pending: Callable[[], Any] = lambda: None

    def begin(self, token: Tensor) -> Passes | CapturedPasses:
        """Return the passes for a call; autograd holds `token` until its backward pass is over.

        Graphs have memory for one call at a time.
        """
        if self._captured is None or self._captured.failed or self._pending() is not None:
            return self.passes
        self._pending = ref(token)
        return self._captured


class _Once:
    """The passes of one replayed call: they run the functions of a `_Replayed`."""

    def __init__(self, case: _Replayed, given: Sequence[Tensor]) -> None:
        self._case, self._given, self.differentiable = case, given, case.differentiable
        self._kept, self._fixed = 0, list[Tensor]()

    def forward(self, ctx: Any) -> list[Tensor]:
        case, token = self._case, torch.empty(0)
        self._passes = case.begin(token)
        with _as_traced():
            blocks = [*map(_restrided, self._given, case.strides)]
            made = self._passes.forward(*blocks)
        self._given = []
        number = len(case.differentiable)
        results, kept = made[:number], made[number:]
        if self._passes is not case.passes:  # the memory of a graph stays where it is
            self._fixed, kept = list(kept), []
        self._kept = len(kept)
        if ctx is not None:
            ctx.save_for_backward(*kept, *case.constants, token)
        # Autograd knows each result once.
        return [
            x.detach() if any(x is y for y in results[:i]) else x for i, x in enumerate(results)
        ]

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        case = self._case
        kept = *self._fixed, *ctx.saved_tensors[: self._kept]
        if case.reached != [x is not None for x in gradients]:
            raise RuntimeError(
                "compile: the loss depends on other results of the program than in the call that "
                "was traced; compile it for each such loss, or return what the loss takes"
            )
        present = (x for x in gradients if x is not None)
        given = map(_restrided, present, case.gradient_strides)
        with _as_traced():
            return self._passes.backward(*kept, *given)


@contextmanager
def _as_traced() -> Iterator[None]:
    """Turn off autograd and autocast within the context, as traced calls contain their work."""
    with torch.no_grad(), ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _restrided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return `x`, detached, with these strides; it is copied unless it has them already."""
    if x.stride() == strides:
        return x.detach()
    copy = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return copy.copy_(x)
