"""Memory formats in which torch computes fast: for samples, and for blocks with channels last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.comm.packing import CHANNELS_LAST, has_channels_last
from distconv.device.kinds import asks_for_channels_last
from distconv.geometry.layout import Cuts, cutting_axes
from distconv.grid.interface import Grid

# The memory format of samples: channels last if convolutions gain by it.
#
# On CPUs oneDNN convolves planes with channels last. With channels first oneDNN reorders input and
# output in every call. `distribute_tensor` and loaders copy the samples anyway, so they choose the
# fastest format. torch's convolutions return the format of their input, and later functions keep
# this format.
#
# Weights stay as the program made them. torch copies them in each call if the input has another
# format. Steps took 0.97 to 1.09 times as long as with weights that have channels last, most with
# 128 channels on a block of 16 x 32. A copy kept from one call to the next would miss writes to
# `weight.data`, which torch does not count.
#
# Which format is faster on an accelerator has to be measured on it. DISTCONV_CHANNELS_LAST=1 or 0
# chooses the format, for planes and volumes.


FEWEST_ELEMENTS = 2**14
"""The smallest block, in elements, for which channels last was measured to be faster."""


def channels_last(
    shape: Sequence[int], dtype: torch.dtype, cuts: Cuts, grid: Grid
) -> torch.memory_format | None:
    """Return torch's channels-last format if it is faster for samples of this shape, else None.

    `shape` is the global shape, and `cuts` are the grid axes that partition each dimension. The
    result is the same on all ranks.
    """
    chosen = asks_for_channels_last()
    if chosen is None:
        chosen = (
            len(shape) == 4
            and prod(shape) >= FEWEST_ELEMENTS * grid.topology.parts(cutting_axes(cuts))
            and dtype == torch.float32
            and not grid.computes_on_gpu
            and onednn_is_on()
        )
    return CHANNELS_LAST.get(len(shape)) if chosen else None


def in_sample_format(block: Tensor, shape: Sequence[int], cuts: Cuts, grid: Grid) -> Tensor:
    """Return `block`, a block of samples of global shape `shape`, in its fastest memory format.

    The block is copied if it has another format. `block` must not require a gradient.
    """
    form = channels_last(shape, block.dtype, cuts, grid)
    return block.contiguous(memory_format=form or torch.contiguous_format)


def one_channel_in_sample_format(
    block: Tensor, shape: Sequence[int], cuts: Cuts, grid: Grid
) -> Tensor:
    """Return `block`; if it has one channel, as a view with the strides of its fastest format.

    `shape` is the global shape of the samples. A single channel has the same memory in both
    formats, and torch infers channels first unless the strides are those of channels last. A
    convolution would then return channels first, unlike that of samples with several channels.
    """
    if block.shape[1] != 1 or channels_last(shape, block.dtype, cuts, grid) is None:
        return block
    return block.squeeze(1).unsqueeze(-1).movedim(-1, 1)


def onednn_is_on() -> bool:
    """Return whether torch may use oneDNN's kernels."""
    return bool(torch.backends.mkldnn.enabled) and _onednn_is_there()


@cache
def _onednn_is_there() -> bool:
    return torch.backends.mkldnn.is_available()


# Memory formats in which torch computes fast on blocks, some of which have channels last.


def in_one_format(blocks: Sequence[Any]) -> Sequence[Any]:
    """Return the operands of an element-wise function, all in channels last if one of them is.

    With operands in two formats torch was measured to take ten times as long, and the result would
    have the format of the first operand.
    """
    planes = [x for x in blocks if isinstance(x, Tensor) and x.dim() == 4]
    if len({x.stride() for x in planes}) < 2 or not any(map(has_channels_last, planes)):
        return blocks
    return [
        x.contiguous(memory_format=torch.channels_last)
        if isinstance(x, Tensor) and x.dim() == 4 and x.is_contiguous()
        else x
        for x in blocks
    ]


def reduce_in_order_of_memory(
    function: Callable[..., Tensor], x: Tensor, over: Sequence[int], **options: Any
) -> Tensor:
    """Return `function(x, over, keepdim=True, **options)`, a reduction over dimensions `over`.

    A tensor with channels last is reduced as a view whose dimensions are in the order of memory.
    Without the view torch was measured to take up to 50 times as long for some dimensions.
    """
    if not has_channels_last(x):
        return function(x, over, keepdim=True, **options)
    places = [x.dim() - 1 if d == 1 else d - (d > 1) for d in over]
    return function(x.movedim(1, -1), places, keepdim=True, **options).movedim(-1, 1)


def in_order_of_memory(blocks: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the operands of an element-wise loss, with their dimensions in the order of memory.

    If the first operand has channels last, channels become the last dimension of all operands.
    torch's losses return gradients in the default memory format. With channels as the last
    dimension this format has the same order in memory as the operands.
    """
    first = blocks[0]
    if first is None or not has_channels_last(first):
        return blocks
    if any(x is not None and x.dim() != first.dim() for x in blocks):
        return blocks
    return [None if x is None else x.movedim(1, -1).contiguous() for x in blocks]
