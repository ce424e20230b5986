"""How messages name ranks, lines of the program, modules, and calls with their layouts."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from distconv.geometry.layout import Layout
from distconv.geometry.topology import Topology
from distconv.torch_private import CODE_OF_MODULE_CALL, autocast_is_on
from distconv.transport.launch import switched_on

# Texts that say in what ranks agree or differ, for error messages.


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return numbers of ranks as text, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(runs) > 1 or runs[0][0] != runs[0][1] else ''} {words}"


def by_ranks(texts: Sequence[str], between: str) -> str:
    """Return all ranks' texts as one, ranks of equal texts together: "ranks 0-2: a; rank 3: b".

    `between` stands between ranks and text.
    """
    return "; ".join(
        f"{ranks_in_words(r for r, text in enumerate(texts) if text == said)}{between}{said}"
        for said in dict.fromkeys(texts)
    )


def errors_in_words(met: Sequence[str | None]) -> str:
    """Return the last error of each rank as a sentence; "" where all have met the same, or none."""
    if len(set(met)) < 2:
        return ""  # the ranks have caught it together
    return f"Errors differ. {by_ranks([error or 'no error' for error in met], ': ')}."


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each value that differs: "x is 1 on rank 0 and 2 on rank 1".

    `everyone` has the values of each rank by name; a name that a rank lacks is "missing" there.
    """
    found = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name, "missing") for theirs in everyone]
        if all(value == values[0] for value in values):
            continue
        distinct = [value for i, value in enumerate(values) if value not in values[:i]]
        where = (
            f"{one} on {ranks_in_words(r for r, value in enumerate(values) if value == one)}"
            for one in distinct
        )
        found.append(f"{name} is {' and '.join(where)}")
    return found


# Lines of the user's program, such as "train.py:41 in main", that threads are running now.
#
# They are read from Python's stack of frames on request.


_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LAYERS = str(Path(__file__).resolve().parents[2] / "layers") + os.sep
_OWN = (_PACKAGE, _LAYERS)
_LIBRARIES = (
    str(Path(torch.__file__).resolve().parent) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


def user_line() -> str:
    """Return the innermost line of the user's program in the current stack of calls."""
    return _user_line(sys._getframe(1))


def place_of(thread: int) -> str:
    """Return the innermost line of the user's program that a thread, by its id, is running."""
    return _user_line(sys._current_frames().get(thread))


def is_parked(thread: int) -> bool:
    """Return whether a thread, by its id, has ended, or waits in Python's threading or queue."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return True
    return Path(frame.f_code.co_filename).stem in {"threading", "queue", "_base", "thread"}


def is_of_program(file: str) -> bool:
    """Return whether a source file belongs to the user's program, not to an installed library."""
    return not file.startswith((*_OWN, *_LIBRARIES))


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program from `frame` outwards.

    If there is none, the innermost line of an installed library.
    """
    fallback = None
    for outer in outwards(frame):
        file = outer.f_code.co_filename
        if file.startswith(_OWN):
            continue
        if is_of_program(file):
            return _line(outer)
        fallback = outer if fallback is None else fallback
    return "an unknown place" if fallback is None else _line(fallback)


def _line(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    with suppress(OSError, ValueError):  # where it lies elsewhere, or the current folder is gone
        file = file.relative_to(Path.cwd())
    function = frame.f_code.co_name
    within = "" if function == "<module>" else f" in {function}"
    return f"{file}:{frame.f_lineno}{within}"


def hide_own_frames(error: BaseException) -> None:
    """Remove the library's frames from the traceback of an error, and of the errors it came from.

    Of an error that the library raised, only the frames of the user's program are kept: the last is
    the line that made the call. With DISTCONV_DEBUG=1, and for errors of the library's own
    commands, nothing is removed.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain and not switched_on("DISTCONV_DEBUG"):
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without_own_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the library's frames, or as it is if no program has called it."""
    entries = []
    outer = traceback
    while outer is not None:
        entries.append((outer.tb_frame.f_code.co_filename, outer))
        outer = outer.tb_next
    last = max((i for i, (file, _) in enumerate(entries) if is_of_program(file)), default=None)
    if last is None:
        return traceback
    raised_here = any(file.startswith(_OWN) for file, _ in entries[last:])
    kept = None
    for file, entry in reversed(entries):
        if is_of_program(file) or not (raised_here or file.startswith(_OWN)):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


# The names of the modules that are being called, read from Python's stack of frames.


_BEHALF: ContextVar[list[nn.Module] | None] = ContextVar("distconv_behalf", default=None)
"""The calls of modules, innermost first, for which deferred work is done now."""


def module_calls() -> list[nn.Module]:
    """Return the modules that are being called, innermost first."""
    return [
        frame.f_locals["self"]
        for frame in outwards(sys._getframe(1))
        if frame.f_code is CODE_OF_MODULE_CALL
    ]


@contextmanager
def on_behalf_of(modules: list[nn.Module]) -> Iterator[None]:
    """Let `module_path` name these modules, innermost first, within the context.

    It is for work of these modules that is done only after their calls.
    """
    token = _BEHALF.set(modules)
    try:
        yield
    finally:
        _BEHALF.reset(token)


def module_path() -> str:
    """Return the name of the module that is being called, as the outermost module names it.

    "" for the outermost module itself, and outside of any call.
    """
    calls = _BEHALF.get()
    calls = module_calls() if calls is None else calls
    names = [_name_within(outer, inner) for inner, outer in pairwise(calls)]
    return ".".join(filter(None, reversed(names)))


def _name_within(outer: nn.Module, inner: nn.Module) -> str:
    """Return the name of `inner` within `outer`; its class name if `outer` does not contain it."""
    for modules in (outer.named_children(), outer.named_modules()):
        for name, part in modules:
            if part is inner:
                return name
    return type(inner).__name__


# The torch function on DistTensors that each thread is running, and its text for comparison.


Call = tuple[Any, Sequence[Any], Mapping[str, Any] | None]
"""A torch function on DistTensors, or the name of a method, with its arguments."""

NO_CALL: Call = (None, (), None)
"""Marks that no such function is running."""

_THREADS: dict[int, dict[str, Any]] = {}
"""The `CURRENT` of each thread."""


_WORDS = 300
"""The number of characters of an error that other ranks are told."""


class CurrentCall(threading.local):
    """The outermost torch function on DistTensors that the current thread is running."""

    def __init__(self) -> None:
        _THREADS[threading.get_ident()] = self.__dict__

    call: Call = NO_CALL
    """The outermost function on DistTensors; `NO_CALL` where none is running."""
    error: str | None = None
    """The last error that a function on DistTensors has raised, in words."""


CURRENT = CurrentCall()


class running:
    """A context in which the journal and errors name `name(*arguments)` as the running function.

    A context within a running function on DistTensors has no effect. Every operator enters one; a
    generator would take 0.7 us longer.
    """

    __slots__ = ("_before", "_call")

    def __init__(self, name: str, *arguments: Any):
        self._call: Call = (name, arguments, None)

    def __enter__(self) -> None:
        self._before = CURRENT.call
        if self._before is NO_CALL:
            CURRENT.call = self._call

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        CURRENT.call = self._before
        if error is not None:
            note_error(self._call[0], error)


def note_error(function: Any, error: BaseException) -> None:
    """Keep an error that `function` raises, for other ranks that may wait for this one in vain.

    The program may catch it, and only this rank may have met it. An error that says that it is on
    all ranks, by an attribute `on_all_ranks`, is not kept.
    """
    if not getattr(error, "on_all_ranks", False):
        words, kind = str(error).partition("\n")[0][:_WORDS], type(error).__name__
        CURRENT.error = f"{kind}: {words} in {operator_name(function)} at {user_line()}"


def error_of(thread: int) -> str | None:
    """Return the last error of functions on DistTensors in a thread, by its id; or None."""
    error: str | None = _THREADS.get(thread, {}).get("error")
    return error


def operator_name(function: Any) -> str:
    """Return the name of a torch function, or of any callable, as a user writes it."""
    if isinstance(function, str):
        return function
    return resolve_name(function) or getattr(function, "__name__", repr(function))


def operator_of(thread: int) -> str | None:
    """Return the name of the function on DistTensors that a thread, by its id, runs; or None."""
    function, _, _ = _THREADS.get(thread, {}).get("call", NO_CALL)
    return None if function is None else operator_name(function)


PARAMETERS: Any = WeakIdKeyDictionary()
"""The parameters of parallelized modules, each with its index in its module."""


@lru_cache(maxsize=8192)
def function_in_words(function: Any, topology: Topology | None) -> str:
    """Return a function and a grid as text: " in sum on ProcessGrid(height=2)"; "" for None."""
    if function is None:
        return ""
    on = "" if topology is None else f" on ProcessGrid({topology})"
    return f" in {operator_name(function)}{on}"


def call_in_words(call: Call, known_from: int) -> str:
    """Return a call with its arguments as text, which must be equal on all ranks.

    For example " in torch.sum((4, 8) float32 Layout(width='width') on ProcessGrid(width=2), 1)".
    Active types of autocast are added. A tensor made after journal entry `known_from` or a later
    one is named by that entry.
    """
    function, arguments, keywords = call
    words = [_in_words(x, known_from) for x in arguments]
    words += [f"{name}={_in_words(x, known_from)}" for name, x in (keywords or {}).items()]
    if autocast_is_on():
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        on = filter(torch.is_autocast_enabled, kinds)
        words.append(f"autocast={', '.join(str(torch.get_autocast_dtype(kind)) for kind in on)}")
    return f" in {operator_name(function)}({', '.join(words)})"


def _in_words(argument: Any, known_from: int) -> str:
    """Return the text of an argument, without anything that may differ between ranks."""
    kind = type(argument)
    if kind in _AS_WRITTEN:
        return str(argument)
    if isinstance(argument, Tensor):
        return _tensor_in_words(argument, known_from)
    if kind is slice:
        argument = "slice", argument.start, argument.stop, argument.step
    if isinstance(argument, (tuple, list)):
        return f"({', '.join(_in_words(value, known_from) for value in argument)})"
    if isinstance(argument, dict):
        return _in_words([*argument.items()], known_from)
    if kind is str:
        name: str = argument.partition(":")[0]  # a device has another number on each rank
        return name
    if isinstance(argument, np.generic):
        value = argument.item()
        return repr(value) if isinstance(value, np.generic) else _in_words(value, known_from)
    return kind.__name__


def _tensor_in_words(x: Tensor, known_from: int) -> str:
    number, made_after = PARAMETERS.get(x), getattr(x, "made_after", None)
    name = "" if number is None else f"parameter {number}, "
    if number is None and made_after is not None and made_after >= known_from:
        name = f"made after step {made_after}, "
    words = f"{name}{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    cuts, grid = getattr(x, "cuts", None), getattr(x, "grid", None)
    if cuts is None or grid is None:
        return words
    return f"{words} {Layout.of(cuts)} on ProcessGrid({grid.topology})"


_AS_WRITTEN = {
    *(int, bool, float, complex, type(None)),
    *(torch.dtype, torch.memory_format, Layout),
}
"""The types whose texts tell everything."""
