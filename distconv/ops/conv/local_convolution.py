"""The local operator of convolutions that overlap with their halo exchange, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.halo.slabs import LocalInput
from distconv.ops.conv import volumes
from distconv.ops.conv.volumes import OperandGradients, torch_gradients


@dataclass(frozen=True)
class LocalConvolution:
    """The convolution, plain or transposed, that a rank runs on its block, a slab or a buffer.

    Attributes
    ----------
    function: torch's function, such as torch.conv2d.
    """

    function: Callable[..., Tensor]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False

    def forward(self, piece: LocalInput, x: Tensor, weight: Any, bias: Any) -> Tensor:
        d = piece.flat
        if d is not None:
            # One plane of a volume: two-dimensional convolution is several times as fast.
            x, weight = x.squeeze(d), weight.squeeze(d)
        convolution = volumes.convolution if x.dim() == 5 else torch.convolution
        y = convolution(x, weight, bias, *self._arguments(piece))
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
        d = piece.flat
        if piece.crop is not None:
            dy = F.pad(dy, [n for crop in reversed(piece.crop) for n in crop])
        if d is not None:
            dy, x, weight = (t.squeeze(d) for t in (dy, x, weight))
        gradients = volumes.convolution_gradients if x.dim() == 5 else torch_gradients
        dx, dw, db = gradients(dy, x, weight, bias, *self._arguments(piece), mask)
        if d is not None:
            dx, dw = (None if t is None else t.unsqueeze(d) for t in (dx, dw))
        return dx, dw, db

    def recorded(self, piece: LocalInput, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `x`, recorded by autograd for gradients of any order.

        `piece` holds the padding and the crop that belong to this input.
        """
        _, padding, *_, extra, groups = arguments = self._arguments(piece)
        if x.dim() == 5 and volumes.gains(x, weight, *arguments):
            y = volumes.recorded_convolution(x, weight, bias, *arguments)
        elif self.transposed:
            y = self.function(x, weight, bias, self.stride, padding, extra, groups, self.dilation)
        else:
            y = self.function(x, weight, bias, self.stride, padding, self.dilation, groups)
        return y if piece.crop is None else crop_outputs(y, piece.crop)

    def _arguments(self, piece: LocalInput) -> tuple[Any, ...]:
        """Return the arguments of torch.convolution after the bias, for the input of `piece`."""
        stride, padding, dilation, extra = self.stride, piece.padding, self.dilation, piece.extra
        if piece.flat is not None:
            d = piece.flat - 2
            stride, padding, dilation, extra = (
                (*a[:d], *a[d + 1 :]) for a in (stride, padding, dilation, extra)
            )
        return stride, padding, dilation, self.transposed, extra, self.groups


def crop_outputs(y: Tensor, crop: Sequence[tuple[int, int]] | None) -> Tensor:
    """Return `y` without some first and last elements of each spatial dimension.

    Parameters
    ----------
    crop: for each spatial dimension, the numbers of elements to drop before and after; None to drop
        none.
    """
    if crop is None:
        return y
    kept = (slice(a, n - b) for (a, b), n in zip(crop, y.shape[2:], strict=True))
    return y[(slice(None), slice(None), *kept)]
