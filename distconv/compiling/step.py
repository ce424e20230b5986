"""`compile`: a training step that is traced, and replayed without Python around its work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from distconv.compiling.program import Existing, Program, TracedCall, TracedStep
from distconv.compiling.tracing import Trace, modules_called, traced
from distconv.device.kinds import KINDS
from distconv.grid.interface import Grid
from distconv.model.gradient_reduction import reduction_of
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import replaced, shards_of, tensors_in
from distconv.torch_private import parts_and_parameters

Given = ParamSpec("Given")
Result = TypeVar("Result")

_MOST_CASES = 16
"""The number of cases, shapes of a last mini-batch for instance, that are traced at most."""

_DEVICES = ("cpu", *KINDS)
"""The kinds of devices on which a step may run by autocast."""

_PLACE: Any = ...
"""Stands for a tensor among the arguments that tell cases apart."""

_FEW = 4096
"""The number of elements up to which a constant is compared by its elements."""


def compile(
    step: Callable[Given, Result], *, backend: str | None = None
) -> CompiledStep[Given, Result]:
    """Return a function that does as `step`, replayed from its fourth call on.

    A step is what a loop repeats: the forward pass, a loss, `backward()`, and the optimizer's step,
    or a part of that. It is traced on all ranks as it runs: every function of torch on this rank's
    blocks, every message, in one order. A replay makes the same calls without modules, autograd,
    rules and hooks, and gives the same bits. All ranks of the grid call it together.

    The first call of a case runs as it is; the second and the third are traced, and have to agree.
    Cases differ in shapes, types and layouts of tensors among the arguments, in other arguments, in
    modes of modules, of autograd and of autocast, in parameters that are frozen, in `no_sync`, and
    in whether gradients are there. Optimizers step as ever, by their present settings.

    In a replay Python runs no line of the step: numbers that it reads from variables are those of
    the trace. Let schedulers step, and numbers be printed, outside. A step that cannot be replayed,
    as it reads elements of a tensor (`loss.item()`) or uses other numbers each time, goes on as it
    is, and warns once with the reason and the line.

    Tensors of the result have no gradients to compute. They are found in lists, tuples and
    dictionaries, as those among the arguments are.

    Parameters
    ----------
    step: a function of tensors, of which at least one is a DistTensor.
    backend: of torch.compile, "inductor" say, which makes fewer kernels of the calls between
        messages. That takes a minute or so at the fourth call, and results are equal to
        rounding. None replays the calls as they are.
    """
    return CompiledStep(step, backend)


class CompiledStep(Generic[Given, Result]):
    """A step that is replayed; see `compile`.

    Attributes
    ----------
    replays: how many calls have been replays.
    """

    def __init__(self, step: Callable[Given, Result], backend: str | None = None) -> None:
        self._step, self._backend = step, backend
        self._called: dict[nn.Module, None] = {}
        """All that have been called within the step."""
        self._cases: dict[Any, list[_Replayed]] = {}
        self._last: dict[Any, _TracedCase] = {}
        self._seen: set[Any] = set()
        self._eager: set[Any] = set()
        """The cases that are not replayed."""
        self.replays = 0
        update_wrapper(self, step)

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run the step."""
        tensors = tensors_in(args, kwargs)
        key = _key(args, kwargs, tensors), _circumstances(self._called)
        for case in self._cases.get(key, ()):
            if case.fits():
                self.replays += 1
                result: Result = case.replay(tensors)
                return result
        if key in self._eager:
            return _without_gradients(self._step(*args, **kwargs))
        if key in self._seen:
            return self._trace(key, tensors, args, kwargs)
        if len(self._seen) == _MOST_CASES:
            self._eager.add(key)
            warnings.warn(
                f"compile: the step is called in more than {_MOST_CASES} cases, and runs as it is "
                "in others; pass numbers that change as tensors",
                stacklevel=2,
            )
        with modules_called(self._called):
            result = _without_gradients(self._step(*args, **kwargs))
        # As it will be the next time, with the modules that are known now.
        self._seen.add((key[0], _circumstances(self._called)))
        return result

    @property
    def source(self) -> str:
        """Return the functions that are replayed, in Python."""
        return "\n\n".join(case.source for cases in self._cases.values() for case in cases)

    def _trace(self, key: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Result:
        before = self._last.pop(key, None)
        case = _TracedCase(tensors)
        with traced(case.trace), modules_called(self._called):
            result = self._step(*args, **kwargs)
        case.finish(tensors, result)
        why = case.trace.obstacle or (before.difference(case) if before else "")
        grid = next(x.grid for x in tensors if isinstance(x, DistTensor))
        reasons = grid.all_gather_object(why)
        found = next(filter(None, reasons), "")
        if found:
            self._eager.add(key)
            if grid.rank == reasons.index(found):
                warnings.warn(f"compile: the step runs as it is, as {found}", stacklevel=3)
        elif before is None:
            self._last[key] = case
        else:
            self._cases.setdefault(key, []).append(_Replayed(case, self._backend))
        return _without_gradients(result)


def _key(args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the part of a case's key that follows from arguments and modes."""
    if not any(isinstance(x, DistTensor) for x in tensors):
        raise TypeError("compile: no DistTensor is among the arguments of the step; pass the batch")
    about = tuple(
        (
            x.shape,
            x.dtype,
            x.requires_grad,
            (x.cuts, x.grid) if isinstance(x, DistTensor) else x.stride(),
        )
        for x in tensors
    )
    rest = replaced((args, kwargs), dict.fromkeys(map(id, tensors), _PLACE))
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
    )
    return about, repr(rest), modes


def _circumstances(modules: Iterable[nn.Module]) -> Any:
    """Return the part of a case's key that follows from the state of modules."""
    # By m.parameters() it would take many times as long.
    tables = (parts_and_parameters(m)[0] for m in modules)
    parameters = [p for table in tables for p in table.values() if p is not None]
    reductions = {r: None for r in map(reduction_of, modules) if r is not None}
    return (
        tuple(m.training for m in modules),
        tuple((id(p), p.requires_grad) for p in parameters),
        tuple(x.grad is None for x in shards_of(parameters)),
        tuple(r.enabled for r in reductions),
    )


def _without_gradients(result: Any) -> Any:
    return replaced(result, {id(x): x.detach() for x in tensors_in(result)})


class _TracedCase:
    """One traced call of a step, with the structure of its result.

    Parameters
    ----------
    tensors: among the arguments.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.trace = Trace(shards_of(tensors))
        if any(isinstance(x, DistTensor) and x.unmerged is not None for x in tensors):
            self.trace.hinder("a tensor among its arguments has merged dimensions")
        self.strides = [x.stride() for x in shards_of(tensors)]
        self.places: list[Tensor] = []
        """Stand for the tensors of the result in its structure."""
        self.structure: Any = None
        self.made: list[Any] = []
        self.step = TracedStep([], [], [], {}, [])

    def finish(self, arguments: Iterable[Tensor], result: Any) -> None:
        """Take the result of the step, traced with these tensors among its arguments."""
        if any(x.requires_grad for x in arguments):
            self.trace.hinder("a tensor among its arguments requires gradients")
        tensors = tensors_in(result)
        self.places = [torch.empty(0) for _ in tensors]
        others = {id(x): place for x, place in zip(tensors, self.places, strict=True)}
        self.structure = replaced(result, others)
        self.made = [
            (tuple(x.shape), x.cuts, x.grid) if isinstance(x, DistTensor) else None for x in tensors
        ]
        trace = self.trace
        results = [trace.standing_for(x) for x in shards_of(tensors)]
        gradients = trace.gradients()
        step = TracedStep(trace.inputs, trace.calls, results, trace.constants, gradients)
        self.step = step.reduced()

    def difference(self, later: _TracedCase) -> str:
        """Return in words how a later call of the same case differs; "" where it does not."""
        mine, theirs = self.step, later.step
        for a, b in zip(mine.calls, theirs.calls, strict=False):
            if a != b:
                return f"it is not the same each time: {_told(a)}, and then {_told(b)}"
        rest = (len(mine.calls), mine.results, mine.gradients, repr(self.structure))
        if rest != (len(theirs.calls), theirs.results, theirs.gradients, repr(later.structure)):
            return "it is not the same each time"
        written = {
            x.number
            for call in theirs.calls
            if not call.is_pure
            for x in call.used
            if isinstance(x, Existing)
        }
        for n, x in mine.constants.items():
            y = theirs.constants[n]
            if x is not y and (n in written or x.numel() > _FEW or not _equal(x, y)):
                return (
                    f"it uses another tensor of shape {tuple(y.shape)} each time, which is not "
                    "among its arguments"
                )
        return ""


def _told(call: TracedCall) -> str:
    return f"{call.function.__name__}{call.arguments}"


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)


class _Replayed:
    """A step as it is replayed."""

    def __init__(self, case: _TracedCase, backend: str | None) -> None:
        step = case.step
        if backend is not None:
            from distconv.compiling.graph import compiled  # which most programs do without

            step = compiled(step, backend)
        program = Program(step)
        self._run, self.source = program.run, program.source
        self._structure, self._places = case.structure, case.places
        self._made, self._strides = case.made, case.strides
        used = set(map(id, case.step.constants.values()))
        self._gradients = [
            (leaf, first) for leaf, first in case.trace.leaves.values() if id(first) in used
        ]

    def fits(self) -> bool:
        """Return whether the gradients to which the step adds are the same tensors."""
        return all(leaf.grad is gradient for leaf, gradient in self._gradients)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the step returns for these tensors."""
        given = shards_of(tensors)
        with torch.no_grad(), _without_autocast():
            blocks = [
                x.detach() if x.stride() == strides else _restrided(x, strides)
                for x, strides in zip(given, self._strides, strict=True)
            ]
            results = self._run(*blocks)
            for x, block in zip(given, blocks, strict=True):
                if x.data_ptr() != block.data_ptr():
                    x.copy_(block)  # which the step may have written to
        made = [
            x if about is None else _distributed(x, *about)
            for x, about in zip(results, self._made, strict=True)
        ]
        others = {id(place): x for place, x in zip(self._places, made, strict=True)}
        return replaced(self._structure, others)


def _distributed(block: Tensor, shape: Any, cuts: Any, grid: Grid) -> DistTensor:
    return DistTensor(block, shape, cuts, grid)


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _restrided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    copy = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return copy.copy_(x)
