"""Texts for messages: ranks, lines of the user's program, modules, and calls with layouts."""

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

# Texts of error messages about values on which ranks agree or differ.


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return rank numbers as text, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(runs) > 1 or runs[0][0] != runs[0][1] else ''} {words}"


def by_ranks(texts: Sequence[str], between: str) -> str:
    """Return the texts of all ranks as one text, such as "ranks 0-2: a; rank 3: b".

    `texts` has the text of each rank. Ranks with equal texts are named together. `between`, such as
    ": ", separates the ranks from their text.
    """
    return "; ".join(
        f"{ranks_in_words(r for r, text in enumerate(texts) if text == said)}{between}{said}"
        for said in dict.fromkeys(texts)
    )


def errors_in_words(met: Sequence[str | None]) -> str:
    """Return a sentence with the last error of each rank, or "" if the errors are equal.

    `met` has the text of each rank's last error, or None for a rank without an error.
    """
    if len(set(met)) < 2:
        return ""  # all ranks have caught the same error, or none
    return f"Errors differ. {by_ranks([error or 'no error' for error in met], ': ')}."


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each value that differs between ranks: "x is 1 on rank 0 and 2 on rank 1".

    `everyone` has for each rank its values by name. A value that a rank lacks counts as "missing".
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
# The lines are read from Python's stack of frames on request.


_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LAYERS = str(Path(__file__).resolve().parents[2] / "layers") + os.sep
_OWN = (_PACKAGE, _LAYERS)
_LIBRARIES = (
    str(Path(torch.__file__).resolve().parent) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


def user_line() -> str:
    """Return the innermost line of the user's program that the current thread is running."""
    return _user_line(sys._getframe(1))


def place_of(thread: int) -> str:
    """Return the innermost line of the user's program that the thread of id `thread` is running."""
    return _user_line(sys._current_frames().get(thread))


def is_parked(thread: int) -> bool:
    """Return whether a thread, given by its id, has ended or waits for a lock or a queue."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return True
    return Path(frame.f_code.co_filename).stem in {"threading", "queue", "_base", "thread"}


def is_of_program(file: str) -> bool:
    """Return whether the source file `file` belongs to the user's program, not to a library."""
    return not file.startswith((*_OWN, *_LIBRARIES))


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield `frame`, its caller, and all further callers, outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program from `frame` outwards, for a message.

    If no such line exists, return the innermost line of another library.
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
    with suppress(OSError, ValueError):  # the file is elsewhere, or the current folder is removed
        file = file.relative_to(Path.cwd())
    function = frame.f_code.co_name
    within = "" if function == "<module>" else f" in {function}"
    return f"{file}:{frame.f_lineno}{within}"


def hide_own_frames(error: BaseException) -> None:
    """Remove the library's frames from the tracebacks of `error` and of the errors that caused it.

    If the library raised the error, the traceback then ends at the line of the user's program that
    called the library. Nothing is removed with DISTCONV_DEBUG=1, or for errors of the library's own
    commands.
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
    """Return `traceback` without the library's frames; unchanged without a frame of the user."""
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
"""The modules, innermost first, for whose earlier calls deferred work runs now; None otherwise."""


def module_calls() -> list[nn.Module]:
    """Return the torch modules whose calls are running in this thread, innermost first."""
    return [
        frame.f_locals["self"]
        for frame in outwards(sys._getframe(1))
        if frame.f_code is CODE_OF_MODULE_CALL
    ]


@contextmanager
def on_behalf_of(modules: list[nn.Module]) -> Iterator[None]:
    """Name `modules`, innermost first, in messages and records within the context.

    The context is for work that a call of these modules has deferred until after the call.
    """
    token = _BEHALF.set(modules)
    try:
        yield
    finally:
        _BEHALF.reset(token)


def module_path() -> str:
    """Return the name of the module whose call is running, such as "encoder.conv1".

    The name is that within the outermost module. Return "" for the outermost module itself, and
    outside of any call.
    """
    calls = _BEHALF.get()
    calls = module_calls() if calls is None else calls
    names = [_name_within(outer, inner) for inner, outer in pairwise(calls)]
    return ".".join(filter(None, reversed(names)))


def _name_within(outer: nn.Module, inner: nn.Module) -> str:
    """Return the name of the submodule `inner` of `outer`; otherwise the class name of `inner`."""
    for modules in (outer.named_children(), outer.named_modules()):
        for name, part in modules:
            if part is inner:
                return name
    return type(inner).__name__


# The torch function on DistTensors that each thread is running, and its text for comparison.


Call = tuple[Any, Sequence[Any], Mapping[str, Any] | None]
"""A torch function on DistTensors, or the name of a method, with its arguments and keywords."""

NO_CALL: Call = (None, (), None)
"""The `Call` of a thread that is not running a function on DistTensors."""

_THREADS: dict[int, dict[str, Any]] = {}
"""The attributes of `CURRENT` in each thread, by the thread's id."""


_WORDS = 300
"""The largest number of characters of an error that is shown to other ranks."""


class CurrentCall(threading.local):
    """The call on DistTensors that the current thread is running, and the thread's last error."""

    def __init__(self) -> None:
        _THREADS[threading.get_ident()] = self.__dict__

    call: Call = NO_CALL
    """The outermost running function on DistTensors with its arguments, or `NO_CALL`."""
    error: str | None = None
    """The text of the last error that a function on DistTensors has raised, or None."""


CURRENT = CurrentCall()


class running:
    """A context in which the journal and errors name `name(*arguments)` as the running function.

    Within a running function on DistTensors the context has no effect. It is a class, as every
    operator enters such a context and a generator would take 0.7 us longer.
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
    """Keep the text of `error`, which `function` raises, for reports of ranks that wait in vain.

    If only this rank raises, and the program catches the error, other ranks may wait for this rank.
    An error with a true attribute `on_all_ranks` is not kept.
    """
    if not getattr(error, "on_all_ranks", False):
        words, kind = str(error).partition("\n")[0][:_WORDS], type(error).__name__
        CURRENT.error = f"{kind}: {words} in {operator_name(function)} at {user_line()}"


def error_of(thread: int) -> str | None:
    """Return the last error that the thread of id `thread` raised in a function on DistTensors.

    None if it raised none.
    """
    error: str | None = _THREADS.get(thread, {}).get("error")
    return error


def operator_name(function: Any) -> str:
    """Return the name of `function` as a user writes it, such as "torch.sum".

    `function` is a torch function, another callable, or a name, which is returned unchanged.
    """
    if isinstance(function, str):
        return function
    return resolve_name(function) or getattr(function, "__name__", repr(function))


def operator_of(thread: int) -> str | None:
    """Return the name of the function on DistTensors that a thread, given by its id, is running.

    None if it runs none.
    """
    function, _, _ = _THREADS.get(thread, {}).get("call", NO_CALL)
    return None if function is None else operator_name(function)


PARAMETERS: Any = WeakIdKeyDictionary()
"""The index of each parameter of parallelized modules within its module, by the parameter."""


@lru_cache(maxsize=8192)
def function_in_words(function: Any, topology: Topology | None) -> str:
    """Return text that names a function and a grid, such as " in sum on ProcessGrid(height=2)".

    Return "" if `function` is None.
    """
    if function is None:
        return ""
    on = "" if topology is None else f" on ProcessGrid({topology})"
    return f" in {operator_name(function)}{on}"


def call_in_words(call: Call, known_from: int) -> str:
    """Return a call with its arguments as text, for comparison between ranks.

    For example " in torch.sum((4, 8) float32 Layout(width='width') on ProcessGrid(width=2), 1)".
    The text has the types of active autocast, and nothing that may differ between ranks of a
    correct program. A tensor made after journal entry `known_from` or later is named by the number
    of the entry.
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
    """Return the text of an argument of a call, for comparison between ranks.

    Values that may differ between ranks, such as device numbers, are left out.
    """
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
        name: str = argument.partition(":")[0]  # device numbers differ between ranks
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
"""The types whose text `str` is complete and equal on all ranks for equal values."""
