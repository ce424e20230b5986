"""The place of a thread in words: the operator, and the line of the user's program.

The line is found in the interpreter's stack of frames when it is asked for.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name

from distconv.torch_private import CODE_OF_MODULE_CALL

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LAYERS = str(Path(__file__).resolve().parents[2] / "layers") + os.sep
_OWN = (_PACKAGE, _LAYERS)
_LIBRARIES = (
    str(Path(torch.__file__).resolve().parent) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


Call = tuple[Any, Sequence[Any], Mapping[str, Any] | None]
"""A torch function on DistTensors, or the name of a method, with its arguments."""

NO_CALL: Call = (None, (), None)
"""Marks that no such function is running."""


_THREADS: dict[int, dict[str, Any]] = {}
"""The `CURRENT` of each thread."""


class CurrentCall(threading.local):
    """The function, and the calls of modules, that this thread is running."""

    def __init__(self) -> None:
        _THREADS[threading.get_ident()] = self.__dict__

    call = NO_CALL
    """The outermost function on DistTensors; `NO_CALL` where none is running."""
    modules: list[nn.Module] | None = None
    """The calls of modules, innermost first, for which deferred work is done now."""


CURRENT = CurrentCall()


class running:
    """A context in which this thread is running `name` with these arguments.

    Within a running function on DistTensors it has no effect.
    """

    __slots__ = ("_call", "_outermost")

    def __init__(self, name: str, *arguments: Any):
        self._call: Call = (name, arguments, None)

    def __enter__(self) -> None:
        self._outermost = CURRENT.call is NO_CALL
        if self._outermost:
            CURRENT.call = self._call

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            CURRENT.call = NO_CALL


@contextmanager
def on_behalf_of(modules: list[nn.Module]) -> Iterator[None]:
    """Attribute the work of this thread within the context to these calls of modules."""
    before, CURRENT.modules = CURRENT.modules, modules
    try:
        yield
    finally:
        CURRENT.modules = before


def by_ranks(texts: Sequence[str], between: str) -> str:
    """Return the text of each rank, with ranks of equal texts together."""
    return "; ".join(
        f"{ranks_in_words(r for r, text in enumerate(texts) if text == said)}{between}{said}"
        for said in dict.fromkeys(texts)
    )


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


def operator_name(function: Any) -> str:
    """Return the name of a torch function, or of any callable, as a user writes it."""
    if isinstance(function, str):
        return function
    return resolve_name(function) or getattr(function, "__name__", repr(function))


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; None where it has ended."""
    return sys._current_frames().get(thread)


def is_parked(thread: int) -> bool:
    """Return whether a thread has ended, or waits for another one in Python's own library."""
    frame = frame_of(thread)
    if frame is None:
        return True
    return Path(frame.f_code.co_filename).stem in {"threading", "queue", "_base", "thread"}


def place_of(thread: int) -> str:
    """Return a thread's line of the user's program, such as "train.py:41 in main"."""
    return _user_line(frame_of(thread))


def user_line() -> str:
    """Return the line of the user's program from which the caller was called."""
    return _user_line(sys._getframe(1))


def operator_of(thread: int) -> str | None:
    """Return the function on DistTensors that a thread is running; None if there is none."""
    function, _, _ = _THREADS.get(thread, {}).get("call", NO_CALL)
    return None if function is None else operator_name(function)


def module_calls() -> list[nn.Module]:
    """Return the modules that are being called, innermost first."""
    return [
        frame.f_locals["self"]
        for frame in _outwards(sys._getframe(1))
        if frame.f_code is CODE_OF_MODULE_CALL
    ]


def module_path() -> str:
    """Return the name of the innermost module that is being called, within the outermost one.

    It is a name of the outermost module's `named_modules`; "" for that module itself, and outside
    of any call.
    """
    calls = module_calls() if CURRENT.modules is None else CURRENT.modules
    names = [_name_within(outer, inner) for inner, outer in pairwise(calls)]
    return ".".join(filter(None, reversed(names)))


def _name_within(outer: nn.Module, inner: nn.Module) -> str:
    """Return the name of one module within another; the name of its class if it is not within."""
    for modules in (outer.named_children(), outer.named_modules()):
        for name, part in modules:
            if part is inner:
                return name
    return type(inner).__name__


def is_of_program(file: str) -> bool:
    """Return whether a file of code belongs to the user's program, not to an installed library."""
    return not file.startswith((*_OWN, *_LIBRARIES))


def _user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program, or else of an installed library."""
    fallback = None
    for outer in _outwards(frame):
        file = outer.f_code.co_filename
        if file.startswith(_OWN):
            continue
        if is_of_program(file):
            return _line(outer)
        fallback = outer if fallback is None else fallback
    return "an unknown place" if fallback is None else _line(fallback)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    function = frame.f_code.co_name
    within = "" if function == "<module>" else f" in {function}"
    return f"{file}:{frame.f_lineno}{within}"
