"""Checks, by checksums, that tensors which should be equal on several ranks are equal.

If ranks passed different tensors for one batch, their blocks would form a mixture, and the network
would silently compute a wrong result. The first 16 calls with the same key (such as operator and
shape) are checked, then every 64th; with DISTCONV_DEBUG=1 every call is checked, on all elements.
Differences of the size of rounding are accepted, as processors of different kinds round
differently.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from distconv.geometry.topology import Topology
from distconv.grid.interface import Grid
from distconv.grid.words import ranks_in_words

CURE = (
    "use the same random seed on every rank (torch.manual_seed), or broadcast the value of one "
    "rank (grid.comm.bcast)"
)

_WHOLE, _BLOCK, _BLOCKS = 2**18, 2**11, 128
"""The most bytes of a tensor that are read in full; and, for a larger tensor, the size in bytes
and the number of the samples that are read."""

_JUMP = 2**31 - 1
"""A prime. Its multiples shift the bytes that are read, as the samples of a batch often begin with
equal values."""

_ELEMENTS = 1024
"""The number of elements whose values are compared between ranks, and which make the checksum of a
tensor on a GPU."""

_ROUNDING = 64
"""Units in the last place of the largest element by which rounding may make tensors differ."""


class Checked(NamedTuple):
    """A tensor to compare between ranks with equal coordinates along `axes`, and its name."""

    name: str
    tensor: Tensor
    axes: tuple[str, ...] = ()


def checksum(x: Tensor, full: bool = False) -> int:
    """Return a number that, very probably, changes if any element or their order changes.

    Unless `full`, only samples of a large tensor are read: 128 runs of bytes and the end on a CPU,
    about 1024 elements on a GPU. The number is 0 for sparse tensors and on the meta device.
    """
    if x.layout != torch.strided or x.is_meta:
        return 0
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    if not flat.is_cpu:
        flat = (flat if full else _spread(flat)).cpu()
    data = _bytes(flat)
    if full or len(data) <= _WHOLE:
        return crc32(data)
    number = crc32(data[-_BLOCK:])
    distance = len(data) // _BLOCKS
    for i in range(_BLOCKS):
        start = i * distance + i * _JUMP % (distance - _BLOCK + 1)
        number = crc32(data[start : start + _BLOCK], number)
    return number


def differing(local: Tensor, axes: Sequence[str], sums: Sequence[int], grid: Grid) -> str:
    """Return a text that names the ranks on which the tensor `local` differs; "" if all are equal.

    Ranks with equal coordinates along `axes` should hold equal tensors; `sums` has the checksums of
    all ranks. Collective.
    """
    if not _deviating_ranks(sums, axes, grid.topology):
        return ""
    values = grid.all_gather_object(_values(local))
    odd = [
        (rank, usual)
        for rank, usual in _deviating_ranks(sums, axes, grid.topology)
        if not _rounded(values[rank], values[usual])
    ]
    if not odd:
        return ""
    usual = odd[0][1]
    ranks = [rank for rank, other in odd if other == usual]
    return f"{ranks_in_words(ranks)} differ{'s' if len(ranks) == 1 else ''} from rank {usual}"


def unequal(tensors: Iterable[Checked], grid: Grid, full: bool = False) -> tuple[str, str] | None:
    """Return the name of the first tensor that differs between ranks, and a text about the ranks.

    Return None if all tensors are equal. All ranks should pass tensors of the same names in the
    same order. With `full` every element of large tensors is read. Collective.
    """
    checked = list(tensors)
    full = full or grid.journal.debug
    mine = [(c.name, checksum(c.tensor, full)) for c in checked]
    kinds: dict[tuple[str, ...], int] = defaultdict(int)
    for (name, number), (_, _, axes) in zip(mine, checked, strict=True):
        kinds[axes] = crc32(f"{name} {number}".encode(), kinds[axes])
    together = zip(*grid.all_gather_object(list(kinds.values())), strict=True)
    if not any(
        _deviating_ranks(sums, axes, grid.topology)
        for sums, axes in zip(together, kinds, strict=True)
    ):
        return None
    everyone = grid.all_gather_object(mine)
    for i in range(max(map(len, everyone))):
        names = [theirs[i][0] if i < len(theirs) else "nothing" for theirs in everyone]
        if len(set(names)) > 1:
            rank = next(r for r, other in enumerate(names) if other != names[0])
            return names[0], f"rank {rank} has {names[rank]} instead"
        name, local, axes = checked[i]
        ranks = differing(local, axes, [theirs[i][1] for theirs in everyone], grid)
        if ranks:
            return name, ranks
    return None


def _deviating_ranks(
    sums: Sequence[int], axes: Sequence[str], topology: Topology
) -> list[tuple[int, int]]:
    """Return pairs of a rank with a rare checksum, and a rank of its group with the usual one."""
    if len(set(sums)) == 1:
        return []
    found = []
    for group in _groups(tuple(axes), topology):
        usual, _ = Counter(sums[rank] for rank in group).most_common(1)[0]
        first = next(rank for rank in group if sums[rank] == usual)
        found += [(rank, first) for rank in group if sums[rank] != usual]
    return found


@lru_cache(maxsize=256)
def _groups(axes: tuple[str, ...], topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that have equal coordinates along `axes`."""
    groups = defaultdict(list)
    for rank in range(topology.size):
        groups[topology.part(topology.coordinates(rank), axes)].append(rank)
    return tuple(map(tuple, groups.values()))


def _spread(flat: Tensor) -> Tensor:
    """Return about 1024 elements of a vector at equal distances."""
    return flat[:: max(1, len(flat) // _ELEMENTS)]


def _bytes(flat: Tensor) -> Any:
    """Return the bytes of a vector on the CPU as a numpy array."""
    if flat.stride(0) != 1:  # also of a single element, for which contiguous() does nothing
        flat = flat.clone(memory_format=torch.contiguous_format)
    # Once numpy() has lent out the memory of a tensor, torch regards it as lent for ever.
    return np.from_dlpack(flat.view(torch.uint8))


def _values(x: Tensor) -> tuple[float, Any]:
    """Return the tolerance for rounding, and about 1024 elements of `x` as a numpy array.

    If `x` is neither float32 nor float64, the tolerance is 0 and the array has bytes.
    """
    some = _spread(x.detach().resolve_conj().reshape(-1)).cpu()
    if some.dtype not in (torch.float32, torch.float64):
        return 0.0, _bytes(some)
    largest = some.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if len(some) else 0.0
    return _ROUNDING * torch.finfo(some.dtype).eps * largest, np.from_dlpack(some)


def _rounded(mine: tuple[float, Any], other: tuple[float, Any]) -> bool:
    """Return whether the elements of a tensor differ between two ranks by no more than rounding.

    `mine` and `other` hold a tolerance and an array of elements each. The result is False if the
    arrays are equal, and if they differ by more than the tolerance of `mine`.
    """
    (tolerance, a), (_, b) = mine, other
    if not tolerance or a.shape != b.shape or np.array_equal(a, b, equal_nan=True):
        return False
    return bool(np.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True))


def names_of(tensors: Iterable[Tensor]) -> Iterator[Checked]:
    """Yield plain tensors to compare between all ranks, each named by its shape and type."""
    for x in tensors:
        yield Checked(f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}", x)
