"""A warning about blocks with too many elements for cuDNN and similar libraries."""

from __future__ import annotations

import warnings

import torch

from distconv.device.kinds import is_accelerator
from distconv.device.numerics import in_doubt
from distconv.grid.module_path import module_path
from distconv.tensor.dist_tensor import DistTensor

_HALVES = torch.bfloat16, torch.float16


def warn_of_large_block(x: DistTensor, elements: int, operator: str) -> None:
    """Warn on rank 0 if its block, the largest of all, is too large for some GPU libraries.

    These libraries return wrong numbers for it. Python shows each warning once.

    Parameters
    ----------
    x: the input of the convolution; only half precision on GPUs is concerned.
    elements: the number of this rank's inputs or outputs, whichever is larger.
    operator: the name of the convolution, for the warning.
    """
    grid = x.grid
    if grid.rank or x.dtype not in _HALVES or not is_accelerator(grid.device):
        return
    if in_doubt(elements):
        layer = module_path()
        warnings.warn(
            f"{operator}{f' in {layer}' if layer else ''}: this rank's block on {grid} has "
            f"{elements:,} elements in {str(x.dtype).removeprefix('torch.')}. Some versions of "
            "cuDNN return wrong numbers from 2**30 on, without an error, and other libraries may "
            "count with 32 bits. Cut it further, by more ranks along the height, say, or convolve "
            "it in float32",
            stacklevel=2,
        )
