"""Other orders and repetitions of the elements, and assignment to slices."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.index_maps import IndexMap, Reversed, Rolled, Same
from distconv.ops.shape.indexing import (
    assign_picked,
    cat,
    index_per_dimension,
    indices_of,
    picks_elements,
    strided_run,
)
from distconv.ops.shape.reshape import permute, unsqueeze
from distconv.ops.support.argument_forms import (
    as_sizes,
    normalize_dim,
    normalize_dims,
    takes_sequence,
)
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import common_grid, gather_whole
from distconv.tensor.aliasing import check_writable
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import tensors_in
from distconv.tensor.redistribution import gather_inputs
from distconv.tensor.whole_numbers import whole_numbers


@implements(torch.flip, torch.Tensor.flip)
@takes_sequence("dims")
def flip(input: DistTensor, *dims: Any) -> DistTensor:
    """Return the elements in reverse order along dimensions."""
    named = as_sizes(dims)
    chosen = normalize_dims(named, input.dim()) if named else ()
    needs = [Reversed() if d in chosen and axes else Same() for d, axes in enumerate(input.cuts)]
    buffer = gather_inputs(input, needs, input.cuts, "flip")
    return DistTensor(buffer.flip(chosen), input.shape, input.cuts, input.grid)


@implements(torch.fliplr, torch.Tensor.fliplr)
def fliplr(input: DistTensor) -> DistTensor:
    """Return the elements in reverse order along dimension 1."""
    return flip(input, 1)


@implements(torch.flipud, torch.Tensor.flipud)
def flipud(input: DistTensor) -> DistTensor:
    """Return the elements in reverse order along dimension 0."""
    if not input.dim():
        raise RuntimeError("flipud: the tensor has no dimensions; expected at least 1")
    return flip(input, 0)


@implements(torch.roll, torch.Tensor.roll)
def roll(
    input: DistTensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None
) -> DistTensor:
    """Move the elements along dimensions; those that leave at one end enter at the other."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        flat = input.flatten()
        assert isinstance(flat, DistTensor)
        result = roll(flat, shifts, 0).view(tuple(input.shape))
        assert isinstance(result, DistTensor)
        return result
    amounts, chosen = whole_numbers(shifts, "shifts"), whole_numbers(dims, "dims")
    if len(amounts) != len(chosen):
        raise RuntimeError(f"roll: {len(amounts)} shifts for {len(chosen)} dimensions")
    total = [0] * input.dim()
    for shift, d in zip(amounts, chosen, strict=True):
        total[normalize_dim(d, input.dim())] += shift
    needs: list[IndexMap] = [
        Rolled(shift) if shift and axes and n else Same()
        for shift, axes, n in zip(total, input.cuts, input.shape, strict=True)
    ]
    buffer = gather_inputs(input, needs, input.cuts, "roll")
    rest = [d for d, need in enumerate(needs) if isinstance(need, Same)]
    buffer = buffer.roll([total[d] for d in rest], rest) if rest else buffer.clone()
    return DistTensor(buffer, input.shape, input.cuts, input.grid)


@implements(torch.tile, torch.Tensor.tile)
@takes_sequence("dims")
def tile(input: DistTensor, *dims: Any) -> DistTensor:
    """Repeat the tensor so many times along each of the last dimensions."""
    times = as_sizes(dims)
    return repeat(input, (1,) * (input.dim() - len(times)) + times)


@implements(torch.Tensor.repeat)
@takes_sequence("repeats")
def repeat(input: DistTensor, *repeats: Any) -> DistTensor:
    """Repeat the tensor so many times along each dimension."""
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
    """Move dimensions to other places, the rest staying in order."""
    numbered = torch.empty(tuple(range(input.dim())), device="meta")
    moved = torch.movedim(numbered, source, destination)  # type: ignore[arg-type]
    return permute(input, tuple(moved.shape))


@implements(torch.t, torch.Tensor.t, torch.Tensor.T.__get__)  # type: ignore[attr-defined]
def t(input: DistTensor) -> DistTensor:
    """Return the transpose of a matrix."""
    if input.dim() > 2:
        raise RuntimeError(f"t: expected at most 2 dimensions, got {input.dim()}; use permute")
    return permute(input, list(reversed(range(input.dim()))))


@implements(torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def matrix_transpose(input: DistTensor) -> Tensor:
    """Return the tensor with the last two dimensions exchanged."""
    return input.transpose(-2, -1)


@implements(torch.Tensor.__setitem__)
def setitem(input: DistTensor, index: Any, value: Any) -> None:
    """Assign to slices and positions; each rank writes what lies in its block.

    `value` is a number, or a tensor that is broadcast to the slice; a distributed one is made whole
    first. Where tensors are indices, everything is, but for a number where one mask is true. A
    plain tensor takes distributed values outside autograd.
    """
    items = indices_of(index)
    if not isinstance(input, DistTensor):
        _assign_to_plain(input, items, value)
        return
    picked = [item for item in items if picks_elements(item)]
    if len(items) == 1 and picked and items[0].dtype == torch.bool and isinstance(value, Number):
        _assign_where(input, items[0], value)
        return
    check_writable(input, "assignment")
    if picked:
        assign_picked(input, items, value)
        return
    value = gather_whole(value, "assignment")
    box = input.box
    into: list[Any] = []
    taken: list[slice] = []
    shape: list[int] = []
    d = 0
    for pick in index_per_dimension(input, items):
        if pick is None:
            into.append(None)
            taken.append(slice(None))
            shape.append(1)
            continue
        first, step, outputs = strided_run(pick, input.shape[d], d)
        # Positions low to high of the run lie in this rank's block.
        low = max(0, -((first - box.start[d]) // step))
        high = max(low, min(outputs, -((first - box.stop[d]) // step)))
        begin = first + low * step - box.start[d]
        into.append(
            slice(begin, begin + max(high - low, 0) * step, step) if high > low else slice(0, 0)
        )
        if isinstance(pick, int):
            # The dimension is not one of the value's; it is written as a slice of one.
            shape.append(-1)
        else:
            shape.append(outputs)
        taken.append(slice(low, high))
        d += 1
    if isinstance(value, Tensor):
        value = _part(value, shape, taken)
    input.shard[tuple(into)] = value


def _assign_to_plain(input: Tensor, items: tuple[Any, ...], value: Any) -> None:
    """Assign to a plain tensor, equal on all ranks, what is made whole on every rank."""
    operands = tensors_in(input, items, value)
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        refuse(
            "assignment",
            "a plain tensor takes distributed values only outside autograd",
            *operands,
            way_out="Assign to a distributed tensor, such as x.new_zeros(...), or use torch.cat",
        )
    common_grid("assignment", operands)
    picked = tuple(gather_whole(item, "assignment") for item in items)
    input[picked] = gather_whole(value, "assignment")


def _assign_where(input: DistTensor, mask: Tensor, value: Any) -> None:
    """Assign a number where a mask of the leading dimensions is true."""
    if mask.shape != input.shape[: mask.dim()]:
        raise IndexError(
            f"the mask of shape {tuple(mask.shape)} does not match the first dimensions of the "
            f"tensor of shape {tuple(input.shape)}"
        )
    if isinstance(value, complex) and not input.is_complex():
        raise RuntimeError(f"{value} cannot be converted to {input.dtype}")
    rest = (None,) * (input.dim() - mask.dim())
    # A number of another type is converted as in an assignment, which masked_fill_ refuses.
    input.masked_fill_(mask[(..., *rest)], torch.tensor(value, dtype=input.dtype).item())


def _part(value: Tensor, shape: list[int], taken: list[slice]) -> Tensor:
    """Return this rank's part of a value broadcast to `shape`, where -1 stands for no dimension."""
    kept = [n for n in shape if n >= 0]
    while value.dim() > len(kept) and value.shape[0] == 1:
        value = value.squeeze(0)
    value = value.expand(kept)
    for d, n in enumerate(shape):
        if n < 0:
            value = value.unsqueeze(d)
    return value[
        tuple(slice(0, t.stop - t.start) if n < 0 else t for n, t in zip(shape, taken, strict=True))
    ]
