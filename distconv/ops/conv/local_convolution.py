"""Convolutions and transposed ones that compute while their halos travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.halo.slabs import Boundary, LocalInput
from distconv.ops.conv.channels import LayerPart
from distconv.ops.support.operands import Placement
from distconv.ops.support.types import autocast_type
from distconv.ops.windowed.overlapped import (
    OperandGradients,
    crop_outputs,
    may_overlap,
    overlapped_linear,
)
from distconv.tensor.dist_tensor import DistTensor


class ConvolutionPlan(NamedTuple):
    """How a rank computes a convolution or transposed one; remembered, as metadata decide it."""

    part: LayerPart
    maps: tuple[Any, ...]
    """From outputs to inputs, for each spatial dimension."""
    overlap: tuple[Convolution, Boundary] | None
    """How to compute while halos travel; None where inputs are assembled."""


def plan_convolution(
    part: LayerPart,
    x: Placement,
    maps: tuple[Any, ...],
    local: Convolution,
    method: str | None,
    smallest: int,
    lines_up: Callable[..., Any],
    edge_of: Callable[..., Boundary],
) -> ConvolutionPlan:
    """That of a rank whose `part` of a convolution of `x` is known.

    Parameters
    ---------- method, smallest: as in `may_overlap`. lines_up, edge_of: whether blocks line up, and
    the boundary: of `convolution_boundary` or of `transposed_convolution_boundary`.
    """
    if part.stays and may_overlap(x, method, smallest):
        parts = tuple(map(x.topology.parts, x.cuts[2:]))
        if lines_up(maps, x.shape[2:], parts):
            edge = edge_of(x.topology, x.rank, *part.alone(x), maps)
            return ConvolutionPlan(part, maps, (local, edge))
    return ConvolutionPlan(part, maps, None)


def overlapped_convolution(
    x: DistTensor,
    weight: Tensor,
    bias: Tensor | None,
    local: Convolution,
    edge: Boundary,
    operator: str,
) -> Tensor:
    """This rank's block of the convolution of `x`; all ranks call it."""
    return overlapped_linear(x, _as_autocast(x.shard, weight, bias), local, edge, operator)


def _as_autocast(*operands: Tensor | None) -> list[Tensor | None]:
    """The operands of a convolution in the type that autocast would give them."""
    kind = next(autocast_type(t) for t in operands if t is not None)
    if kind is None:
        return list(operands)
    return [
        t.to(kind) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in operands
    ]


@dataclass(frozen=True)
class Convolution:
    """The convolution of a piece, or the transposed one."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    bilinear = True

    def forward(self, piece: LocalInput, x: Tensor, weight: Any, bias: Any) -> Tensor:
        d = piece.flat
        if d is not None:
            # One plane of a volume: two-dimensional convolution is several times as fast.
            x, weight = x.squeeze(d), weight.squeeze(d)
        y = torch.convolution(x, weight, bias, *self._arguments(piece))
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
        dx, dw, db = _backward(dy, x, weight, bias, *self._arguments(piece), mask)
        if d is not None:
            dx, dw = (None if t is None else t.unsqueeze(d) for t in (dx, dw))
        return dx, dw, db

    def _arguments(self, piece: LocalInput) -> tuple[Any, ...]:
        """Those of torch.convolution after the bias."""
        stride, padding, dilation, extra = self.stride, piece.padding, self.dilation, piece.extra
        if piece.flat is not None:
            d = piece.flat - 2
            stride, padding, dilation, extra = (
                (*a[:d], *a[d + 1 :]) for a in (stride, padding, dilation, extra)
            )
        return stride, padding, dilation, self.transposed, extra, self.groups


_backward: Any = torch.ops.aten.convolution_backward
