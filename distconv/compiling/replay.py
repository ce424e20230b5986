"""Cases of compiled programs: the graph of a program is traced for given layouts, then replayed.

A case is a graph with the layouts, parameters and modes of its inputs. A replay is one autograd
function, whose forward and backward pass are the traced passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distconv.compiling.capture import Warn, captured
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
"""The most calls of a case that are traced; one of them must be followed by a backward pass."""

_DEVICES = ("cpu", *KINDS)
"""The types of devices for which a program may use autocast."""


def is_expanded(x: Tensor) -> bool:
    """Return whether several elements of a tensor share one place in memory, as after expand()."""
    return any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _is_constant_input(x: Tensor) -> bool:
    """Return whether the input `x` of a graph is the same tensor in all calls of a case.

    This is true for parameters, buffers and other leaves with gradients that are plain tensors.
    Other inputs may be a different tensor in each call.
    """
    if isinstance(x, DistTensor):
        return False
    return isinstance(x, nn.Parameter) or is_owned(x) or (x.is_leaf and x.requires_grad)


def key_of(inputs: Sequence[Tensor]) -> Any:
    """Return the key of a call's case: the inputs' layouts, the parameters, and torch's modes."""
    about = tuple(
        (x.cuts, x.grid)
        if isinstance(x, DistTensor)
        else (x.stride(), x.requires_grad, id(x) if _is_constant_input(x) else None)
        for x in inputs
    )
    modes = (
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
    )
    return about, modes, chosen_method()


class ReplayCase:
    """A graph of the serial program for inputs of given layouts, which is traced and then replayed.

    Parameters
    ----------
    graph: a function of the graph's inputs that returns a tuple of tensors.
    reductions: the gradient reductions of the parallelized modules that the program calls.
    number: the number of the case, the same on all ranks.
    backend: a backend of torch.compile, or None.

    Attributes
    ----------
    is_left: whether the program runs uncompiled, because of an obstacle.
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
        """Return a number, to compare between ranks, of the case, its traces and its replay."""
        return (self.number + 1) * 2 * (MOST_TRACES + 1) + len(self._traces) * 2 + self.is_replayed

    @property
    def words(self) -> str:
        """Return a description of the case's state, for an error about differing ranks."""
        return "which it replays" if self.is_replayed else f"with {len(self._traces)} traces"

    def decide(self, grid: Grid, warn: Warn) -> None:
        """Decide together with all ranks whether to replay the case from now on. Collective.

        If an obstacle makes replays impossible, the case runs uncompiled, and one rank calls `warn`
        with the reason.
        """
        if self.is_replayed or not self._traces:
            return
        complete = next((x for x in self._traces if x.complete), None)
        why = next((x.trace.obstacle for x in self._traces if x.trace.obstacle), "")
        if complete is None and len(self._traces) == MOST_TRACES:
            why = (
                "no backward pass followed; call it under torch.no_grad() if no backward pass is "
                "needed"
            )
        ready, reasons = zip(*grid.all_gather_object((complete is not None, why)), strict=True)
        found = next(filter(None, reasons), "")
        self.is_left = bool(found)
        if self.is_left and grid.rank == reasons.index(found):
            warn("runs uncompiled", found)
        if all(ready) and complete is not None and not found:
            self._replayed = _Replayed(complete, self._backend, grid, warn)
            self.source = self._replayed.source
        if self.is_left or self.is_replayed:
            self._traces.clear()

    def run(self, inputs: Sequence[Tensor], grid: Grid) -> list[Tensor]:
        """Trace or replay a call with `inputs`, and return the results of the graph. Collective."""
        for reduction in self._reductions:
            reduction.prepare()
        ends = (x for x in shards_of(inputs) if x.requires_grad)
        if self._replayed is not None:
            call, passes = self._replayed.call, self._replayed
            blocks = _GraphFunction.apply(passes, inputs, *ends)
        else:
            call = _Traced(self._graph, grid)
            with self._restored(inputs):
                blocks = _GraphFunction.apply(call, inputs, *ends)
            self._traces.append(call)
        for reduction in self._reductions:
            reduction.keep_for(blocks)
        return [rebuilt(x) for rebuilt, x in zip(call.rebuilders, blocks, strict=True)]

    @contextmanager
    def _restored(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Restore buffers and random states if UnsupportedOperation is raised within the context.

        The case then runs uncompiled from now on.
        """
        states = random_states()
        buffers = [x for x in inputs if not (isinstance(x, (DistTensor, nn.Parameter)))]
        before = [x.detach().clone() for x in buffers]
        try:
            yield
        except UnsupportedOperation:
            set_random_states(states)
            with torch.no_grad():
                for x, y in zip(buffers, before, strict=True):
                    x.copy_(y)
            self.is_left = True
            raise


class _GraphFunction(ShardFunction):
    """The autograd function of one call of a graph, traced or replayed.

    Its differentiable inputs are the blocks and leaves that require gradients. The object `passes`
    computes the forward and the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, passes: _Traced | _Replayed, inputs: Sequence[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.passes = passes
        # A result on which the loss does not depend has no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        results, differentiable = passes.forward(ctx, inputs)
        ctx.mark_non_differentiable(
            *(x for x, has in zip(results, differentiable, strict=True) if not has)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, None, *ctx.passes.backward(ctx, gradients))


class _Traced:
    """The trace of one call of a graph, and of the backward pass through it.

    Attributes
    ----------
    given: the positions of the graph's inputs that may be different tensors in other calls.
    strides: the strides of the blocks of the inputs at `given`.
    rebuilders: for each result, a function that makes the result from its block.
    differentiable: for each result, whether it is differentiable.
    reached: for each result, whether the loss depends on it.
    gradient_strides: the strides of the gradients of the results that the loss depends on.
    trace: the traced passes.
    writes: whether the graph writes to one of the inputs at `given`.
    complete: whether all passes are traced: both, or the forward pass if nothing needs a gradient.
    """

    def __init__(self, graph: Callable[..., Any], grid: Grid) -> None:
        self._graph, self._grid, self._grad = graph, grid, torch.is_grad_enabled()
        self.complete = False
        self.reached: list[bool] = []
        self.gradient_strides: list[tuple[int, ...]] = []

    def forward(self, ctx: Any, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """Run and trace the graph; return the results' blocks, and which are differentiable."""
        self.given = [i for i, x in enumerate(inputs) if not _is_constant_input(x)]
        # The autograd graph of the traced call begins at these leaves, and ends at the results.
        inner = [_beginning(x) if _is_differentiable_input(x) else x for x in inputs]
        given = shards_of([inner[i] for i in self.given])
        self.strides = [x.stride() for x in given]
        before = list(map(_version, given))
        self.trace = now = Trace(given)
        with torch.set_grad_enabled(self._grad), traced(now, self._grid):
            call = enter_call(self)
            results = self._graph(*inner)
            call.leave()
        written = [i for i, x, v in zip(self.given, given, before, strict=True) if v != _version(x)]
        self.writes = bool(written)
        if any(_is_differentiable_input(inputs[i]) for i in written):
            now.hinder("it writes to one of its arguments")
        blocks, self.rebuilders = shards_of(results), list(map(_rebuilder, results))
        self.differentiable = [x.requires_grad for x in blocks]
        self._made = now.standing_for(blocks)
        if any(x.op == "get_attr" for x in self._made):
            now.hinder("it returns a parameter or a buffer")
        if any(self.differentiable):
            # torch refuses a second backward pass where something has been saved.
            ctx.save_for_backward(torch.empty(0))
            ends = [x for x in shards_of(inner) if x.requires_grad]
            leaves = [x for x, y in zip(inner, inputs, strict=True) if x is y]
            ctx.within = blocks, ends, leaves
        else:
            now.end(self._made, [])
            self.complete = True
        return [x.detach() for x in blocks], self.differentiable

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the backward pass of the traced call, and trace it the first time."""
        _ = ctx.saved_tensors
        blocks, ends, leaves = ctx.within
        reached = [x is not None for x in gradients]
        given = [x.contiguous() if is_expanded(x) else x for x in gradients if x is not None]
        run = partial(_gradients, list(compress(blocks, reached)), ends, given, leaves)
        if self.trace.is_backward:
            return run()
        self.reached, self.gradient_strides = reached, [x.stride() for x in given]
        with traced(self.trace, self._grid):
            self.trace.begin(given)
            found = run()
            nodes = self.trace.standing_for(found)
        self.trace.end(self._made, nodes)
        self.complete = True
        return found


def _gradients(
    roots: Sequence[Tensor],
    ends: Sequence[Tensor],
    given: Sequence[Tensor],
    leaves: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Return the gradients of `ends` in a backward pass from `roots` with the gradients `given`.

    Hooks of `leaves` do not run in this pass. Autograd runs the hooks later, when it accumulates
    the returned gradients.
    """
    hooks = [(of, dict(of)) for x in leaves if (of := hooks_of(x))]
    for of, _ in hooks:
        of.clear()
    try:
        return torch.autograd.grad(roots, ends, given, retain_graph=True, allow_unused=True)
    finally:
        for of, before in hooks:
            of.update(before)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _is_differentiable_input(x: Tensor) -> bool:
    return isinstance(x, DistTensor) or (x.requires_grad and not _is_constant_input(x))


def _beginning(x: Tensor) -> Tensor:
    """Return a detached `x` as a leaf of a traced call, for this rank's summand of the gradient."""
    y = x.detach()
    if isinstance(y, DistTensor):
        y.summed_by = "module"  # by the hooks of `x`
    return y.requires_grad_(x.requires_grad)


def _rebuilder(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that makes, from a block, a tensor with the shape and layout of `x`.

    For a plain tensor `x` the function returns its argument.
    """
    if not isinstance(x, DistTensor):
        return lambda block: block
    y, shape = x.stored, x.shape
    about = tuple(y.shape), y.cuts, y.grid

    def rebuilt(block: Tensor) -> Tensor:
        made = DistTensor(block, *about)
        return made if made.shape == shape else made.reshape(shape)

    return rebuilt


class _Replayed:
    """The functions that replay both passes of one case.

    Parameters
    ----------
    call: a traced call of the case, whose passes are replayed.
    backend: the backend of torch.compile that compiles the passes, or None.
    warn: a function that one rank calls if device graphs are impossible.
    """

    def __init__(self, call: _Traced, backend: str | None, grid: Grid, warn: Warn) -> None:
        self.call, passes = call, call.trace.passes
        self.source = "\n\n".join(one.source for one in passes)
        self._constants = [*passes[-1].constants.values()] if len(passes) > 1 else []
        """The constants of the backward pass, which must not be written to before this pass."""
        if backend is None:
            self._plain = [one.function() for one in passes]
            self._captured = captured(passes, len(call.differentiable), call.writes, grid, warn)
        else:
            from distconv.compiling.graph import compiled  # which most programs do without

            self._plain, self._captured = [compiled(one, backend) for one in passes], None
        self._pending: Callable[[], Any] = lambda: None

    def _begin(self, token: Tensor) -> Any:
        """Return the functions of both passes, as device graphs if they are available.

        Device graphs have memory for one call at a time. Autograd keeps `token` alive until the
        backward pass is over, so the graphs are in use while `token` exists.
        """
        if self._captured is None or self._captured.failed or self._pending() is not None:
            return self._plain
        self._pending = ref(token)
        return self._captured.passes

    def forward(self, ctx: Any, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """Return the blocks of the results, and for each whether it is differentiable."""
        call, token = self.call, torch.empty(0)
        passes = self._begin(token)
        given = shards_of([inputs[i] for i in call.given])
        with _as_traced():
            made = passes[0](*map(_restrided, given, call.strides))
        count = len(call.differentiable)
        results, kept = made[:count], made[count:]
        # The memory of a graph of the device stays where it is.
        saved, fixed = (kept, ()) if passes is self._plain else ((), kept)
        ctx.replay = passes[-1], fixed, len(saved)
        ctx.save_for_backward(*saved, *self._constants, token)
        # Autograd accepts a tensor object only once among the results.
        return [
            x.detach() if any(x is y for y in results[:i]) else x for i, x in enumerate(results)
        ], call.differentiable

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs and leaves that require gradients.

        Raises RuntimeError if the loss depends on other results than in the traced call.
        """
        call = self.call
        run, fixed, count = ctx.replay
        kept = *fixed, *ctx.saved_tensors[:count]
        if call.reached != [x is not None for x in gradients]:
            raise RuntimeError(
                "compile: the loss depends on other outputs of the compiled function than in the "
                "traced call; compile the function once for each loss, or return only the outputs "
                "that the loss uses"
            )
        present = (x for x in gradients if x is not None)
        given = map(_restrided, present, call.gradient_strides)
        with _as_traced():
            found: Sequence[Tensor | None] = run(*kept, *given)
        return found


@contextmanager
def _as_traced() -> Iterator[None]:
    """Turn off autograd and autocast within the context, whose work the traced calls contain."""
    with torch.no_grad(), ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _restrided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return `x`, detached, with `strides`; copy `x` if its strides differ."""
    if x.stride() == strides:
        return x.detach()
    copy = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return copy.copy_(x)
