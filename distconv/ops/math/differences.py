"""Differences of neighbouring elements, estimated derivatives, and the trapezoidal rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.geometry.index_maps import IndexMap, Same, Window
from distconv.ops.shape.indexing import cat
from distconv.ops.support.arguments import check_on_meta, normalize_dim, normalize_dims
from distconv.ops.support.operands import as_distributed, box_on_rank, common_grid, empty_block
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs


def _neighbours(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Return `x` without its first element along dimension `d`, and `x` without its last."""
    n = x.shape[d]
    return x.narrow(d, 1, n - 1), x.narrow(d, 0, n - 1)


@implements(torch.diff, torch.Tensor.diff)
def diff(
    input: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """Return the `n`-th differences of neighbouring elements along `dim`. Collective."""
    pieces = [x for x in (prepend, input, append) if x is not None]
    check_on_meta(torch.diff, input, n, dim, prepend, append)
    d = normalize_dim(dim, input.dim())
    x = as_distributed(input, common_grid("diff", pieces))
    if n == 0:  # torch then ignores prepend and append
        return x.clone()
    if len(pieces) > 1:
        x = cat(pieces, d)
    n = min(n, x.shape[d])
    needs: list[IndexMap] = [Same()] * x.dim()
    needs[d] = Window(kernel=n + 1)
    shape = tuple(size - n if i == d else size for i, size in enumerate(x.shape))
    buffer = gather_inputs(x, needs, x.cuts, "diff")
    if 0 in buffer.shape:
        block = empty_block(buffer, box_on_rank(shape, x.cuts, x.grid).shape)
    else:
        block = buffer.diff(n, d)
    return DistTensor(block, shape, x.cuts, x.grid)


@implements(torch.gradient)
def gradient(
    input: DistTensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1
) -> tuple[Tensor, ...]:
    """Return the derivative estimated along each dimension, by halo exchanges. Collective."""
    spacing = 1 if spacing is None else spacing
    steps = spacing if isinstance(spacing, (list, tuple)) else [spacing]
    if any(isinstance(h, Tensor) for h in steps):
        way_out = "Pass the distances of neighbours as numbers"
        refuse("gradient", "coordinates as spacing are not supported", input, way_out=way_out)
    check_on_meta(torch.gradient, input, spacing=spacing, dim=dim, edge_order=edge_order)
    dims = () if dim == () else normalize_dims(dim, input.dim())
    steps = steps if len(steps) == len(dims) else [spacing] * len(dims)
    return tuple(_derivative(input, d, h, edge_order) for d, h in zip(dims, steps, strict=True))


def _derivative(x: DistTensor, d: int, h: float, edge_order: int) -> Tensor:
    """Return the derivative along dimension `d`, at points `h` apart. Collective.

    Differences are central, but one-sided, of order `edge_order`, at the two ends.
    """
    needs: list[IndexMap] = [Same()] * x.dim()
    needs[d] = Window(2 * edge_order + 1, padding=(edge_order, edge_order))
    buffer = gather_inputs(x, needs, x.cuts, "gradient")
    n = x.shard.shape[d]

    def end(first: int, towards: int) -> Tensor:
        near = [buffer.narrow(d, first + towards * i, 1) for i in range(edge_order + 1)]
        change = near[1] - near[0] if edge_order == 1 else 2 * near[1] - 1.5 * near[0] - near[2] / 2
        return change * (towards / h)

    if 0 in x.shard.shape:
        block = empty_block(buffer, tuple(x.shard.shape))
    else:
        later, earlier = (buffer.narrow(d, edge_order + i, n) for i in (1, -1))
        block = (later - earlier) / (2 * h)
        start, stop = x.box.start[d], x.box.stop[d]
        if start == 0:
            block = torch.cat([end(edge_order, 1), block.narrow(d, 1, n - 1)], d)
        if stop == x.shape[d]:
            block = torch.cat([block.narrow(d, 0, n - 1), end(edge_order + n - 1, -1)], d)
    return DistTensor(block, x.shape, x.cuts, x.grid)


def _spacing(y: Tensor, x: Tensor | None, dx: Any, d: int) -> Any:
    """Return the distances of points along `d`: `dx`, or the differences of coordinates `x`."""
    if x is None:
        return dx
    if x.dim() == 1:
        x = x.reshape(tuple(-1 if i == d else 1 for i in range(y.dim())))
    else:
        d += x.dim() - y.dim()
    later, earlier = _neighbours(x, d)
    return later - earlier


@implements(torch.trapezoid, torch.trapz)
def trapezoid(y: Tensor, x: Tensor | None = None, *, dx: Any = 1.0, dim: int = -1) -> Tensor:
    check_on_meta(_trapezoid, y, x, dx, dim)
    d = normalize_dim(dim, y.dim())
    if not y.shape[d]:
        return y.sum(d)
    later, earlier = _neighbours(y, d)
    return ((later + earlier) * _spacing(y, x, dx, d)).sum(d) / 2


@implements(torch.cumulative_trapezoid)
def cumulative_trapezoid(
    y: Tensor, x: Tensor | None = None, *, dx: Any = 1.0, dim: int = -1
) -> Tensor:
    check_on_meta(_trapezoid, y, x, dx, dim)
    d = normalize_dim(dim, y.dim())
    later, earlier = _neighbours(y, d)
    return ((later + earlier) * _spacing(y, x, dx, d)).cumsum(d) / 2


def _trapezoid(y: Tensor, x: Tensor | None, dx: Any, dim: int) -> Tensor:
    if x is None:
        return torch.cumulative_trapezoid(y, dx=dx, dim=dim)
    return torch.cumulative_trapezoid(y, x, dim=dim)
