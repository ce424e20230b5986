"""torch's convolutions and transposed convolutions, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from distconv.ops.conv.convolution import Convolution
from distconv.ops.conv.spatial import convolve
from distconv.ops.conv.specification import ConvolutionSpec
from distconv.ops.conv.transposed_convolution import TransposedConvolution
from distconv.ops.support.argument_forms import Sizes, accepts_unbatched, to_tuple
from distconv.ops.support.merged import (
    factors_of,
    is_merged,
    merge_as,
    treats_samples_alone,
    unmerged,
)
from distconv.ops.support.operands import distributed_input
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def _convolution(function: Callable[..., Tensor], n: int) -> None:
    @implements(function)
    @treats_samples_alone(function, n + 2)
    @accepts_unbatched(function.__name__, n)
    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> DistTensor:
        spec = _specification(
            Convolution,
            function,
            to_tuple(stride, n, "stride"),
            padding if isinstance(padding, str) else to_tuple(padding, n, "padding"),
            to_tuple(dilation, n, "dilation"),
            groups,
        )
        if is_merged(input):
            made = _convolve_points(input, weight, bias, spec)
            if made is not None:
                return made
        return convolve(distributed_input(spec.name, input, weight, bias), weight, bias, spec)


def _transposed_convolution(function: Callable[..., Tensor], n: int) -> None:
    @implements(function)
    @treats_samples_alone(function, n + 2)
    @accepts_unbatched(function.__name__, n)
    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> DistTensor:
        spec = _specification(
            TransposedConvolution,
            function,
            to_tuple(stride, n, "stride"),
            to_tuple(padding, n, "padding"),
            to_tuple(dilation, n, "dilation"),
            groups,
            to_tuple(output_padding, n, "output_padding"),
        )
        return convolve(distributed_input(spec.name, input, weight, bias), weight, bias, spec)


@lru_cache(maxsize=4096)
def _specification(kind: Callable[..., ConvolutionSpec], *arguments: Any) -> ConvolutionSpec:
    """Return `kind(*arguments)`: for equal arguments the same object, which caches find faster."""
    return kind(*arguments)


def _convolve_points(
    input: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvolutionSpec
) -> DistTensor | None:
    """Return the convolution of a merged tensor by a kernel of one element; None for others."""
    runs = factors_of(input)
    space = sum(map(len, runs[2:]))
    points = prod(weight.shape[2:]) == 1 and set(spec.stride) == {1}
    padded = not isinstance(spec.padding, str) and any(spec.padding)
    if not points or padded or space > 3 or any(len(run) > 1 for run in runs[:2]):
        return None
    kernel = weight.reshape((*weight.shape[:2], *(1,) * space))
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[space - 1]
    made = convolve(unmerged(input), kernel, bias, groups=spec.groups)
    return cast(DistTensor, merge_as(made, (*made.shape[:2], *input.shape[2:])))


_convolution(torch.conv1d, 1)
_convolution(torch.conv2d, 2)
_convolution(torch.conv3d, 3)
_transposed_convolution(torch.conv_transpose1d, 1)
_transposed_convolution(torch.conv_transpose2d, 2)
_transposed_convolution(torch.conv_transpose3d, 3)
