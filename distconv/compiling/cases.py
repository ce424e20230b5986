"""Cases of compiled steps and modules: keys, results, and comparison of two traces.

Calls are of one case if they differ in the elements of tensors only; each case is traced and
replayed by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distconv.compiling.program import Existing, Program, TracedCall, TracedStep
from distconv.compiling.variables import told, unknown_kind
from distconv.device.kinds import KINDS
from distconv.grid.interface import Grid
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import replaced, shards_of, tensors_in
from distconv.torch_private import buffers_of, hooks_of_module, parts_and_parameters

MOST_CASES = 16
"""The most cases, such as shapes of a last mini-batch, that are traced."""

AS_IT_IS, TRACED = -1, -2
"""Numbers of calls that run as they are, and of the first trace of a case; see `Calls`."""

CAPTURE = "graph"
"""The backend that captures a step as graphs of its device."""

_DEVICES = ("cpu", *KINDS)
"""The kinds of devices on which a program may run by autocast."""

_SETTINGS = {bool, int, float, str, tuple, list}
"""The types of attributes that distinguish cases, such as a module's mode, or a rate of dropout."""

_FEW = 4096
"""The largest number of elements of a constant that is compared by its elements."""


def check_backend(backend: str | None) -> None:
    """Raise ValueError if neither distconv nor torch.compile knows the backend."""
    if backend in (None, CAPTURE) or backend in torch.compiler.list_backends(exclude_tags=()):
        return
    known = ", ".join(map(repr, (CAPTURE, *torch.compiler.list_backends())))
    raise ValueError(
        f"compile: backend={backend!r} is unknown; give None to replay the calls as they are, one "
        f"of {known}, or another one registered with torch.compile"
    )


def key_of_call(args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the part of a case's key that follows from a call's arguments, and torch's modes."""
    if not any(isinstance(x, DistTensor) for x in tensors):
        raise TypeError(
            "compile: no DistTensor is among the arguments; pass the batch as tensors, also in "
            "lists, tuples and dictionaries"
        )
    about = tuple(
        (
            x.shape,
            x.dtype,
            x.requires_grad,
            (x.cuts, x.grid, x.unmerged is None) if isinstance(x, DistTensor) else x.stride(),
        )
        for x in tensors
    )
    ids = [id(x) for x in tensors]
    same = tuple(map(ids.index, ids))
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
    )
    return about, same, unknown_kind((args, kwargs)) or told((args, kwargs)), modes


def why_not_replayed(args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> str:
    """Return why calls with such arguments cannot be replayed, in words; "" if they can."""
    if any(isinstance(x, DistTensor) and x.unmerged is not None for x in tensors):
        return "a tensor among its arguments has merged dimensions"
    if any(map(is_expanded, shards_of(tensors))):
        return "a tensor among its arguments is expanded, with several elements in one place"
    kind = unknown_kind((args, kwargs))
    if kind is not None:
        return (
            f"an argument is a {kind.__module__}.{kind.__qualname__}, which may change unseen; "
            "pass tensors, numbers and strings"
        )
    return ""


def is_expanded(x: Tensor) -> bool:
    """Return whether several elements of a tensor share one place in memory, as after expand()."""
    return any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True))


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters of modules, without those of their submodules."""
    # By m.parameters() it would take many times as long.
    tables = (parts_and_parameters(m)[0] for m in modules)
    return [p for table in tables for p in table.values() if p is not None]


def key_of_modules(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> Any:
    """Return the part of a case's key that follows from modes, settings and hooks of modules."""
    tables = [table for m in modules for table in (parts_and_parameters(m)[1], buffers_of(m))]
    found = [x for m in modules for x in vars(m).values() if type(x) in _SETTINGS]
    settings = tuple(x for x in found if type(x) is not list)
    try:
        hash(settings)
    except TypeError:  # tuples with lists in them; elsewhere the values themselves are faster
        settings = tuple(map(told, settings))
    return (
        settings,
        tuple((id(p), p.dtype, p.requires_grad) for p in parameters),
        tuple(x.stride() for x in shards_of(parameters)),
        tuple(id(x) for table in tables for x in table.values()),
        tuple(id(y) for x in found if type(x) is list for y in x if isinstance(y, nn.Module)),
        tuple(number for m in modules for hooks in hooks_of_module(m) for number in hooks),
    )


class Results:
    """The result of a step: its tensors' blocks, and the lists and dictionaries around them.

    A replay makes its own result of this structure and new blocks.
    """

    def __init__(self, returned: Any) -> None:
        tensors = tensors_in(returned)
        self.blocks = shards_of(tensors)
        """The tensors' blocks on this rank."""
        self._places = [torch.empty(0) for _ in tensors]
        others = {id(x): place for x, place in zip(tensors, self._places, strict=True)}
        self._structure = replaced(returned, others)
        self._rebuilders = [_rebuilder(x) for x in tensors]
        self.holds_fractions = _holds_fractions(returned)
        self.words = repr(self._structure)
        """The structure as a text, to compare."""

    def of(self, blocks: Iterable[Tensor]) -> Any:
        """Return a new result of this structure, whose tensors have the given blocks."""
        made = (rebuilt(x) for rebuilt, x in zip(self._rebuilders, blocks, strict=True))
        return replaced(self._structure, dict(zip(map(id, self._places), made, strict=True)))


def _holds_fractions(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_holds_fractions, x))
    return _holds_fractions([*x.values()]) if isinstance(x, dict) else isinstance(x, float)


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


def difference(mine: TracedStep, theirs: TracedStep) -> str:
    """Return in words how two traces of one case differ; "" if they agree."""
    for a, b in zip(mine.calls, theirs.calls, strict=False):
        if a != b:
            return f"it is not the same each time: {_in_words(a)}, and then {_in_words(b)}"
    rest = len(mine.calls), mine.results, mine.gradients
    if rest != (len(theirs.calls), theirs.results, theirs.gradients):
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
        if x is not y and (n in written or not is_equal(x, y)):
            return (
                f"it uses another tensor of shape {tuple(y.shape)} each time, which is not "
                "among its arguments"
            )
    return ""


def _in_words(call: TracedCall) -> str:
    return f"{call.function.__name__}{call.arguments}"


def is_equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are one object, or small and equal in their elements."""
    if x is y or x.numel() > _FEW:
        return x is y
    return x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)


def grid_of(tensors: Iterable[Tensor]) -> Grid:
    """Return the grid of the first DistTensor in `tensors`."""
    return next(x.grid for x in tensors if isinstance(x, DistTensor))


class Calls:
    """The calls of a compiled step or module, which a rank traces or replays only if all ranks do.

    Each call has a number, which the ranks compare. A replayed call has the number of its case: 0,
    1, ... in the order in which cases became ready for replay. A traced call has the number
    `TRACED` for the first trace of its case, and lower numbers for later traces. Any other has
    `AS_IT_IS`.

    Parameters
    ----------
    name: "step" or "module", for warnings.

    Attributes
    ----------
    made: the number of cases that can be replayed.
    """

    def __init__(self, name: str) -> None:
        self._name, self._warned, self._full = name, False, False
        self.made = 0

    def agree(self, number: int, grid: Grid) -> bool:
        """Return whether the call's number is equal on all ranks; warn once if not. Collective."""
        if grid.journal.agrees(f"compiled {self._name}", number):
            return True
        if grid.rank == 0 and not self._warned:
            warnings.warn(
                f"compile: the {self._name} is called in different cases on different ranks, and "
                "runs as it is then; call it with the same arguments, modes and gradients on every "
                "rank",
                stacklevel=3,
            )
        self._warned = True
        return False

    def take_another(self, known: int, changed: str = "") -> bool:
        """Return whether one more case may be traced; warn once if there are too many.

        `known` is the number of cases so far. `changed` is the name of a variable by which the new
        case differs from the one before, or ""; the warning names it.
        """
        if known < MOST_CASES:
            return True
        if not self._full:
            named = f", such as values of {changed!r}," if changed else ","
            warnings.warn(
                f"compile: the {self._name} is called in more than {MOST_CASES} cases{named} and "
                "runs as it is in others; pass numbers that change as tensors",
                stacklevel=3,
            )
        self._full = True
        return False


def obstacle_on_any_rank(
    why: str, grid: Grid, name: str, stacklevel: int, instead: str = "runs as it is"
) -> bool:
    """Return whether any rank has a reason not to replay, and warn of it on one rank. Collective.

    Parameters
    ----------
    why: the reason on this rank; "" if there is none.
    name: the subject of the warning, such as "the step".
    stacklevel: the warning's stack level, counted from the caller.
    instead: the subject's behaviour from now on, such as "runs as it is".
    """
    reasons = grid.all_gather_object(why)
    found = next(filter(None, reasons), "")
    if found and grid.rank == reasons.index(found):
        warnings.warn(f"compile: {name} {instead}, as {found}", stacklevel=stacklevel + 1)
    return bool(found)


def program_of(step: TracedStep, backend: str | None) -> Program:
    """Return a traced step as a Python function, compiled by `backend` of torch.compile if any."""
    if backend is not None:
        from distconv.compiling.graph import compiled  # which most programs do without

        step = compiled(step, backend)
    return Program(step)


@contextmanager
def as_traced() -> Iterator[None]:
    """Turn off autograd and autocast within the context, as traced calls contain their work."""
    with torch.no_grad(), ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def restrided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return `x`, detached, with these strides; it is copied unless it has them already."""
    if x.stride() == strides:
        return x.detach()
    copy = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return copy.copy_(x)
