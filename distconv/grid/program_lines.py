"""Lines of the user's program, such as "train.py:41 in main", that threads are running now.

They are read from Python's stack of frames on request.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

import torch

from distconv.transport.launch import switched_on

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

    With DISTCONV_DEBUG=1, and for errors of the library's own commands, nothing is removed.
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
    if not any(is_of_program(file) for file, _ in entries):
        return traceback
    kept = None
    for file, entry in reversed(entries):
        if not file.startswith(_OWN):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
