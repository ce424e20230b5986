"""A rival written by hand: mpi4py, `torch.cat` and torch's kernels, on a chain of ranks.

It stands for the program that somebody writes for one network: each windowed layer asks its
neighbours for halos by `Sendrecv`, joins them to its block by `cat` and runs torch's kernel; norms
add up their statistics; gradients are added up in one vector behind the backward pass. It checks
nothing, hides nothing, and takes only layers whose blocks line up: "same" padding, strides that
divide the blocks, as many rows on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

BY_HAND = "written by hand, over the best plain torch"
"""What a row of the rival measures."""

DIM = 2
"""The dimension that is cut, the first spatial one."""


def by_hand(network: nn.Module) -> nn.Module:
    """Let the layers of a network made for the whole sample work on this rank's block of it.

    Raises
    ------
    NotImplementedError
        Where it has a layer that nobody has written by hand.
    """
    for part in network.modules():
        write = _WRITERS.get(type(part))
        if write is not None:
            part.forward = write(part)  # type: ignore[method-assign]
        elif not next(part.children(), None) and not isinstance(part, _LOCAL):
            raise NotImplementedError(f"{type(part).__name__} is not written by hand")
    return network


def with_sums(module: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Return a step that adds up the gradients of the module's parameters over the ranks."""
    parameters = list(module.parameters())

    def run() -> None:
        step()
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
        for gradient, total in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))

    return run


class _Halos(Function):
    """Join rows of the neighbours to a block: `before` of the rank before, `after` of the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: int, after: int, fill: float) -> Tensor:
        ctx.sizes = before, after
        rows = x.shape[DIM]
        upper = _shifted(x.narrow(DIM, rows - before, before), 1, fill)
        lower = _shifted(x.narrow(DIM, 0, after), -1, fill)
        return torch.cat([upper, x, lower], DIM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        before, after = ctx.sizes
        dy = grads[0]
        rows = dy.shape[DIM] - before - after
        dx = dy.narrow(DIM, before, rows).clone(memory_format=torch.preserve_format)
        dx.narrow(DIM, rows - before, before).add_(_shifted(dy.narrow(DIM, 0, before), -1, 0.0))
        dx.narrow(DIM, 0, after).add_(_shifted(dy.narrow(DIM, before + rows, after), 1, 0.0))
        return dx, None, None, None


def _shifted(rows: Tensor, by: int, fill: float) -> Tensor:
    """Return the rows of the rank `by` places before this one, `fill` where there is none."""
    comm = MPI.COMM_WORLD
    leaving = rows.clone(memory_format=torch.preserve_format)
    arriving = torch.full_like(leaving, fill)
    if rows.numel():
        to, source = comm.rank + by, comm.rank - by
        to = to if 0 <= to < comm.size else MPI.PROC_NULL
        source = source if 0 <= source < comm.size else MPI.PROC_NULL
        comm.Sendrecv(_memory(leaving), to, 0, _memory(arriving), source, 0)
    return arriving


def _memory(x: Tensor) -> Any:
    """Return the elements of a tensor without gaps as they lie in memory."""
    return x.as_strided((x.numel(),), (1,)).numpy()


class _Sum(Function):
    """Add up a vector over the ranks; its gradient is added up as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _total(grads[0])


def _total(x: Tensor) -> Tensor:
    total = x.contiguous().clone()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total.numpy())
    return total


def _reach(kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """Return how many rows a window reaches over the block, before and after it."""
    return padding, max(kernel - stride - padding, 0)


def _without_padding(padding: tuple[int, ...]) -> tuple[int, ...]:
    return 0, *padding[1:]


def _convolution(part: Any) -> Callable[[Tensor], Tensor]:
    reach = _reach(part.kernel_size[0], part.stride[0], part.padding[0])
    convolve: Any = F.conv2d if isinstance(part, nn.Conv2d) else F.conv3d
    rest = part.stride, _without_padding(part.padding), part.dilation, part.groups

    def forward(x: Tensor) -> Tensor:
        y: Tensor = convolve(_Halos.apply(x, *reach, 0.0), part.weight, part.bias, *rest)
        return y

    return forward if any(reach) else part.forward


def _average(part: nn.AvgPool3d) -> Callable[[Tensor], Tensor]:
    kernel, stride, padding = part.kernel_size, part.stride, part.padding
    assert isinstance(kernel, int) and isinstance(stride, int) and isinstance(padding, int)
    reach = _reach(kernel, stride, padding)

    def forward(x: Tensor) -> Tensor:
        x = _Halos.apply(x, *reach, 0.0)
        return F.avg_pool3d(x, kernel, stride, _without_padding((padding,) * 3))

    return forward


def _batch_norm(part: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        dims = [d for d in range(x.dim()) if d != 1]
        return _normalized(x, dims, (1, -1, *(1,) * (x.dim() - 2)), part)

    return forward


def _group_norm(part: nn.GroupNorm) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        groups = x.unflatten(1, (part.num_groups, -1))
        dims = list(range(2, groups.dim()))
        size = groups[0, 0].numel() * MPI.COMM_WORLD.size
        mean = _Sum.apply(groups.sum(dims, keepdim=True)) / size
        variance = _Sum.apply((groups - mean).square().sum(dims, keepdim=True)) / size
        y = ((groups - mean) * (variance + part.eps).rsqrt()).view_as(x)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        return y * part.weight.view(shape) + part.bias.view(shape)

    return forward


def _normalized(x: Tensor, dims: list[int], shape: tuple[int, ...], part: Any) -> Tensor:
    count = x.numel() // x.shape[1] * MPI.COMM_WORLD.size
    mean = _Sum.apply(x.sum(dims)) / count
    variance = _Sum.apply((x - mean.view(shape)).square().sum(dims)) / count
    scale = part.weight * (variance + part.eps).rsqrt()
    return x * scale.view(shape) + (part.bias - mean * scale).view(shape)


_WRITERS: dict[type[nn.Module], Callable[[Any], Callable[[Tensor], Tensor]]] = {
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.AvgPool3d: _average,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.GroupNorm: _group_norm,
}

_LOCAL = (
    *(nn.ConvTranspose2d, nn.ConvTranspose3d, nn.MaxPool2d, nn.MaxPool3d, nn.PixelShuffle),
    *(nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Identity),
)
"""Layers that work on a block as they are, where windows do not overlap."""
