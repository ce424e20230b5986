"""Reordering, repeating, joining and dividing: flip, roll, repeat, stack, chunk, pixel_shuffle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.transfer import reorder
from distconv.geometry.index_maps import Grouped, IndexMap, Reversed, Rolled, Same, Window
from distconv.ops import synonyms  # noqa: F401  registers what is looked up here
from distconv.ops.shape.indexing import cat, consecutive, slice_of
from distconv.ops.shape.lookup import index_select
from distconv.ops.shape.reshape import expand, permute, unsqueeze
from distconv.ops.support.arguments import (
    any_type,
    as_sizes,
    check_on_meta,
    normalize_dim,
    normalize_dims,
    takes_sequence,
)
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    broadcast_shape,
    common_grid,
    empty_block,
    gather_whole,
    unravel,
)
from distconv.tensor.base import tensors_in, whole_numbers
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, plan_to_gather, record_gather
from distconv.torch_private import of_sequence, without_torch_dispatch, without_torch_function

# Reordering and repetition of elements.


@implements(torch.flip, torch.Tensor.flip)
@takes_sequence("dims")
def flip(input: DistTensor, *dims: Any) -> DistTensor:
    named = as_sizes(dims)
    chosen = normalize_dims(named, input.dim()) if named else ()
    needs = [Reversed() if d in chosen and axes else Same() for d, axes in enumerate(input.cuts)]
    buffer = gather_inputs(input, needs, input.cuts, "flip")
    return DistTensor(buffer.flip(chosen), input.shape, input.cuts, input.grid)


@implements(torch.roll, torch.Tensor.roll)
def roll(
    input: DistTensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None
) -> Tensor:
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return torch.roll(input.flatten(), shifts, 0).view(tuple(input.shape))
    amounts, chosen = whole_numbers(shifts, "shifts"), whole_numbers(dims, "dims")
    if len(amounts) != len(chosen):
        raise RuntimeError(
            f"roll: {len(amounts)} shifts for {len(chosen)} dimensions; pass one shift for each "
            "dimension"
        )
    total = [0] * input.dim()
    for shift, d in zip(amounts, chosen, strict=True):
        total[normalize_dim(d, input.dim())] += shift
    there, back = (
        [
            Rolled(sign * shift) if shift and axes and n else Same()
            for shift, axes, n in zip(total, input.cuts, input.shape, strict=True)
        ]
        for sign in (1, -1)
    )
    where = input.grid.topology, input.grid.rank, tuple(input.shape), input.cuts
    plan, inverse = (plan_to_gather(*where, needs, input.cuts) for needs in (there, back))
    buffer = input.shard
    if plan is not None and inverse is not None:
        record_gather(input, plan, input.cuts, "roll")
        buffer = reorder(buffer, plan, inverse, input.grid)
    rest = [d for d, need in enumerate(there) if total[d] and isinstance(need, Same)]
    if rest:
        buffer = buffer.roll([total[d] for d in rest], rest)
    elif buffer is input.shard:
        buffer = buffer.clone()
    return DistTensor(buffer, input.shape, input.cuts, input.grid)


@implements(torch.tile, torch.Tensor.tile)
@takes_sequence("dims")
def tile(input: DistTensor, *dims: Any) -> DistTensor:
    times = as_sizes(dims)
    return repeat(input, (1,) * (input.dim() - len(times)) + times)


@implements(torch.Tensor.repeat)
@takes_sequence("repeats")
def repeat(input: DistTensor, *repeats: Any) -> DistTensor:
    times = as_sizes(repeats)
    check_on_meta(torch.Tensor.repeat, any_type(input), times)
    x = input
    while x.dim() < len(times):
        x = unsqueeze(x, 0)
    for d, n in enumerate(times):
        if n == 0:
            x = x.narrow(d, 0, 0)  # type: ignore[assignment]
        elif n > 1:
            x = cat([x] * n, d)
    return x if max(times, default=1) > 1 else x.clone()  # type: ignore[return-value]


@implements(torch.movedim, torch.Tensor.movedim, torch.moveaxis, torch.Tensor.moveaxis)
def movedim(
    input: DistTensor, source: int | Sequence[int], destination: int | Sequence[int]
) -> DistTensor:
    numbered = torch.empty(tuple(range(input.dim())), device="meta")
    moved = torch.movedim(numbered, source, destination)  # type: ignore[arg-type]
    return permute(input, tuple(moved.shape))


@implements(torch.t, torch.Tensor.t, torch.Tensor.T.__get__)  # type: ignore[attr-defined]
def t(input: DistTensor) -> DistTensor:
    if input.dim() > 2:
        raise RuntimeError(f"t: expected at most 2 dimensions, got {input.dim()}; use permute")
    return permute(input, list(reversed(range(input.dim()))))


# Rearrangement of channels into space, and back.


def _planes(function: Callable[..., Tensor], buffer: Tensor, r: int) -> Tensor:
    """Return `function(buffer, r)`, computed with the dimensions before the last three flattened.

    Without that, torch's result for volumes would depend on the memory format, which may differ
    between ranks. A buffer of four dimensions is not flattened, to keep its memory format.
    """
    if buffer.dim() == 4:
        return function(buffer, r)
    result = function(buffer.reshape(-1, *buffer.shape[-3:]), r)
    return result.reshape(*buffer.shape[:-3], *result.shape[1:])


def _cropped(x: Tensor, d: int, first: int, length: int) -> Tensor:
    """Return `x.narrow(d, first, length)`, or `x` itself if dimension `d` has `length` elements.

    The gradient of a slice would not have the memory format of `x`.
    """
    return x if x.shape[d] == length else x.narrow(d, first, length)


@implements(torch.pixel_shuffle)
def pixel_shuffle(input: DistTensor, upscale_factor: int) -> DistTensor:
    r = upscale_factor
    shape = check_on_meta(torch.pixel_shuffle, any_type(input), r)
    x, lead = input, input.dim() - 2
    needs: list[IndexMap] = [Same()] * (lead - 1) + [Grouped(1, r * r)]
    needs += [Grouped(r) if axes else Same() for axes in x.cuts[lead:]]
    buffer = gather_inputs(x, needs, x.cuts, "pixel_shuffle")
    box = box_on_rank(shape, x.cuts, x.grid)
    if 0 in box.shape:
        shard = empty_block(buffer, box.shape)
    else:
        shard = _planes(torch.pixel_shuffle, buffer, r)
        for d in (lead, lead + 1):
            shard = _cropped(shard, d, box.start[d] % r if x.cuts[d] else 0, box.shape[d])
    return DistTensor(shard, shape, x.cuts, x.grid)


@implements(torch.pixel_unshuffle)
def pixel_unshuffle(input: DistTensor, downscale_factor: int) -> DistTensor:
    r = downscale_factor
    shape = check_on_meta(torch.pixel_unshuffle, any_type(input), r)
    x, lead = input, input.dim() - 2
    needs: list[IndexMap] = [Same()] * (lead - 1) + [Grouped(r * r)]
    needs += [Window(r, r) if axes else Same() for axes in x.cuts[lead:]]
    buffer = gather_inputs(x, needs, x.cuts, "pixel_unshuffle")
    box = box_on_rank(shape, x.cuts, x.grid)
    if 0 in box.shape:
        return DistTensor(empty_block(buffer, box.shape), shape, x.cuts, x.grid)
    shard = _planes(torch.pixel_unshuffle, buffer, r)
    shard = _cropped(shard, lead - 1, box.start[lead - 1] % (r * r), box.shape[lead - 1])
    return DistTensor(shard, shape, x.cuts, x.grid)


# Functions that broadcast tensors to one shape, concatenate tensors, or split a tensor.


def _distributed(name: str, tensors: Sequence[Tensor]) -> list[DistTensor]:
    grid = common_grid(name, tensors)
    return [as_distributed(x, grid) for x in tensors]


@implements(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = broadcast_shape("broadcast_tensors", tensors)
    return tuple(x.expand(shape) for x in _distributed("broadcast_tensors", tensors))


def _at_least(function: Callable[..., Any], grown: Callable[[Tensor], Tensor]) -> None:
    @implements(of_sequence(function.__name__))
    def each(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(grown(x) for x in _distributed(function.__name__, tensors))

    @implements(function)
    def rule(*tensors: Tensor) -> Any:
        results = each(tensors)
        return results if len(tensors) > 1 else results[0]


def _as_vector(x: Tensor) -> Tensor:
    return x if x.dim() else x.unsqueeze(0)


def _as_matrix(x: Tensor) -> Tensor:
    return x if x.dim() > 1 else _as_vector(x).unsqueeze(0)


def _as_volume(x: Tensor) -> Tensor:
    return x if x.dim() > 2 else _as_matrix(x).unsqueeze(-1)


_at_least(torch.atleast_1d, _as_vector)
_at_least(torch.atleast_2d, _as_matrix)
_at_least(torch.atleast_3d, _as_volume)


@implements(torch.hstack)
def hstack(tensors: Sequence[Tensor]) -> DistTensor:
    pieces = [_as_vector(x) for x in tensors]
    return cat(pieces, 0 if pieces[0].dim() == 1 else 1)


@implements(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[Tensor]) -> DistTensor:
    return cat([_as_matrix(x) for x in tensors], 0)


@implements(torch.dstack)
def dstack(tensors: Sequence[Tensor]) -> DistTensor:
    return cat([_as_volume(x) for x in tensors], 2)


@implements(torch.column_stack)
def column_stack(tensors: Sequence[Tensor]) -> DistTensor:
    return cat([x if x.dim() > 1 else _as_vector(x).unsqueeze(1) for x in tensors], 1)


def _divided(function: Callable[..., Any], along: int | None = None) -> None:
    """Register torch.tensor_split, or a split along dimension `along`, such as torch.vsplit."""

    @implements(function, getattr(Tensor, function.__name__))
    def rule(input: DistTensor, *args: Any, **named: Any) -> tuple[DistTensor, ...]:
        dim = named.pop("dim", args[1] if args[1:] else 0)
        (given,) = (*args[:1], *named.values())  # under any of torch's names
        given = given.tolist() if isinstance(given, Tensor) else given
        given = given if isinstance(given, int) else tuple(given)
        named_dim = () if along is not None else (dim,)
        shapes = check_on_meta(function, any_type(input), given, *named_dim)
        dim = dim if along is None else min(along, input.dim() - 1)
        if isinstance(given, int):
            return consecutive(input, [shape[dim] for shape in shapes], dim)
        return tuple(slice_of(input, dim, *bounds) for bounds in pairwise([0, *given, None]))


_divided(torch.tensor_split)
_divided(torch.vsplit, 0)
_divided(torch.hsplit, 1)
_divided(torch.dsplit, 2)


# Changes of shape and order, composed of other functions with rules.


@implements(torch.Tensor.sum_to_size)
@takes_sequence("size")
def sum_to_size(input: DistTensor, *size: Any) -> Tensor:
    sizes = as_sizes(size)
    check_on_meta(torch.Tensor.sum_to_size, any_type(input), *([sizes] if size else []))
    lead = input.dim() - len(sizes)
    over = [d for d, n in enumerate(input.shape) if d < lead or sizes[d - lead] == 1 != n]
    return input.sum(over, keepdim=True).reshape(sizes) if over else input


@implements(torch.adjoint, torch.Tensor.adjoint, torch.Tensor.mH.__get__)  # type: ignore[attr-defined]
def adjoint(input: Tensor) -> Tensor:
    if input.dim() < 2:
        raise RuntimeError(f"adjoint: expected 2 dimensions or more, got {tuple(input.shape)}")
    transposed = input.transpose(-2, -1)
    return transposed.conj() if input.is_complex() else transposed


@implements(torch.Tensor.H.__get__)  # type: ignore[attr-defined]
def hermitian(input: Tensor) -> Tensor:
    if input.dim() not in (0, 2):
        raise RuntimeError(f"H: expected a matrix, got the shape {tuple(input.shape)}; use mH")
    return adjoint(input) if input.dim() else input.conj()


@implements(torch.rot90, torch.Tensor.rot90)
def rot90(input: DistTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    check_on_meta(torch.rot90, any_type(input), k, tuple(dims))
    first, second = dims
    turns = k % 4
    if turns == 0:
        return input.clone()
    if turns == 2:
        return flip(input, first, second)
    return flip(input, second if turns == 1 else first).transpose(first, second)


@implements(F.channel_shuffle, torch.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(input: DistTensor, groups: int) -> DistTensor:
    check_on_meta(torch.channel_shuffle, any_type(input), groups)
    places = torch.arange(input.shape[1], device=input.device)
    return index_select(input, 1, places.view(groups, -1).t().flatten())


@implements(torch.repeat_interleave, torch.Tensor.repeat_interleave)
def repeat_interleave(
    input: Tensor,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> DistTensor:
    if repeats is None:
        reason = "repeats without a tensor to repeat are not supported"
        refuse("repeat_interleave", reason, input, way_out="Call it on x.full_tensor()")
    x: Any = as_distributed(input, common_grid("repeat_interleave", tensors_in(input, repeats)))
    if dim is None:
        x = x.flatten()
    d = normalize_dim(0 if dim is None else dim, x.dim())
    if not x.dim():
        x = x.reshape(1)
    places = torch.arange(x.shape[d], device=x.device)
    counts = gather_whole(repeats, "repeat_interleave")
    chosen = torch.repeat_interleave(places, counts, output_size=output_size)
    return index_select(x, d, chosen)


@implements(torch.unravel_index)
def unravel_index(indices: Tensor, shape: Any) -> tuple[Tensor, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    check_on_meta(_unraveled, indices, sizes)
    return tuple(unravel(indices, sizes))


def _unraveled(indices: Tensor, sizes: tuple[int, ...]) -> Any:
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"unravel_index: indices of {indices.dtype}; expected whole numbers")
    if min(sizes, default=0) < 0:
        raise ValueError(f"unravel_index: the shape {sizes} has a negative size")
    return [indices for _ in sizes]


# Functions that return a copy where the function without `_copy` returns a view.


def _copied(function: Callable[..., Any], view: Callable[..., Any]) -> None:
    @implements(function)
    def rule(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        if isinstance(result, Tensor):
            return result.clone()
        return tuple(part.clone() for part in result)


for _name in """
    detach diagonal narrow permute select split split_with_sizes squeeze t transpose unbind
    unsqueeze view_as_complex view_as_real
""".split():
    _copied(getattr(torch, f"{_name}_copy"), getattr(torch, _name))
_copied(torch.Tensor.narrow_copy, torch.narrow)
_copied(torch.alias_copy, lambda input: input)
_copied(torch.expand_copy, lambda input, size, *, implicit=False: expand(input, size))
_copied(torch.slice_copy, slice_of)
_copied(torch.unfold_copy, torch.Tensor.unfold)
_copied(torch.view_copy, torch.Tensor.view)


def _in_place(method: Callable[..., Any], view: Callable[..., Any]) -> None:
    name = method.__name__
    rule = RULES[view]

    @implements(method)
    def reshaped(input: DistTensor, *args: Any, **kwargs: Any) -> DistTensor:
        hooked = input.is_leaf or input.gradient_hook or not torch.is_grad_enabled()
        if input.requires_grad and hooked:
            reason = "the retained gradient of the tensor, or its history, would be wrong"
            way_out = f"Use the view that x.{name.removesuffix('_')}(...) returns"
            refuse(name, reason, input, way_out=way_out)
        made = rule(input, *args, **kwargs)
        # Below torch's functions, the shape is also that of a tensor without memory.
        with torch.no_grad(), without_torch_function(), without_torch_dispatch():
            method(input, *args, **kwargs)
        input.become(made)
        return input


for _name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"):
    _in_place(getattr(torch.Tensor, f"{_name}_"), getattr(torch.Tensor, _name))
