"""The memory format of samples and weights: channels last if convolutions gain by it.

On CPUs oneDNN convolves planes with channels last. With channels first it reorders input and output
in every call. Distributing and loading copy the samples anyway, and so put them in the best format.
If the sample or the weight has channels last, so has the result of torch's convolutions, and later
functions keep the format.

Which format is faster on an accelerator has to be measured on it. DISTCONV_CHANNELS_LAST=1 or 0
chooses the format, for planes and volumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor, nn

from distconv.comm.packing import CHANNELS_LAST
from distconv.device.numerics import asks_for_channels_last
from distconv.geometry.layout import Cuts, cutting_axes
from distconv.grid.interface import Grid

FEWEST_ELEMENTS = 2**14
"""The smallest block, in elements, for which convolutions were measured to gain."""

_Convolution = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def channels_last(
    shape: Sequence[int], dtype: torch.dtype, cuts: Cuts, grid: Grid
) -> torch.memory_format | None:
    """Return torch's channels-last format if samples of this global shape gain by it, else None.

    The answer is the same on all ranks.
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
    """Return a block of samples of global shape `shape` in their best memory format.

    The block is copied if it is not in this format; it needs no gradient.
    """
    form = channels_last(shape, block.dtype, cuts, grid)
    return block.contiguous(memory_format=form or torch.contiguous_format)


def set_weight_formats(module: nn.Module, grid: Grid) -> None:
    """Store the weights of convolutions with channels last, like the samples.

    By default these are the weights for which oneDNN gains by it, on CPUs only;
    DISTCONV_CHANNELS_LAST chooses all or none. Each parameter stays the same object.
    """
    chosen = asks_for_channels_last()
    if chosen is False or (chosen is None and (grid.computes_on_gpu or not onednn_is_on())):
        return
    for part in module.modules():
        # Not `part.weight`, which a parametrization would compute, so that a change would be lost.
        p = dict(part.named_parameters(recurse=False)).get("weight")
        if p is not None and isinstance(part, _Convolution) and (chosen or _gains(part, p)):
            p.data = p.data.contiguous(memory_format=CHANNELS_LAST[p.dim()])


def _gains(part: nn.Module, weight: Tensor) -> bool:
    """Return whether oneDNN convolves faster if `weight`, of layer `part`, has channels last."""
    # A kernel of one element is a product of matrices, which keeps the format of the input.
    one = prod(weight.shape[2:]) == 1
    planes = isinstance(part, nn.Conv2d) and part.groups == 1
    return planes and weight.dtype == torch.float32 and not one


def onednn_is_on() -> bool:
    """Return whether torch may use oneDNN's kernels."""
    return bool(torch.backends.mkldnn.enabled) and _onednn_is_there()


@cache
def _onednn_is_there() -> bool:
    return torch.backends.mkldnn.is_available()
