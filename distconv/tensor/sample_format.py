"""How samples and weights lie in memory: with channels last where convolutions gain by that.

oneDNN's convolutions of planes take channels last on CPUs. With channels first they bring input and
output of every call into another order, in memory that has left the caches. What distributes or
loads samples copies them anyway, and so leaves them as convolutions want them. Where either sample
or weight has channels last, torch's convolutions return them so, and what follows keeps that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor, nn

from distconv.geometry.layout import Cuts, cutting_axes
from distconv.grid.interface import Grid

FEWEST_ELEMENTS = 2**14
"""Elements of a rank's block from which convolutions were measured to gain."""


def gains_with_channels_last(
    shape: Sequence[int], dtype: torch.dtype, cuts: Cuts, grid: Grid
) -> bool:
    """Return whether samples of a global shape are best kept with channels last.

    It is the same on all ranks.
    """
    return (
        len(shape) == 4
        and prod(shape) >= FEWEST_ELEMENTS * grid.topology.parts(cutting_axes(cuts))
        and dtype == torch.float32
        and not grid.computes_on_gpu
        and onednn_is_on()
    )


def in_sample_format(block: Tensor, shape: Sequence[int], cuts: Cuts, grid: Grid) -> Tensor:
    """Return a rank's block of samples of a global shape as they are best kept, copied if need be.

    Parameters
    ----------
    block: needs no gradient.
    """
    last = gains_with_channels_last(shape, block.dtype, cuts, grid)
    return block.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def set_weight_formats(module: nn.Module, grid: Grid) -> None:
    """Lay out the weights of 2-D convolutions on CPUs as oneDNN's kernels take them.

    Each parameter stays the same object, of the same values.
    """
    if grid.computes_on_gpu or not onednn_is_on():
        return
    for part in module.modules():
        if not isinstance(part, nn.Conv2d) or part.groups > 1:
            continue
        # Not `part.weight`, which a parametrization would compute, and change by that.
        p = dict(part.named_parameters(recurse=False)).get("weight")
        # A kernel of one element makes a product of matrices, which takes the format of the input.
        if p is not None and p.dtype == torch.float32 and prod(p.shape[2:]) > 1:
            p.data = p.data.contiguous(memory_format=torch.channels_last)


def onednn_is_on() -> bool:
    """Return whether torch may take kernels of oneDNN's."""
    return bool(torch.backends.mkldnn.enabled) and _onednn_is_there()


@cache
def _onednn_is_there() -> bool:
    return torch.backends.mkldnn.is_available()
