"""The local operator of convolutions that overlap with their halo exchange, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.halo.slabs import LocalInput
from distconv.ops.conv import planes, volumes
from distconv.ops.conv.kernels import Kernels, torch_gradients
from distconv.ops.windowed.overlapped import OperandGradients, crop_outputs

_TORCH = Kernels(torch.convolution, torch_gradients)


@dataclass(frozen=True)
class LocalConvolution:
    """The convolution, or the transposed convolution, of a piece of the input.

    Attributes
    ----------
    channels_last: whether pieces are brought into this memory format, as those of a sample.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    channels_last: bool = False
    bilinear = True

    def forward(self, piece: LocalInput, x: Tensor, weight: Any, bias: Any) -> Tensor:
        d = piece.flat
        if d is not None:
            # One plane of a volume: two-dimensional convolution is several times as fast.
            x, weight = x.squeeze(d), weight.squeeze(d)
        y = self._kernels(x).convolution(x, weight, bias, *self.arguments(piece))
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
        arguments = self.arguments(piece)
        dx, dw, db = self._kernels(x).gradients(dy, x, weight, bias, *arguments, mask)
        if d is not None:
            dx, dw = (None if t is None else t.unsqueeze(d) for t in (dx, dw))
        return dx, dw, db

    def _kernels(self, x: Tensor) -> Kernels:
        if self.channels_last:
            return planes.KERNELS
        return volumes.KERNELS if x.dim() == 5 else _TORCH

    def arguments(self, piece: LocalInput) -> tuple[Any, ...]:
        """Return the arguments of torch.convolution after the bias."""
        stride, padding, dilation, extra = self.stride, piece.padding, self.dilation, piece.extra
        if piece.flat is not None:
            d = piece.flat - 2
            stride, padding, dilation, extra = (
                (*a[:d], *a[d + 1 :]) for a in (stride, padding, dilation, extra)
            )
        return stride, padding, dilation, self.transposed, extra, self.groups
