"""Slices, single positions and splits of tensors, and concatenation.

A slice of a partitioned dimension is partitioned again into blocks of nearly equal length. Only the
elements that change their rank are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distconv.geometry.index_maps import IndexMap, Same, Strided, WrittenSlice
from distconv.ops.shape.lookup import picked_by_mask, rows_at, selected
from distconv.ops.shape.reshape import unflatten, unsqueeze
from distconv.ops.support.arguments import any_type, check_on_meta, normalize_dim, strided_run
from distconv.ops.support.dimensions import divides_along, joins_along, takes_slices
from distconv.ops.support.operands import as_distributed, common_grid, gather_whole
from distconv.tensor.aliasing import make_view
from distconv.tensor.base import Run
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, redistribute


@implements(torch.Tensor.__getitem__)
def getitem(input: Tensor, index: Any) -> DistTensor:
    """Return `input[index]` for integers, slices, None, "...", tensors and lists. Collective.

    Steps of slices must be positive. Elements that a mask picks are replicated on every rank, along
    one dimension. With several tensors as indices, all operands are gathered first.
    """
    items = indices_of(index)
    tensors = [i for i, item in enumerate(items) if _is_lookup(item)]
    masks = [i for i, item in enumerate(items) if is_mask(item)]
    if len(masks) == 1 and not tensors and isinstance(input, DistTensor):
        return _masked(input, items, masks[0])
    if masks or len(tensors) > 1:
        return _picked(input, items)
    input = as_distributed(input, common_grid("indexing", (input, *items)))
    if len(tensors) == 1:
        return _looked_up(input, items, tensors[0])
    picks = index_per_dimension(input, items)
    if input.pending is not None:
        return _of_pending(input, tuple(picks))
    return _sliced(input, tuple(picks))


@takes_slices
def _sliced(input: DistTensor, index: tuple[Any, ...]) -> DistTensor:
    """Return a view of `input` at integers, slices, and None for new dimensions. Collective."""
    # `needs` and `cuts` say which elements of `input` this rank gathers, `local` is the index in
    # the gathered elements, `shape` and `kept` are the shape and the cuts of the result.
    needs: list[IndexMap] = []
    cuts: list[tuple[str, ...]] = []
    local: list[Any] = []
    shape: list[int] = []
    kept: list[tuple[str, ...]] = []
    d = 0
    for pick in index:
        if pick is None:
            local.append(None)
            shape.append(1)
            kept.append(())
            continue
        size, axes = input.shape[d], input.cuts[d]
        d += 1
        first, step, outputs = strided_run(pick, size, d - 1)
        single = isinstance(pick, int)
        if not axes:
            needs.append(Same())
            local.append(pick if single else slice(first, first + outputs * step, step))
        elif (first, step, outputs) == (0, 1, size) and not single:
            needs.append(Same())
            local.append(slice(None))
        else:
            needs.append(Strided(first, step, outputs))
            local.append(0 if single else slice(None, None, step))
        cuts.append(() if single else axes)
        if not single:
            shape.append(outputs)
            kept.append(axes)
    buffer = gather_inputs(input, needs, tuple(cuts), "indexing")
    moved = any(isinstance(need, Strided) for need in needs)

    def write(base: DistTensor, view: DistTensor) -> None:
        base[index] = view

    return make_view(
        input,
        buffer[tuple(local)],
        shape,
        tuple(kept),
        lambda base: getitem(base, index),
        write if moved else None,
        place=index,
    )


def _of_pending(input: DistTensor, index: tuple[Any, ...]) -> DistTensor:
    """Return a part of a pending tensor, if possible without its other elements. Collective."""
    assert input.pending is not None
    runs = runs_of(input, index)
    part = None if runs is None else input.pending.part(input, index, runs)
    if part is None:
        return _sliced(input, index)

    def make(base: DistTensor) -> DistTensor:
        return redistribute(getitem(base, index), part.cuts, "indexing")

    def write(base: DistTensor, view: DistTensor) -> None:
        base[index] = view

    return make_view(input, part.shard, part.shape, part.cuts, make, write, place=index)


def runs_of(input: Tensor, index: Sequence[Any]) -> list[Run] | None:
    """Return (first, step, count) of the positions in each dimension; None if `index` has None."""
    if None in index:
        return None
    pairs = zip(index, input.shape, strict=True)
    return [strided_run(pick, n, d) for d, (pick, n) in enumerate(pairs)]


def indices_of(index: Any) -> tuple[Any, ...]:
    """Return an index as a tuple, with tensors in place of lists and arrays.

    As in torch, a list of fewer than 32 items with a slice, sequence, None or ellipsis among them
    is a tuple of indices.
    """
    several = (Tensor, slice, list, tuple, range, np.ndarray, type(None), type(Ellipsis))
    if isinstance(index, list) and len(index) < 32 and any(isinstance(i, several) for i in index):
        index = tuple(index)
    return tuple(map(_listed, index if isinstance(index, tuple) else (index,)))


def is_mask(item: Any) -> bool:
    """Return whether an index is a tensor of booleans."""
    return isinstance(item, Tensor) and item.dtype == torch.bool


def picks_elements(item: Any) -> bool:
    """Return whether an index is a tensor of booleans, or of more than one position."""
    return is_mask(item) or _is_lookup(item)


def index_per_dimension(input: Tensor, index: tuple[Any, ...]) -> list[Any]:
    """Return an integer or slice for each dimension of `input`, and None for each new dimension.

    Raises IndexError for too many indices, UnsupportedOperation for items of other types.
    """
    for item in index:
        if not (item is None or item is Ellipsis or isinstance(item, slice) or _is_integer(item)):
            reason = f"an index of type {type(item).__name__} is not supported"
            way_out = "Use integers, slices, tensors and lists, or index x.full_tensor()"
            refuse("indexing", reason, input, way_out=way_out)
    named = sum(item is not None and item is not Ellipsis for item in index)
    if named > input.dim():
        raise IndexError(f"too many indices for tensor of dimension {input.dim()}")
    rest: list[Any] = [slice(None)] * (input.dim() - named)
    ellipses = [i for i, item in enumerate(index) if item is Ellipsis]
    at = ellipses[0] if ellipses else len(index)
    items = [*index[:at], *rest, *(item for item in index[at:] if item is not Ellipsis)]
    # torch treats every ellipsis as the same number of dimensions.
    if rest and len(ellipses) > 1 and ellipses[1] < len(index) - len(ellipses) + 1:
        reason = "an index has two ellipses, and the second is not empty"
        refuse("indexing", reason, input, way_out="Write one")
    return [int(item) if _is_integer(item) else item for item in items]


def _masked(input: DistTensor, items: tuple[Any, ...], at: int) -> DistTensor:
    """Return `input[items]`, where the only tensor is `items[at]`, a mask. Collective."""
    mask, count = items[at], items[at].dim()
    markers = [slice(None) for _ in range(count)]
    picks = index_per_dimension(input, (*items[:at], *markers, *items[at + 1 :]))
    if not count:
        return _picked(input, items)
    place = next(i for i, pick in enumerate(picks) if pick is markers[0])
    first = sum(not isinstance(pick, int) for pick in picks[:place])
    x = getitem(input, tuple(picks))
    if first:
        x = x.movedim(list(range(first, first + count)), list(range(count)))  # type: ignore[assignment]
    rows = picked_by_mask(x, mask, "indexing")
    return rows.movedim(0, first) if first else rows  # type: ignore[return-value]


def _picked(input: Tensor, items: tuple[Any, ...]) -> DistTensor:
    """Return `input[items]`, replicated on every rank, by gathering all operands. Collective."""
    grid = common_grid("indexing", (input, *items))
    whole = gather_whole(input, "indexing")[tuple(gather_whole(i, "indexing") for i in items)]
    return as_distributed(whole, grid)


def assign_picked(input: DistTensor, items: tuple[Any, ...], value: Any) -> None:
    """Assign `value` to `input[items]`, any index of torch; operands are gathered. Collective."""
    grid = common_grid("assignment", (input, *items, value))
    whole = gather_whole(input, "assignment").clone()
    picked = tuple(gather_whole(i, "assignment") for i in items)
    whole[picked] = gather_whole(value, "assignment")
    input.copy_(as_distributed(whole, grid))


def _listed(item: Any) -> Any:
    """Return a list, tuple or array converted to a tensor, as by torch; other items unchanged."""
    if isinstance(item, (list, tuple, range, np.ndarray)):
        tensor = torch.as_tensor(item)
        # An empty list of positions is not a list of floating-point numbers.
        return tensor if tensor.numel() else tensor.long()
    return item


def _is_lookup(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.dtype in (torch.int32, torch.int64)


def _looked_up(input: DistTensor, items: tuple[Any, ...], at: int) -> DistTensor:
    """Return `input[items]`, where the only tensor is `items[at]`, of positions. Collective."""
    index, marker = items[at], slice(None)
    picks = index_per_dimension(input, (*items[:at], marker, *items[at + 1 :]))
    place = next(i for i, pick in enumerate(picks) if pick is marker)
    d = sum(not isinstance(pick, int) for pick in picks[:place])
    x = getitem(input, tuple(picks))
    if isinstance(index, DistTensor) and not (d or any(x.cuts)):
        return rows_at(index, x)
    picked = selected(x, d, index.flatten(), wraps=True)
    return picked if index.dim() == 1 else unflatten(picked, d, tuple(index.shape))


def _is_integer(item: Any) -> bool:
    if isinstance(item, Tensor):
        other = item.is_floating_point() or item.is_complex() or item.dtype == torch.bool
        return not (item.dim() or other)
    return hasattr(item, "__index__") and not isinstance(item, bool)


def slice_of(
    input: DistTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> DistTensor:
    """Return the slice `start:end:step` of `input` along dimension `dim`. Collective."""
    d = normalize_dim(dim, input.dim())
    return getitem(input, (*(slice(None),) * d, slice(start, end, step)))


@implements(torch.narrow, torch.Tensor.narrow)
def narrow(input: DistTensor, dim: int, start: int | Tensor, length: int) -> DistTensor:
    if isinstance(start, Tensor):
        if not _is_integer(start):
            raise RuntimeError(
                f"narrow: start is a {start.dtype} tensor of shape {tuple(start.shape)}; expected "
                "an integer, or a 0-d tensor of one"
            )
        start = int(start)
    d = normalize_dim(dim, input.dim())
    start = start + input.shape[d] if start < 0 else start
    if not 0 <= start <= start + length <= input.shape[d]:
        raise RuntimeError(
            f"narrow: start {start} and length {length} exceed dimension {d} of size "
            f"{input.shape[d]}"
        )
    return slice_of(input, d, start, start + length)


@implements(torch.select, torch.Tensor.select)
def select(input: DistTensor, dim: int, index: int) -> DistTensor:
    d = normalize_dim(dim, input.dim())
    return getitem(input, (*(slice(None),) * d, index))


@implements(torch.split, torch.Tensor.split, torch.functional.split)
def split(
    tensor: DistTensor, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> tuple[DistTensor, ...]:
    return _split(tensor, _lengths(torch.split, tensor, split_size_or_sections, dim), dim)


@implements(torch.chunk, torch.Tensor.chunk)
def chunk(input: DistTensor, chunks: int, dim: int = 0) -> tuple[DistTensor, ...]:
    return _split(input, _lengths(torch.chunk, input, chunks, dim), dim)


# torch lets programs write to these slices in place, also under autograd.


@implements(torch.unsafe_split, torch.Tensor.unsafe_split)
def unsafe_split(tensor: DistTensor, split_size: int, dim: int = 0) -> tuple[DistTensor, ...]:
    return consecutive(tensor, _lengths(torch.unsafe_split, tensor, split_size, dim), dim)


@implements(torch.unsafe_split_with_sizes, torch.Tensor.unsafe_split_with_sizes)
def unsafe_split_with_sizes(
    input: DistTensor, split_sizes: Sequence[int], dim: int = 0
) -> tuple[DistTensor, ...]:
    lengths = _lengths(torch.unsafe_split_with_sizes, input, split_sizes, dim)
    return consecutive(input, lengths, dim)


@implements(torch.unsafe_chunk, torch.Tensor.unsafe_chunk)
def unsafe_chunk(input: DistTensor, chunks: int, dim: int = 0) -> tuple[DistTensor, ...]:
    return consecutive(input, _lengths(torch.unsafe_chunk, input, chunks, dim), dim)


def _lengths(function: Callable[..., Any], x: DistTensor, *arguments: Any) -> list[int]:
    """Return the lengths of the slices that `function(x, *arguments)` returns.

    The last of `arguments` is the dimension.
    """
    shapes = check_on_meta(function, any_type(x), *arguments)
    return [shape[arguments[-1]] for shape in shapes]


def consecutive(x: DistTensor, lengths: Sequence[int], dim: int) -> tuple[DistTensor, ...]:
    """Return consecutive slices of `x` along `dim`, from position 0 on, of the given lengths."""
    d = normalize_dim(dim, x.dim())
    return tuple(slice_of(x, d, start, stop) for start, stop in _bounds(lengths))


def _bounds(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(lengths, initial=0))


def _split(x: DistTensor, lengths: Sequence[int], dim: int) -> tuple[DistTensor, ...]:
    picks = [slice(*bounds) for bounds in _bounds(lengths)]
    d = normalize_dim(dim, x.dim())
    return _parts(x, d, picks, lambda block, d: block.split(tuple(lengths), d))


@implements(torch.unbind, torch.Tensor.unbind, torch.Tensor.__iter__)
def unbind(input: DistTensor, dim: int = 0) -> tuple[DistTensor, ...]:
    d = normalize_dim(dim, input.dim())
    return _parts(input, d, range(input.shape[d]), torch.unbind)


@divides_along
def _parts(
    x: DistTensor,
    d: int,
    picks: Sequence[int | slice],
    function: Callable[[Tensor, int], Sequence[Tensor]],
) -> tuple[DistTensor, ...]:
    """Return the parts of `x` at each of `picks`, integers or slices, along dimension `d`.

    If dimension `d` is not partitioned, `function`, such as torch.unbind, divides the block. Then
    the gradient is one tensor in the memory format of the block. With slices, each slice would have
    a gradient of the size of the block, with channels first. Parts along a partitioned dimension
    are slices.
    """
    indices = [(*(slice(None),) * d, pick) for pick in picks]
    if x.cuts[d] or x.pending is not None:
        return tuple(getitem(x, index) for index in indices)

    def part(shard: Tensor, index: tuple[Any, ...]) -> DistTensor:
        kept = () if isinstance(index[d], int) else (shard.shape[d],)
        shape = (*x.shape[:d], *kept, *x.shape[d + 1 :])
        cuts = (*x.cuts[:d], *((),) * len(kept), *x.cuts[d + 1 :])
        return make_view(x, shard, shape, cuts, lambda base: getitem(base, index))

    return tuple(map(part, function(x.shard, d), indices))


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> DistTensor:
    """Concatenate along `dim`, in the layout of the largest partitioned tensor. Collective."""
    grid = common_grid("cat", tensors)
    if not all(t.dim() for t in tensors):
        raise RuntimeError("cat: tensors without dimensions cannot be concatenated; use stack")
    check_on_meta(torch.cat, tuple(map(any_type, tensors)), dim)
    # torch skips tensors of shape (0,), whatever the other shapes, but not in the backward pass.
    pieces = [as_distributed(t, grid) for t in tensors]
    skipped = [x for x in pieces if tuple(x.shape) == (0,)]
    pieces = [x for x in pieces if tuple(x.shape) != (0,)]
    if not pieces:
        pieces, skipped = skipped, []
    return _joined(pieces, normalize_dim(dim, pieces[0].dim()), skipped)


@joins_along
def _joined(pieces: Sequence[DistTensor], d: int, skipped: Sequence[DistTensor] = ()) -> DistTensor:
    """Return `pieces` concatenated along `d`, in the layout of the largest. Collective.

    `skipped` are tensors of shape (0,), which torch.cat leaves out, but gives gradients.
    """
    # To partition a replicated tensor, nothing is sent.
    largest = max(pieces, key=lambda x: (any(x.cuts), x.numel()))
    total = sum(x.shape[d] for x in pieces)
    cuts, grid = largest.cuts, largest.grid
    buffers, offset = [x.shard for x in skipped], 0
    for x in pieces:
        needs: list[IndexMap] = [Same()] * x.dim()
        if cuts[d]:
            needs[d] = WrittenSlice(offset, total)
        buffers.append(gather_inputs(x, needs, cuts, "cat"))
        offset += x.shape[d]
    shape = (*largest.shape[:d], total, *largest.shape[d + 1 :])
    if len(shape) > 1 or skipped:
        return DistTensor(torch.cat(buffers, d), shape, cuts, grid)
    # As rows: torch would leave out the graph of gradients for a vector without elements.
    row = torch.cat([x.unsqueeze(0) for x in buffers], 1)
    return DistTensor(row.squeeze(0), shape, cuts, grid)


@implements(torch.stack)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> DistTensor:
    """Return tensors of one shape, stacked along a new dimension without partition. Collective."""
    grid = common_grid("stack", tensors)
    check_on_meta(torch.stack, tuple(map(any_type, tensors)), dim)
    return cat([unsqueeze(as_distributed(t, grid), dim) for t in tensors], dim)
