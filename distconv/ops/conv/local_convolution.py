"""The convolution that one rank computes on its block or buffer, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import ge, sub
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.halo import LocalInput
from distconv.geometry.layout import Shape
from distconv.tensor.dispatch import others_look_on
from distconv.tensor.memory_format import onednn_is_on
from distconv.torch_private import ShardFunction

# Convolutions of volumes on CPUs, by the oneDNN kernels that are fast for them.
#
# torch chooses its kernel by the size of the input without its last dimension. For one sample with
# up to 20,480 channels x depth x height, torch copies all windows to a matrix, unless the kernel is
# larger than 3 along height and width. That matrix is several times as large as the input, and the
# convolution takes up to eight times as long. Blocks of a partitioned volume are below that size
# even if the global volume is above. And with few channels, oneDNN has faster kernels for gradients
# than the kernel that oneDNN chooses itself.
#
# Results differ from torch's by rounding. Weight gradients of some kernels sum all positions one by
# one in the type of the input, as torch's do for planes and large volumes. With 1e5 positions of
# one sign, the measured error was 2e-5 of the largest gradient.


OperandGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of input, weight and bias."""

_MOST_ELEMENTS = 20480
"""The largest channels x depth x height for which torch does not use oneDNN for one sample
(`use_mkldnn` in ATen/native/Convolution.cpp, torch 2.6 to 2.13)."""
_FEWEST_PRODUCTS = 2**21
"""The number of products (an input times a weight) from which oneDNN was measured to be no slower
than torch's other kernels."""
_LARGE_WEIGHT = 2**21
"""The number of elements from which a weight does not stay in a cache. oneDNN reorders the weight
in each call. With fewer output positions than `_FEWEST_PLACES`, oneDNN took up to twice as long as
torch's matrix product."""
_FEWEST_PLACES = 64
_MANY_CHANNELS = 16
"""The number of channels from which oneDNN's own gradients are fastest. With fewer channels,
oneDNN's input gradient was measured to take up to four times as long as a convolution with the
flipped weight. Its weight gradient took up to three times as long as on an input padded with zeros
along the depth. The zeros cost a copy of the input, so the input is padded only where torch would
make the matrix of all windows."""

_by_onednn: Any = torch.ops.aten.mkldnn_convolution
torch_gradients: Any = torch.ops.aten.convolution_backward
"""torch's function for the gradients of a convolution of any number of dimensions."""


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """Return `torch.convolution` of a volume, by oneDNN where its kernel is faster.

    Autograd must not be recording.

    Parameters
    ----------
    x: a tensor of shape (samples, channels, depth, height, width).
    arguments: stride, padding, dilation, transposed, output padding and groups, in the order of
        `torch.convolution`.
    """
    # For transposed convolutions oneDNN was measured to be no faster.
    if arguments[3] or not gains(x, weight, *arguments):
        return torch.convolution(x, weight, bias, *arguments)
    stride, padding, dilation, *_, groups = arguments
    offset = None if bias is None else bias.contiguous()
    y: Tensor = _by_onednn(x, weight, offset, padding, stride, dilation, groups)
    return y


def convolution_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Sequence[int] | None,
    *rest: Any,
) -> OperandGradients:
    """Return the gradients of input, weight and bias of a convolution of a volume.

    A gradient that is not asked for is None. In grad mode the gradients can be differentiated
    again.

    Parameters
    ----------
    dy: the gradient of the output.
    x: the input, of shape (samples, channels, depth, height, width).
    bias: the shape of the bias, or None.
    rest: stride, padding, dilation, transposed, output padding and groups, then three flags: which
        of the gradients to compute.
    """
    *arguments, mask = rest
    if torch.is_grad_enabled() or not gains(x, weight, *arguments):
        gradients: OperandGradients = torch_gradients(dy, x, weight, bias, *arguments, mask)
        return gradients
    of_input, of_weight, of_bias = mask
    stride, padding, dilation, transposed, *_ = arguments
    dx = dw = db = None
    if of_bias and not of_weight:
        db, of_bias = dy.sum((0, 2, 3, 4)), False
    few = not transposed and max(stride) == 1 and x.shape[1] < _MANY_CHANNELS
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    flips = of_input and few and all(map(ge, reach, padding))
    together = of_input and not flips
    if of_weight or together:
        inputs, outputs = x, dy
        if not _torch_uses_onednn(x.shape, weight.shape):
            if few and not together and padding[0]:
                zeros = x.new_zeros(*x.shape[:2], padding[0], *x.shape[3:])
                inputs, arguments[1] = torch.cat([zeros, x, zeros], 2), (0, *padding[1:])
            # For tensors in oneDNN's own memory layout torch always uses oneDNN's gradients.
            inputs, outputs = inputs.to_mkldnn(), dy.to_mkldnn()
        mask = [together, of_weight, of_bias]
        given, dw, sums = torch_gradients(outputs, inputs, weight, bias, *arguments, mask)
        del inputs, outputs
        dx = given.to_dense() if together else None
        db = sums if of_bias else db
    if flips:
        flipped = weight.flip(2, 3, 4).transpose(0, 1).contiguous()
        dx = _by_onednn(dy, flipped, None, list(map(sub, reach, padding)), stride, dilation, 1)
    return dx, dw, db


def recorded_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """Return the convolution of a volume, recorded by autograd for gradients of any order.

    The arguments are those of `convolution`.
    """
    y: Tensor = _Volumes.apply(x, weight, bias, arguments)
    return y


class _Volumes(ShardFunction):
    """An autograd function of `convolution`, with `convolution_gradients` as its backward."""

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
        return *convolution_gradients(grads[0], x, weight, bias, *arguments, mask), None


def gains(x: Tensor, weight: Tensor, *arguments: Any) -> bool:
    """Return whether to convolve `x` by the oneDNN kernels of this module: float32 volumes on CPUs.

    `arguments` are stride, padding, dilation, transposed, output padding and groups.
    """
    return (
        len(weight.shape) == 5
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and _pays(
            tuple(x.shape),
            tuple(weight.shape),
            *(tuple(a) if isinstance(a, list) else a for a in arguments),
        )
        and onednn_is_on()
        # Modes such as FlopCounterMode and selective checkpoints look for torch's convolution.
        and not others_look_on()
    )


@lru_cache(maxsize=4096)
def _pays(
    x: Shape,
    weight: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    transposed: bool,
    extra: Shape,
    groups: int,
) -> bool:
    """Return whether oneDNN was measured to be no slower than torch's kernels for these shapes.

    `x` and `weight` are the shapes of input and weight, `extra` is the output padding.
    """
    if groups > 1 or prod(weight[2:]) == 1:
        return False  # oneDNN has other kernels for groups; 1 x 1 x 1 is one matrix product
    if transposed and any(map(ge, extra, stride)):
        return False  # oneDNN does not support this output padding
    places = x[2:]
    if not transposed:
        rows = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
        places = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows)
    if min(places) <= 0:
        return False
    number = x[0] * prod(places)
    if number < _FEWEST_PLACES and prod(weight) >= _LARGE_WEIGHT:
        return False
    return number * prod(weight) >= _FEWEST_PRODUCTS


def _torch_uses_onednn(x: Shape, weight: Shape) -> bool:
    """Return whether torch.convolution itself always uses oneDNN for operands of these shapes.

    `x` and `weight` are the shapes of input and weight.
    """
    if weight[3:] == (1, 1):
        return False  # torch uses oneDNN for some of these shapes only
    return x[0] > 1 or min(weight[3:]) > 3 or prod(x[:4]) > _MOST_ELEMENTS


@dataclass(frozen=True)
class LocalConvolution:
    """The convolution that a rank runs on its block, on a halo slab or on an assembled buffer.

    The argument `piece` of its methods gives the padding and the cropping for that input.

    Attributes
    ----------
    function: torch's function, such as torch.conv2d.
    transposed: whether the convolution is a transposed one.
    """

    function: Callable[..., Tensor]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False

    def forward(self, piece: LocalInput, x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Return the convolution of `x`; autograd must not be recording."""
        d = piece.flat
        if d is not None:
            # One plane of a volume: two-dimensional convolution is several times as fast.
            x, weight = x.squeeze(d), weight.squeeze(d)
        convolve = convolution if x.dim() == 5 else torch.convolution
        y = convolve(x, weight, bias, *self._arguments(piece))
        if d is not None:
            y = y.unsqueeze(d)
        return crop_outputs(y, piece.crop)

    def backward(
        self,
        piece: LocalInput,
        dy: Tensor,
        x: Any,
        weight: Any,
        bias: Sequence[int] | None,
        mask: Sequence[bool],
    ) -> OperandGradients:
        """Return the gradients of `x`, weight and bias.

        `dy` is the gradient of the output, and `bias` the shape of the bias, or None. `mask` has
        three flags, which of the gradients to compute; the others are None.
        """
        d = piece.flat
        if piece.crop is not None:
            dy = F.pad(dy, [n for crop in reversed(piece.crop) for n in crop])
        if d is not None:
            dy, x, weight = (t.squeeze(d) for t in (dy, x, weight))
        gradients = convolution_gradients if x.dim() == 5 else torch_gradients
        dx, dw, db = gradients(dy, x, weight, bias, *self._arguments(piece), mask)
        if d is not None:
            dx, dw = (None if t is None else t.unsqueeze(d) for t in (dx, dw))
        return dx, dw, db

    def recorded(self, piece: LocalInput, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `x`, recorded by autograd for gradients of any order."""
        _, padding, *_, extra, groups = arguments = self._arguments(piece)
        if x.dim() == 5 and gains(x, weight, *arguments):
            y = recorded_convolution(x, weight, bias, *arguments)
        elif self.transposed:
            y = self.function(x, weight, bias, self.stride, padding, extra, groups, self.dilation)
        else:
            y = self.function(x, weight, bias, self.stride, padding, self.dilation, groups)
        return crop_outputs(y, piece.crop)

    def _arguments(self, piece: LocalInput) -> tuple[Any, ...]:
        """Return the arguments of torch.convolution after the bias, for an input with `piece`."""
        stride, padding, dilation, extra = self.stride, piece.padding, self.dilation, piece.extra
        if piece.flat is not None:
            d = piece.flat - 2
            stride, padding, dilation, extra = (
                (*a[:d], *a[d + 1 :]) for a in (stride, padding, dilation, extra)
            )
        return stride, padding, dilation, self.transposed, extra, self.groups


def crop_outputs(y: Tensor, crop: Sequence[tuple[int, int]] | None) -> Tensor:
    """Return a view of `y` without surplus elements at both ends of each spatial dimension.

    `crop` has for each spatial dimension the numbers of elements to drop before and after the
    others; None to drop none.
    """
    if crop is None:
        return y
    kept = (slice(a, n - b) for (a, b), n in zip(crop, y.shape[2:], strict=True))
    return y[(slice(None), slice(None), *kept)]
