"""The torch function on DistTensors that each thread is running, and its text for comparison."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from distconv.geometry.layout import Layout
from distconv.geometry.topology import Topology
from distconv.grid.program_lines import user_line
from distconv.torch_private import autocast_is_on

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


def function_in_words(call: Call) -> str:
    """Return a call's function and grid: " in sum on ProcessGrid(height=2)"; "" for `NO_CALL`."""
    function, arguments, _ = call
    grid = getattr(arguments[0], "grid", None) if arguments else None
    return _function_in_words(function, None if grid is None else grid.topology)


@lru_cache(maxsize=8192)
def _function_in_words(function: Any, topology: Topology | None) -> str:
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
