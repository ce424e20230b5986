"""Rearrangement of channels into space, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distconv.geometry.index_maps import Grouped, IndexMap, Same
from distconv.geometry.windows import Window
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import box_on_rank, empty_block
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs


def _planes(function: Callable[..., Tensor], buffer: Tensor, r: int) -> Tensor:
    """Return `function(buffer, r)`, with the dimensions before the last three as one.

    torch's result for volumes depends on the memory format, which differs between ranks. A buffer
    of four dimensions is passed as it is, as torch keeps its memory format.
    """
    if buffer.dim() == 4:
        return function(buffer, r)
    result = function(buffer.reshape(-1, *buffer.shape[-3:]), r)
    return result.reshape(*buffer.shape[:-3], *result.shape[1:])


def _cropped(x: Tensor, d: int, first: int, length: int) -> Tensor:
    """Return `length` elements along `d` from `first` on; `x` itself if these are all.

    A slice is avoided where it can be: its gradient would not have the memory format of `x`.
    """
    return x if x.shape[d] == length else x.narrow(d, first, length)


@implements(torch.pixel_shuffle)
def pixel_shuffle(input: DistTensor, upscale_factor: int) -> DistTensor:
    r = upscale_factor
    shape = check_on_meta(torch.pixel_shuffle, any_type(input), r)
    x, lead = input, input.dim() - 2
    needs: list[IndexMap] = [Same()] * (lead - 1) + [Grouped(1, r * r)]
    needs += [Grouped(r) if axes else Same() for axes in x.cuts[lead:]]
    buffer = gather_inputs(x, needs, x.cuts, "pixel_shuffle")
    box = box_on_rank(shape, x.cuts, x.grid)
    if 0 in box.shape:
        shard = empty_block(buffer, box.shape)
    else:
        shard = _planes(torch.pixel_shuffle, buffer, r)
        for d in (lead, lead + 1):
            shard = _cropped(shard, d, box.start[d] % r if x.cuts[d] else 0, box.shape[d])
    return DistTensor(shard, shape, x.cuts, x.grid)


@implements(torch.pixel_unshuffle)
def pixel_unshuffle(input: DistTensor, downscale_factor: int) -> DistTensor:
    r = downscale_factor
    shape = check_on_meta(torch.pixel_unshuffle, any_type(input), r)
    x, lead = input, input.dim() - 2
    needs: list[IndexMap] = [Same()] * (lead - 1) + [Grouped(r * r)]
    needs += [Window(r, r) if axes else Same() for axes in x.cuts[lead:]]
    buffer = gather_inputs(x, needs, x.cuts, "pixel_unshuffle")
    box = box_on_rank(shape, x.cuts, x.grid)
    if 0 in box.shape:
        return DistTensor(empty_block(buffer, box.shape), shape, x.cuts, x.grid)
    shard = _planes(torch.pixel_unshuffle, buffer, r)
    shard = _cropped(shard, lead - 1, box.start[lead - 1] % (r * r), box.shape[lead - 1])
    return DistTensor(shard, shape, x.cuts, x.grid)
