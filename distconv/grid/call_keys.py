"""What has to be the same of a call on all ranks, in a form that can be compared and spelled."""

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
"""The parameters of parallelized modules, each with its place among those of its module."""

Key = tuple[Any, ...]
"""A function and its arguments, or a function and the extents of the grid of its first argument."""


class _Tensor(NamedTuple):
    """A tensor as all ranks have to see it, without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[tuple[str, ...], ...] | None
    extents: tuple[int, ...] | None
    number: int | None
    """Of a parameter of a parallelized module, its place among them."""
    made_after: int | None
    """Of another tensor, the entry of the journal after which it was made, where that is known."""


def short_key(call: Call) -> Key:
    """Return a key of the function alone, and of the grid of its first argument."""
    function, arguments, _ = call
    grid = getattr(arguments[0], "grid", None) if arguments else None
    return function, None if grid is None else grid.topology.extents


def full_key(call: Call, known_from: int) -> Key:
    """Return a key of a function with its arguments, and the types of autocast.

    Tensors made after entries of the journal from `known_from` on are told apart by them.
    """
    function, arguments, keywords = call
    named = _kept(keywords or (), known_from)
    if autocast_is_on():
        named = *named, ("autocast", _autocast_types())
    return function, _kept(arguments, known_from), named


def _autocast_types() -> tuple[torch.dtype, ...]:
    """Return the types into which autocast converts, on each kind of device where it is on."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple(torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k))


def _kept(argument: Any, known_from: int) -> Any:
    """Return what has to be the same of an argument on all ranks, in a form that can be hashed."""
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
"""Types of numbers that may equal an integer, and are not the same argument."""


@lru_cache(maxsize=8192)
def code_of(kind: str, key: Key) -> int:
    """Return a number that stands for an entry of the journal, the same on all ranks."""
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
    """Return the first entry in which ranks differ; None where that is longer ago than they know.

    Parameters
    ----------
    ranks: for each rank the number of its first remembered entry, and the codes of its entries.
    """
    begin = max(first for first, _ in ranks)
    end = max(first + len(codes) for first, codes in ranks)
    for number in range(begin, end):
        if len({tuple(codes[number - first :][:1]) for first, codes in ranks}) > 1:
            return number
    return None
