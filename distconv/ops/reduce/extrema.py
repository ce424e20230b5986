"""Largest and smallest elements, and their indices, over any dimensions, partitioned or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather, all_gather_with_grad, all_reduce_with_grad
from distconv.geometry.layout import cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.reduce.sums import Dims, reduction_result
from distconv.ops.shape.reshape import unsqueeze
from distconv.ops.support.arguments import normalize_dim, normalize_dims
from distconv.ops.support.dimensions import works_along
from distconv.ops.support.operands import unravel
from distconv.tensor.dispatch import RULES, implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import reduce_in_order_of_memory
from distconv.torch_private import ShardFunction


class ValuesAndIndices(NamedTuple):
    """The values and indices that torch.max(x, dim) and torch.min(x, dim) return."""

    values: DistTensor
    indices: DistTensor


def _neutral(x: Tensor, largest: bool) -> Any:
    """Return the value that never wins a maximum (`largest`) or minimum, for empty blocks."""
    if x.dtype == torch.bool:
        return not largest
    if x.dtype.is_floating_point:
        return -torch.inf if largest else torch.inf
    limits = torch.iinfo(x.dtype)
    return limits.min if largest else limits.max


def _attained(x: Tensor, value: Tensor) -> Tensor:
    """Return a mask of the elements of `x` that equal the extreme `value`; nan equals nan."""
    attained = x == value
    void = value.isnan()
    return attained | (x.isnan() & void) if not void.is_cpu or void.any() else attained


class _Extremum(ShardFunction):
    """The largest or smallest value over dimensions `over`, on the ranks along `axes`.

    The ranks gather the extreme values of their blocks. Each of n elements that equal the result
    gets 1/n of its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        largest: bool,
        over: tuple[int, ...],
        grid: Grid,
        axes: tuple[str, ...],
        nan_attains: bool = True,
    ) -> Tensor:
        function = torch.amax if largest else torch.amin
        if x.numel():
            local = reduce_in_order_of_memory(function, x, over)
        else:
            shape = [1 if d in over else n for d, n in enumerate(x.shape)]
            local = x.new_full(shape, _neutral(x, largest))
        value = function(all_gather_with_grad(local, grid, axes), 0)
        ctx.save_for_backward(x, value)
        ctx.movement = over, grid, axes, nan_attains
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, value = ctx.saved_tensors
        over, grid, axes, nan_attains = ctx.movement
        attained = _attained(x, value) if nan_attains else x == value
        count = reduce_in_order_of_memory(torch.sum, attained, over, dtype=x.dtype)
        sums = torch.stack([grads[0], count])
        sums = all_reduce_with_grad(sums, grid, axes)
        return attained * (sums[0] / sums[1]), None, None, None, None, None


def _require_elements(name: str, input: DistTensor, over: tuple[int, ...]) -> None:
    for d in over:
        if input.shape[d] == 0:
            raise IndexError(f"{name}: dimension {d} of {tuple(input.shape)} has no elements")


def extreme(
    name: str, input: Any, dim: Dims, keepdim: bool, largest: bool, nan_attains: bool = True
) -> DistTensor:
    """Return the largest or smallest elements of a DistTensor over dimensions `dim`. Collective.

    If a result is nan, the elements that are nan get its gradient; without `nan_attains` all
    elements get nan, as with torch.amax. `name` is the called function, for errors. Raises
    IndexError if a dimension in `dim` has no elements, and RuntimeError if `dim` is None and
    `input` has none.
    """
    over = normalize_dims(dim, input.dim())
    if not input.numel() and not (isinstance(dim, int) or dim):
        raise RuntimeError(f"{name}: {tuple(input.shape)} has no elements; name a dimension")
    _require_elements(name, input, over)
    axes = cutting_axes(input.cuts[d] for d in over)
    value = _Extremum.apply(input.shard, largest, over, input.grid, axes, nan_attains)
    return reduction_result(input, value, over, keepdim)


def _indices_along(input: DistTensor, d: int, largest: bool) -> Tensor:
    """Return the global index of the first extremum along `d`, of size 1 along `d`. Collective."""
    x, start = input.shard.detach(), input.box.start[d]
    function = torch.max if largest else torch.min
    if x.shape[d]:
        value, index = function(x, d, keepdim=True)
        index = index + start
    else:
        shape = [1 if i == d else n for i, n in enumerate(x.shape)]
        value = x.new_full(shape, _neutral(x, largest))
        index = torch.full(shape, input.shape[d], dtype=torch.int64, device=x.device)
    axes = input.cuts[d]
    if not axes:
        return index
    values, indices = (
        all_gather_with_grad(value, input.grid, axes),
        all_gather_with_grad(index, input.grid, axes),
    )
    return _first_of_ranks(values, indices, largest, input.shape[d])


def _first_of_ranks(values: Tensor, indices: Tensor, largest: bool, none: int) -> Tensor:
    """Return the smallest index among the ranks whose value is the extreme value of all ranks.

    `values` and `indices`, (ranks, ...), are the extremum of each rank's block and its global
    index. `none` is larger than all indices.
    """
    best = (torch.amax if largest else torch.amin)(values, 0, keepdim=True)
    return torch.where(_attained(values, best), indices, none).amin(0)


def _along(
    name: str, input: DistTensor, dim: int, keepdim: bool, largest: bool
) -> ValuesAndIndices:
    d = normalize_dim(dim, input.dim())
    if not input.dim():
        return _along(name, unsqueeze(input, 0), d, False, largest)
    _require_elements(name, input, (d,))
    index = _indices_along(input, d, largest)
    # The rank that holds the extreme element contributes it to a sum; others contribute 0.
    here = index - input.box.start[d]
    x = input.shard
    mine = (here >= 0) & (here < x.shape[d])
    if x.shape[d]:
        value = x.gather(d, here.clamp(0, x.shape[d] - 1))
        value = torch.where(mine, value, value.new_zeros(()))
    else:
        value = x.sum(d, keepdim=True).to(x.dtype)
    value = all_reduce_with_grad(value, input.grid, input.cuts[d])
    return ValuesAndIndices(
        reduction_result(input, value, (d,), keepdim), reduction_result(input, index, (d,), keepdim)
    )


def _arg(name: str, input: DistTensor, dim: int | None, keepdim: bool, largest: bool) -> DistTensor:
    if input.dtype == torch.bool:
        raise NotImplementedError(f"{name}: not implemented for {input.dtype}; convert it, x.int()")
    if dim is not None:
        d = normalize_dim(dim, input.dim())
        if not input.dim():
            return _arg(name, unsqueeze(input, 0), d, False, largest)
        _require_elements(name, input, (d,))
        return reduction_result(input, _indices_along(input, d, largest), (d,), keepdim)
    over = tuple(range(input.dim()))
    _require_elements(name, input, over)
    x, none = input.shard.detach(), input.numel()
    if x.numel():
        place = (torch.argmax if largest else torch.argmin)(x)
        value, index = x.take(place), torch.zeros_like(place)
        for own, start, n in zip(
            unravel(place, x.shape), input.box.start, input.shape, strict=True
        ):
            index = index * n + start + own
    else:
        value, index = x.new_full((), _neutral(x, largest)), torch.full((), none, device=x.device)
    axes = cutting_axes(input.cuts)
    if axes:
        values, indices = (all_gather(t, input.grid, axes) for t in (value, index))
        index = _first_of_ranks(values, indices, largest, none)
    return reduction_result(input, index.reshape((1,) * input.dim()), over, keepdim)


def _register(largest: bool, short: str, arg: str, full: str) -> None:
    def extremum(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            return (torch.maximum if largest else torch.minimum)(input, other)
        return reduce(input, *args, **kwargs)

    @works_along(reduces=True, several=False)
    def reduce(input: DistTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return extreme(short, input, None, False, largest)
        return _along(short, input, dim, keepdim, largest)

    @works_along(reduces=True)
    def all_of(input: DistTensor, dim: Dims = (), keepdim: bool = False) -> DistTensor:
        # As in torch.amax, no element equals a result of nan, so all elements get the gradient nan.
        return extreme(full, input, dim, keepdim, largest, nan_attains=False)

    @works_along(reduces=True, several=False)
    def where(input: DistTensor, dim: int | None = None, keepdim: bool = False) -> DistTensor:
        return _arg(arg, input, dim, keepdim, largest)

    rules: dict[str, Callable[..., Any]] = {short: extremum, full: all_of, arg: where}
    for name, rule in rules.items():
        RULES[getattr(torch, name)] = RULES[getattr(torch.Tensor, name)] = rule


class Range(NamedTuple):
    """The minima and maxima that torch.aminmax returns."""

    min: DistTensor
    max: DistTensor


@implements(torch.aminmax, torch.Tensor.aminmax)
def aminmax(input: DistTensor, *, dim: int | None = None, keepdim: bool = False) -> Range:
    return Range(
        *(
            extreme("aminmax", input, dim, keepdim, largest, nan_attains=False)
            for largest in (False, True)
        )
    )


_register(True, "max", "argmax", "amax")
_register(False, "min", "argmin", "amin")
