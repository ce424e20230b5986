"""Keys of calls: everything in a call that must be equal on all ranks, to compare and to print."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from distconv.geometry.layout import Layout
from distconv.geometry.topology import Topology
from distconv.grid.whereabouts import Call, operator_name
from distconv.torch_private import autocast_is_on

PARAMETERS: Any = WeakIdKeyDictionary()
"""The parameters of parallelized modules, each with its index in its module."""

Key = tuple[Any, ...]
"""A function with its arguments, or a function with the extents of its first argument's grid."""


class _Tensor(NamedTuple):
    """The metadata of a tensor that must be equal on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[tuple[str, ...], ...] | None
    extents: tuple[int, ...] | None
    number: int | None
    """The index of a parameter of a parallelized module; None for other tensors."""
    made_after: int | None
    """The journal entry after which another tensor was made, where that is known."""


def short_key(call: Call) -> Key:
    """Return the key of a function alone, with the grid of its first argument."""
    function, arguments, _ = call
    grid = getattr(arguments[0], "grid", None) if arguments else None
    return function, None if grid is None else grid.topology.extents


def full_key(call: Call, known_from: int) -> Key:
    """Return the key of a function with its arguments, and the types of autocast.

    Tensors made after journal entries from `known_from` on are told apart by these entries.
    """
    function, arguments, keywords = call
    named = _kept(keywords or (), known_from)
    if autocast_is_on():
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        on = filter(torch.is_autocast_enabled, kinds)
        named = *named, ("autocast", tuple(map(torch.get_autocast_dtype, on)))
    return function, _kept(arguments, known_from), named


def _kept(argument: Any, known_from: int) -> Any:
    """Return the part of an argument that must be equal on all ranks, in a hashable form."""
    kind = type(argument)
    if kind in _SIMPLE:
        return argument
    if kind in _SPELLED:
        return repr(argument)
    if isinstance(argument, Tensor):
        cuts, grid = getattr(argument, "cuts", None), getattr(argument, "grid", None)
        extents = None if grid is None else grid.topology.extents
        number = PARAMETERS.get(argument)
        made_after = getattr(argument, "made_after", None) if number is None else None
        if made_after is not None and made_after < known_from:
            made_after = None
        return _Tensor(argument.shape, argument.dtype, cuts, extents, number, made_after)
    if isinstance(argument, (tuple, list)):
        return tuple(_kept(value, known_from) for value in argument)
    if isinstance(argument, dict):
        return tuple((str(name), _kept(value, known_from)) for name, value in argument.items())
    if kind is str:
        return argument.partition(":")[0]  # a device has another number on each rank
    if kind is slice:
        return "slice", *_kept((argument.start, argument.stop, argument.step), known_from)
    if isinstance(argument, np.generic):
        value = argument.item()
        return repr(value) if isinstance(value, np.generic) else _kept(value, known_from)
    return kind.__name__


_SIMPLE = {int, type(None), torch.dtype, torch.memory_format, Layout}
_SPELLED = {bool, float, complex}
"""Types of numbers that can equal an integer but are different arguments."""


@lru_cache(maxsize=8192)
def code_of(kind: str, key: Key) -> int:
    """Return a number for an entry of the journal, the same on all ranks."""
    function, *arguments = key
    spelled = f"{kind} {'' if function is None else operator_name(function)} {arguments!r}"
    return crc32(spelled.encode())


def entry_in_words(kind: str, tag: int, key: Key, line: str | None) -> str:
    """Return an entry of the journal as a user would write it."""
    function, what, *keywords = key
    within = ""
    if keywords:
        named = (f"{name}={_word(value)}" for name, value in keywords[0])
        within = f" in {operator_name(function)}({', '.join((*map(_word, what), *named))})"
    elif function is not None:
        on = f" on ProcessGrid({Topology(what)})" if what else ""
        within = f" in {operator_name(function)}{on}"
    return f"{kind}{f' {tag}' if tag else ''}{within}" + (f", at {line}" if line else "")


def _word(value: Any) -> str:
    if isinstance(value, _Tensor):
        layout = "" if value.cuts is None else f" {Layout.of(value.cuts)}"
        name = "" if value.number is None else f"parameter {value.number}, "
        if value.made_after is not None:
            name = f"made after step {value.made_after}, "
        return f"{name}{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{layout}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_word, value))})"
    return str(value)


def first_difference(ranks: Sequence[tuple[int, Sequence[int]]]) -> int | None:
    """Return the first entry in which ranks differ; None if it is older than the known entries. A
    rank has the number of its first known entry, and the codes of its entries.
    """
    begin = max(first for first, _ in ranks)
    end = max(first + len(codes) for first, codes in ranks)
    for number in range(begin, end):
        if len({tuple(codes[number - first :][:1]) for first, codes in ranks}) > 1:
            return number
    return None
