"""Convolution of samples with channels last in memory, however they come.

The layers after a convolution keep its memory format, and so do the gradients: a network whose
first convolution has channels last computes all planes so, up to a layer that changes their shape.
How a block lies in memory is its rank's own affair: messages hold elements with channels first.
Where a block with channels first is convolved as it is, the sample is not kept twice: backward, it
is brought into the format once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.geometry.layout import Shape
from distconv.ops.conv.kernels import Kernels, torch_gradients
from distconv.ops.windowed.overlapped import OperandGradients
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.sample_format import gains_with_channels_last


def takes_channels_last(x: DistTensor, weight: Shape, groups: int) -> bool:
    """Return whether to convolve an input with channels last; the same on all ranks.

    Samples are told by needing no gradient, as nothing does where none are recorded.
    """
    shard = x.shard
    return (
        not shard.requires_grad
        and groups == 1
        and weight[2:] != (1, 1)  # else it is a product of matrices
        and gains_with_channels_last(x.shape, shard.dtype, x.cuts, x.grid)
    )


def _convolution(x: Tensor, *operands_and_arguments: Any) -> Tensor:
    return torch.convolution(with_channels_last(x), *operands_and_arguments)


def _gradients(dy: Tensor, x: Tensor, *rest: Any) -> OperandGradients:
    gradients: OperandGradients = torch_gradients(dy, with_channels_last(x), *rest)
    return gradients


def with_channels_last(x: Tensor) -> Tensor:
    """Return planes with the strides of channels last, by which torch chooses its kernels."""
    # For one channel `contiguous` would leave the strides as they are.
    return x.to(memory_format=torch.channels_last)


KERNELS = Kernels(_convolution, _gradients)
"""Convolution of a sample with channels last, whatever its format."""
