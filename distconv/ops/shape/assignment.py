"""Assignment to slices, positions and masks: each rank writes to its own block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from distconv import torch_private
from distconv.geometry.index_maps import IndexMap, Same, WrittenSlice
from distconv.geometry.layout import Cuts
from distconv.ops.shape.indexing import (
    assign_picked,
    index_per_dimension,
    indices_of,
    is_mask,
    picks_elements,
    runs_of,
)
from distconv.ops.shape.lookup import assign_by_mask
from distconv.ops.shape.scatter import added_at
from distconv.ops.support.arguments import check_on_meta, strided_run
from distconv.ops.support.dimensions import assigns_slices
from distconv.ops.support.in_place import (
    become_distributed,
    implements_in_place,
    is_recorded,
)
from distconv.ops.support.operands import (
    as_distributed,
    common_grid,
    gather_whole,
)
from distconv.ops.support.spectra import is_fresh_spectrum
from distconv.tensor.aliasing import prepare_write, update_views
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import UnsupportedOperation, implements, innermost_call, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.plain_copies import follow
from distconv.tensor.redistribution import gather_inputs


@implements(torch.Tensor.__setitem__)
def setitem(input: DistTensor, index: Any, value: Any) -> None:
    """Assign `value` to `input[index]`; each rank writes to its own block. Collective.

    `value` is a number, or a tensor that is broadcast to the slice. Each rank receives the elements
    of a distributed `value` that it writes, and no others. If tensors are indices, all operands are
    gathered on every rank, except for a single mask beside full slices. A plain `input` becomes
    distributed if autograd records the assignment.
    """
    if not isinstance(input, DistTensor):
        _assign_to_plain(input, index, value)
        return
    items = indices_of(index)
    picked = [item for item in items if picks_elements(item)]
    if len(items) == 1 and picked and is_mask(items[0]) and isinstance(value, Number):
        _assign_where(input, items[0], value)
        return
    if not picked:
        _assign_slices(input, tuple(index_per_dimension(input, items)), value)
        return
    prepare_write(input, "assignment")
    first = _before_mask(items)
    if first is None:
        assign_picked(input, items, value)
    else:
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=input.dtype, device=input.device)
        assign_by_mask(input, first, picked[0], value)


@implements(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(input: DistTensor, value: Tensor) -> None:
    """Copy the elements of `value`, of any layout, to `input`, as `x.data = value`. Collective.

    Raises UnsupportedOperation if the shape or type of `value` differs.
    """
    if (value.shape, value.dtype) != (input.shape, input.dtype):
        reason = f"it is set to {tuple(value.shape)} of {value.dtype}, but is of {input.dtype}"
        way_out = "Convert a module before parallelize, or a tensor by x.to(...)"
        refuse("Tensor.data", reason, input, way_out=way_out)
    with torch.no_grad():
        input.copy_(value)


def _set_data(x: Tensor, value: Any) -> None:
    """Set `x.data = value`, in place of torch's setter. Collective if `value` is a DistTensor.

    A plain `x` gets the global tensor of a DistTensor. The slices and aliases of `x` in operators
    follow.
    """
    if isinstance(value, DistTensor) and not isinstance(x, DistTensor):
        with torch.no_grad():
            value = value.full_tensor()
    torch_private.set_data(x, value)
    follow(x)


torch_private.at_first_grid(partial(torch_private.replace_data_setter, _set_data))


@implements(torch.index_put_, torch.Tensor.index_put_)
def index_put_(
    input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Tensor:
    if accumulate:
        input[...] = added_at(input, indices, values)
    else:
        input[tuple(indices)] = values
    return input


@implements(torch.index_put, torch.Tensor.index_put)
def index_put(
    input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Tensor:
    if accumulate:
        return added_at(input, indices, values)
    result = as_distributed(input, common_grid("index_put", tensors_in(input, indices, values)))
    return index_put_(result.clone(), indices, values)


@implements(torch.masked_scatter, torch.Tensor.masked_scatter)
def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return `input` with the first elements of `source` copied where `mask` is true. Collective.

    Raises RuntimeError if `source` has fewer elements than `mask` has true ones.
    """
    name = "masked_scatter"
    shape = check_on_meta(torch.masked_scatter, input, mask, source)
    places = as_distributed(mask, common_grid(name, (input, mask, source))).expand(shape)
    number = int(places.sum())
    if source.numel() < number:
        raise RuntimeError(f"{name}: {source.numel()} elements for {number} places of the mask")
    result = as_distributed(input, places.grid).expand(shape).clone()  # type: ignore[attr-defined]
    result[places] = source.flatten()[:number]
    return result


implements_in_place(torch.Tensor.masked_scatter_, masked_scatter)


@assigns_slices
def _assign_slices(input: DistTensor, picks: tuple[Any, ...], value: Any) -> None:
    """Assign to `input` at `picks`: integers, slices, and None for new dimensions. Collective."""
    if input.pending is not None:
        runs = runs_of(input, picks)
        if runs is not None and input.pending.assign(input, picks, runs, value):
            return
    prepare_write(input, "assignment")
    recipe = value.recipe if isinstance(value, DistTensor) else None
    # At the end of x[i] += y Python assigns the view, which has already been written to x.
    if recipe is None or recipe.base is not input or recipe.place != picks:
        _write_slices(input, picks, value)


def _write_slices(input: DistTensor, picks: Sequence[Any], value: Any) -> None:
    """Write `value` to `input[picks]`; each rank writes to its own block. Collective.

    Each rank receives the elements of a distributed `value` that it writes, and no others. `picks`
    has an integer or slice for each dimension of `input`, and None for each new dimension.
    """
    box = input.box
    into: list[Any] = []
    taken: list[slice] = []
    shape: list[int] = []
    cuts: list[tuple[str, ...]] = []
    needs: list[IndexMap] = []
    d = 0
    for pick in picks:
        if pick is None:
            into.append(None)
            taken.append(slice(None))
            shape.append(1)
            cuts.append(())
            needs.append(Same())
            continue
        first, step, outputs = strided_run(pick, input.shape[d], d)
        # Of the written positions, numbers low to high - 1 lie in this rank's block.
        low = max(0, -((first - box.start[d]) // step))
        high = max(low, min(outputs, -((first - box.stop[d]) // step)))
        begin = first + low * step - box.start[d]
        into.append(
            slice(begin, begin + max(high - low, 0) * step, step) if high > low else slice(0, 0)
        )
        full = (first, step, outputs) == (0, 1, input.shape[d]) and not isinstance(pick, int)
        taken.append(slice(box.start[d], box.stop[d]) if full else slice(low, high))
        cuts.append(input.cuts[d])
        needs.append(
            Same() if full or not input.cuts[d] else WrittenSlice(first, input.shape[d], step)
        )
        # The value has no dimension for an integer; it is written as a slice of one element.
        shape.append(-1 if isinstance(pick, int) else outputs)
        d += 1
    if isinstance(value, Tensor):
        kept = [n for n in shape if n >= 0]
        while value.dim() > len(kept) and value.shape[0] == 1:
            value = value.squeeze(0)
        value = value.expand(kept)
        for at, n in enumerate(shape):
            if n < 0:
                value = value.unsqueeze(at)
        written = zip(cuts, needs, strict=True)
        if not isinstance(value, DistTensor):
            value = value[tuple(taken)]
        elif value.cuts == tuple(axes if isinstance(need, Same) else () for axes, need in written):
            here = zip(taken, needs, strict=True)
            own = [t if isinstance(need, WrittenSlice) else slice(None) for t, need in here]
            value = value.shard[tuple(own)]
        else:
            value = gather_inputs(value, needs, tuple(cuts), "assignment")
    target = input.shard[tuple(into)]
    # x[i] += y assigns the view that it has written. torch's copy of a tensor to itself raises if
    # the strides of dimensions of size 1 differ.
    if not (isinstance(value, Tensor) and _is_same_memory(target, value)):
        input.shard[tuple(into)] = value
    update_views(input)


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether `x` and `y` are the same elements in memory, in the same order."""
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    one, two = (
        (torch_private.address_of_memory(t), t.storage_offset(), t.squeeze().stride())
        for t in (x, y)
    )
    return one == two


def _before_mask(items: tuple[Any, ...]) -> int | None:
    """Return the number of dimensions before the mask in an index of one mask and full slices.

    Returns None for any other index. `items` is the index as a tuple.
    """
    masks = [i for i, item in enumerate(items) if is_mask(item)]
    rest = [item for item in items if not is_mask(item)]
    if len(masks) != 1 or not items[masks[0]].dim():
        return None
    if any(not isinstance(item, slice) or item != slice(None) for item in rest):
        return None
    return masks[0]


def _assign_to_plain(input: Tensor, index: Any, value: Any) -> None:
    """Assign distributed values to the plain tensor `input`, equal on all ranks. Collective.

    `input` becomes distributed if autograd records the assignment, or if a parallelized module
    assigns modes to a new spectrum. Otherwise every rank gathers `value` and writes all of it.
    """
    items = indices_of(index)
    operands = tensors_in(items, value)
    recorded = is_recorded((input, *operands))
    if recorded or (innermost_call() is not None and is_fresh_spectrum(input)):
        cuts = _cuts_by_index(input, items, value)
        try:
            become_distributed(
                "assignment", input, operands, lambda x: setitem(x, index, value), cuts
            )
            return
        except UnsupportedOperation:
            if recorded:
                raise
    common_grid("assignment", operands)
    picked = tuple(gather_whole(item, "assignment") for item in items)
    input[picked] = gather_whole(value, "assignment")


def _cuts_by_index(input: Tensor, items: tuple[Any, ...], value: Any) -> Cuts | None:
    """Return the cuts with which the assignment `input[items] = value` makes `input` distributed.

    The cuts, the grid axes of each dimension, are those of the value or of the mask. Returns None
    if tensors are indices, except for a single mask beside full slices.
    """
    cuts: list[tuple[str, ...]] = [()] * input.dim()
    first = _before_mask(items)
    if first is not None:
        mask = next(item for item in items if is_mask(item))
        if isinstance(mask, DistTensor):
            cuts[first : first + mask.dim()] = mask.cuts
            return tuple(cuts[: input.dim()])
    if any(map(picks_elements, items)):
        return None
    kept, d = [], 0
    for pick in index_per_dimension(input, items):
        if not isinstance(pick, int):
            kept.append(None if pick is None else d)
        d += pick is not None
    if isinstance(value, DistTensor):
        for place, axes in zip(kept[::-1], value.cuts[::-1], strict=False):
            if place is not None:
                cuts[place] = axes
    return tuple(cuts)


def _assign_where(input: DistTensor, mask: Tensor, value: Any) -> None:
    """Assign a number where `mask`, over the leading dimensions of `input`, is true."""
    if mask.shape != input.shape[: mask.dim()]:
        raise IndexError(
            f"the mask of shape {tuple(mask.shape)} does not match the first dimensions of the "
            f"tensor of shape {tuple(input.shape)}"
        )
    if isinstance(value, complex) and not input.is_complex():
        raise RuntimeError(f"{value} cannot be converted to {input.dtype}")
    rest = (None,) * (input.dim() - mask.dim())
    # An assignment converts a number of another type; masked_fill_ raises for some types.
    input.masked_fill_(mask[(..., *rest)], torch.tensor(value, dtype=input.dtype).item())
