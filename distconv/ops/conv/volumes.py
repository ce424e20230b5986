"""Convolutions of volumes on CPUs, by oneDNN where torch would take a slower kernel.

torch chooses its kernel by the size of the input, of which it leaves out the last dimension: a
sample with up to 20,480 channels x depth x height goes through a matrix of all windows, which is
several times the input, takes up to eight times as long, and fits no cache. Blocks of a cut volume
are below that where the whole is above. The results differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from operator import ge, sub
from typing import Any

import torch
from torch import Tensor

from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import Shape
from distconv.ops.support.types import autocast_type
from distconv.ops.windowed.overlapped import OperandGradients

_MOST_ELEMENTS = 20480
"""Channels x depth x height up to which torch takes no oneDNN for one sample (`use_mkldnn` in
ATen/native/Convolution.cpp, torch 2.6 to 2.13)."""
_FEWEST_PRODUCTS = 2**21
"""Products of an input and a weight from which oneDNN was measured to take no longer."""
_MANY_CHANNELS = 16
"""Channels from which oneDNN's gradient of the weight pads the depth at no cost; below, it was
measured to take up to three times as long as with zeros in memory."""

_by_onednn: Any = torch.ops.aten.mkldnn_convolution


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """Return `torch.convolution` of a volume; it is not recorded for gradients.

    Parameters
    ----------
    x: (samples, channels, depth, height, width), as in all functions here.
    arguments: stride, padding, dilation, transposed, output padding and groups, as
        `torch.convolution` takes them.
    """
    # Transposed, oneDNN was measured to take as long or longer.
    if not arguments[3] and gains_by_onednn(x, weight, *arguments):
        stride, padding, dilation, *_, groups = arguments
        y: Tensor = _by_onednn(x, weight, bias, padding, stride, dilation, groups)
        return y
    return torch.convolution(x, weight, bias, *arguments)


def convolution_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Sequence[int] | None,
    *rest: Any,
) -> OperandGradients:
    """Return the gradients of `convolution`; they can be differentiated where that is recorded.

    Parameters
    ----------
    bias: the shape of the bias.
    rest: the arguments of `convolution`, and which gradients to compute.
    """
    *arguments, mask = rest
    backward: Any = torch.ops.aten.convolution_backward
    if torch.is_grad_enabled() or not gains_by_onednn(x, weight, *arguments):
        gradients: OperandGradients = backward(dy, x, weight, bias, *arguments, mask)
        return gradients
    stride, padding, dilation, transposed, *_ = arguments
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    of_input, of_weight, of_bias = mask
    dx = dw = db = None
    if of_input and not transposed and max(stride) == 1 and all(map(ge, reach, padding)):
        # As a convolution: oneDNN's own gradient was measured to take up to four times as long
        # with few channels, and never less.
        flipped = weight.flip(2, 3, 4).transpose(0, 1).contiguous()
        dx = _by_onednn(dy, flipped, None, list(map(sub, reach, padding)), stride, dilation, 1)
        of_input = False
    few = x.shape[1] < _MANY_CHANNELS
    if of_weight and not of_input and not transposed and padding[0] and few:
        before = x.new_zeros(*x.shape[:2], padding[0], *x.shape[3:])
        x, arguments[1] = torch.cat([before, x, before], 2), (0, *padding[1:])
    if of_input or of_weight or of_bias:
        # What torch has of oneDNN's gradients, it takes for tensors of oneDNN's.
        others = [of_input, of_weight, of_bias]
        made, dw, db = backward(dy.to_mkldnn(), x.to_mkldnn(), weight, bias, *arguments, others)
        if of_input:
            dx = made.to_dense()
    return dx, dw, db


def recorded_by_onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
) -> Tensor | None:
    """Return `convolution`, recorded for gradients of any order; None where torch's own function
    is as fast."""
    if not gains_by_onednn(x, weight, *arguments) or autocast_type(x) is not None:
        return None
    y: Tensor = _Convolution.apply(x, weight, bias, arguments)
    return y


def gains_by_onednn(x: Tensor, weight: Tensor, *arguments: Any) -> bool:
    """Return whether oneDNN is faster than what torch would take for these blocks."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and bool(torch.backends.mkldnn.enabled)
        and _gains(tuple(x.shape), tuple(weight.shape), *map(_hashable, arguments))
        and _available()
    )


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


@cache
def _available() -> bool:
    return torch.backends.mkldnn.is_available()


@lru_cache(maxsize=4096)
def _gains(
    x: Shape,
    weight: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    transposed: bool,
    extra: Shape,
    groups: int,
) -> bool:
    kernel = weight[2:]
    if groups > 1 or x[0] != 1 or min(kernel[1:]) > 3 or prod(kernel) == 1:
        return False  # torch takes oneDNN itself, or one product of matrices
    if prod(x[:4]) > _MOST_ELEMENTS:
        return False
    places = x[2:]
    if not transposed:
        rows = zip(x[2:], kernel, stride, padding, dilation, strict=True)
        places = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows)
    return min(places) > 0 and prod(places) * prod(weight) >= _FEWEST_PRODUCTS


class _Convolution(ShardFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.context = arguments, None if bias is None else bias.shape
        return convolution(x, weight, bias, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        arguments, bias = ctx.context
        mask = ctx.needs_input_grad[:3]
        gradients = convolution_gradients(grads[0], x, weight, bias, *arguments, mask)
        return *gradients, None
