"""Requirements of torch's local poolings, and when they run on a block as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from distconv.comm.packing import empty_in_format, has_channels_last
from distconv.geometry.halo.convolution import needs_halo
from distconv.geometry.index_maps import Window
from distconv.ops.support.method import chosen_method
from distconv.ops.support.operands import Placement
from distconv.ops.windowed.overlapped import may_overlap
from distconv.tensor.dist_tensor import DistTensor


def check_pooled_type(name: str, input: DistTensor, implemented: bool) -> None:
    """Raise for a type that torch does not pool, on ranks without elements too."""
    if not implemented:
        raise NotImplementedError(
            f"{name}: not implemented for {input.dtype}; convert it, x.float()"
        )


def with_some_channel(x: Tensor) -> Tensor:
    """Return `x`, or its empty batch with one channel: torch pools nothing without channels."""
    return x if x.shape[1] else x.reshape(0, 1, *x.shape[2:])


def unread_input(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor in place of the input of a backward pass of pooling, which reads its shape
    alone.

    torch takes the order of dimensions from it as well, and on GPUs makes it contiguous first.
    """
    if like.is_cuda or has_channels_last(like):
        return empty_in_format(shape, like)
    return like.new_empty(()).expand(shape)


_POOLED = 2**16
"""Elements of a rank's block from which pooling while halos travel was measured to cost less."""


def overlapping_ceil_mode(x: DistTensor, windows: Sequence[Window]) -> bool | None:
    """Return the ceil mode for pooling a block of `x` while halos travel; None where it is
    assembled.

    It is the same on all ranks, and such that the local operator makes just the outputs of each
    block.
    """
    return _overlapping_ceil_mode(Placement.of(x), tuple(windows), chosen_method())


@lru_cache(maxsize=4096)
def _overlapping_ceil_mode(
    x: Placement, windows: tuple[Window, ...], method: str | None
) -> bool | None:
    if not may_overlap(x, method, _POOLED):
        return None
    parts = tuple(map(x.topology.parts, x.cuts[2:]))
    for ceil_mode in (False, True):
        if needs_halo(windows, x.shape[2:], parts, pooled=True, ceil_mode=ceil_mode):
            return ceil_mode
    return None
