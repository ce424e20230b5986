"""Bringing the operands of an operator to layouts that fit together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.device.kinds import is_accelerator, remembered
from distconv.device.streams import is_capturing
from distconv.geometry.layout import (
    Box,
    Cuts,
    Shape,
    cuts_of_broadcast,
    cutting_axes,
    operand_cuts,
    rank_box,
)
from distconv.geometry.plan import Plan
from distconv.geometry.topology import AXES, Topology
from distconv.grid.interface import Grid
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.expanded import before_expansion
from distconv.tensor.dispatch import is_traced
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.plain_copies import sliced
from distconv.tensor.recording import common_grid as common_grid
from distconv.tensor.redistribution import redistribute


@remembered
def constant(
    device: torch.device, numbers: tuple[int, ...], dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return a tensor of these integers."""
    return torch.tensor(numbers, dtype=dtype, device=device)


class Placement(NamedTuple):
    """The shape, cuts, type and rank of a tensor, from which plans are derived and cached.

    `on_gpu` says whether operators on the tensor run on a GPU.
    """

    shape: Shape
    cuts: Cuts
    topology: Topology
    rank: int
    dtype: torch.dtype
    on_gpu: bool

    @classmethod
    def of(cls, x: DistTensor) -> Placement:
        """Return the placement of `x`."""
        grid = x.grid
        where = grid.topology, grid.rank
        return cls(tuple(x.shape), x.cuts, *where, x.shard.dtype, grid.computes_on_gpu)

    def messages(self, plan: Plan) -> Plan:
        """Return a halo exchange with messages in the memory format of most such tensors.

        That is channels last for planes in float32 on CPUs (`tensor.memory_format`). Halo rows of
        one sample are then contiguous, and are sent and received without a copy. Blocks of
        different ranks may differ in format, so the block's own format cannot decide.
        """
        last = len(self.shape) == 4 and self.dtype == torch.float32 and not self.on_gpu
        return plan.with_channels_last if last else plan


def as_distributed(x: Tensor, grid: Grid) -> DistTensor:
    """Return `x` as a DistTensor; a plain tensor, equal on all ranks, is whole on each of them."""
    if isinstance(x, DistTensor):
        return x
    return DistTensor(x, x.shape, ((),) * x.dim(), grid)


def shard_of(x: Any) -> Any:
    """Return the shard of a DistTensor; other values are returned unchanged."""
    return x.shard if isinstance(x, DistTensor) else x


def may_read(x: DistTensor, in_replays: bool = False) -> bool:
    """Return whether a rule may read elements, to move only what they ask for; alike on all ranks.

    In a dry run there are none. While dc.compile traces a program, or a graph of the device is
    captured, what is read once would hold in all replays. `in_replays` says that the replays of a
    program read again (`opaque_call`).
    """
    device = x.shard.device
    captured = is_accelerator(device) and is_capturing(device)
    return not (x.shard.is_meta or captured or (is_traced() and not in_replays))


def gather_whole(x: Any, operator: str) -> Any:
    """Return a DistTensor in full, as a plain tensor; other values are returned unchanged.

    All ranks call it. `operator` is the called function, for the records of redistributions.
    """
    if not isinstance(x, DistTensor):
        return x
    return redistribute(x, ((),) * x.dim(), operator).shard


def uncut(x: DistTensor, dimensions: Iterable[int], operator: str) -> DistTensor:
    """Return `x` with these dimensions whole on every rank; all ranks call it.

    `operator` is the called function, for the records of redistributions.
    """
    chosen = set(dimensions)
    return redistribute(x, tuple(() if d in chosen else a for d, a in enumerate(x.cuts)), operator)


def moved_elsewhere(
    shape: Sequence[int], cuts: Cuts, dims: Collection[int], topology: Topology
) -> Cuts | None:
    """Return `cuts` of a tensor of `shape` with the axes that cut `dims` moved to other dimensions.

    Each axis goes to the dimension with the most elements for each of its parts. Returns None if
    the other dimensions have too few elements.
    """
    moved = [() if d in dims else axes for d, axes in enumerate(cuts)]
    for axis in sorted(cutting_axes(cuts[d] for d in dims), key=AXES.index):
        room = {d: n // topology.parts(moved[d]) for d, n in enumerate(shape) if d not in dims}
        widest = max(room, key=room.__getitem__, default=0)
        if room.get(widest, 0) < topology.extent(axis):
            return None
        moved[widest] += (axis,)
    return tuple(moved)


def local_operand(x: Any, shape: Shape, cuts: Cuts, grid: Grid, operator: str) -> Any:
    """Return this rank's block of an operand that is broadcast to `shape` cut by `cuts`.

    Numbers are returned unchanged, plain tensors (equal on all ranks) are sliced, DistTensors are
    redistributed if their cuts differ, those made by `expand` before it. `operator` is the called
    function, for the records.
    """
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DistTensor) and x.brought and x.cuts == cuts and tuple(x.shape) == shape:
        return x.shard
    own = operand_cuts(tuple(x.shape), shape, cuts)
    if isinstance(x, DistTensor):
        if x.cuts == own and x.brought:
            return x.shard
        moved = before_expansion(x)
        block = redistribute(moved, operand_cuts(tuple(moved.shape), shape, cuts), operator).shard
        return block if moved is x else block.expand(box_on_rank(x.shape, own, grid).shape)
    if not cutting_axes(own):
        return x
    return sliced(x, box_on_rank(x.shape, own, grid).slices)


def broadcast_shape(name: str, tensors: Sequence[Tensor]) -> Shape:
    """Return the shape to which the tensors' global shapes broadcast; raise if they do not.

    `name` is the called function, for the error.
    """
    try:
        return _broadcast(tuple(x.shape for x in tensors))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise RuntimeError(
            f"{name}: the global shapes {shapes} do not broadcast. A plain tensor must have the "
            "global shape and equal values on all ranks; turn blocks into a DistTensor by "
            "DistTensor.from_local"
        ) from None


@lru_cache(maxsize=4096)
def _broadcast(shapes: tuple[Shape, ...]) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))


def broadcast_cuts(operands: Sequence[DistTensor], shape: Shape) -> Cuts:
    """Return the cuts of a result of `shape` to which operands are broadcast.

    Each dimension is cut as in the largest operand that cuts it and is not broadcast along it, over
    axes that no other dimension uses. Of operands of equal size the first decides.
    """
    return cuts_of_broadcast(tuple((tuple(x.shape), x.cuts) for x in operands), shape)


def box_on_rank(shape: Sequence[int], cuts: Cuts, grid: Grid) -> Box:
    """Return the box that this rank holds of a tensor of global `shape` cut by `cuts`."""
    return rank_box(tuple(shape), cuts, grid.topology, grid.rank)


def filled_block(block: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return ones in place of a block without elements, of `shape` or with sizes 0 replaced by 1.

    They depend on `block` in the autograd graph. Ranks without elements compute with them, so that
    all ranks have the same graph. For empty tensors torch would leave out gradients, together with
    the exchanges that other ranks wait for.
    """
    ones = block.new_ones([max(n, 1) for n in block.shape] if shape is None else tuple(shape))
    return ones + block.sum().to(block.dtype)


def empty_block(buffer: Tensor, shape: Shape) -> Tensor:
    """Return an empty block of `shape` that depends on `buffer` in the autograd graph."""
    return buffer.reshape(-1)[:0].reshape(shape)


HALVES = torch.float16, torch.bfloat16


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which to add up many elements: float32 for half types, else `dtype`."""
    return torch.float32 if dtype in HALVES else dtype


def to_accumulation_type(x: Tensor) -> Tensor:
    """Return `x` in the type of `accumulation_type`."""
    return x.float() if x.dtype in HALVES else x


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in type `dtype`; `x` itself if it has the type, without a call of Tensor.to."""
    return x if x.dtype == dtype else x.to(dtype)


def check_same_types(name: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError on every rank if types differ; torch skips blocks without elements.

    `name` is the called function, for the error.
    """
    check_equal_types(name, [t.dtype for t in tensors if t is not None])


def check_equal_types(name: str, types: Sequence[torch.dtype]) -> None:
    """Raise RuntimeError if the types of input, weight and bias of function `name` differ."""
    if types.count(types[0]) < len(types):
        raise RuntimeError(
            f"{name}: input, weight and bias have the types {', '.join(map(str, types))}; convert "
            "them to one type"
        )


def distributed_input(name: str, input: Tensor, *parameters: Tensor | None) -> DistTensor:
    """Return the input as a DistTensor on the grid of the parameters.

    `name` is the called function, for errors.
    """
    if isinstance(input, DistTensor):
        return input
    return as_distributed(input, common_grid(name, (input, *parameters)))


def global_indices(x: DistTensor) -> list[Tensor]:
    """Return this rank's global indices along each dimension, shaped to broadcast to its block."""
    box = x.box
    return [
        torch.arange(start, stop, device=x.device).view(-1, *(1,) * (x.dim() - 1 - d))
        for d, (start, stop) in enumerate(zip(box.start, box.stop, strict=True))
    ]


def global_numbers(x: DistTensor, dims: int) -> Tensor:
    """Return the row-major numbers of this rank's positions in the first `dims` dimensions."""
    box = Box(x.box.start[:dims], x.box.stop[:dims])
    return numbers_in_box(box, tuple(x.shape[:dims]), x.device)


def numbers_in_box(box: Box, shape: Shape, device: torch.device) -> Tensor:
    """Return the row-major numbers of the positions in a box of a tensor of global `shape`."""
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop, n in zip(box.start, box.stop, shape, strict=True):
        numbers = numbers.unsqueeze(-1) * n + torch.arange(start, stop, device=device)
    return numbers


def unravel(numbers: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the coordinates, by dimension, of row-major numbers in a tensor of `shape`.

    Negative numbers give coordinates without meaning.
    """
    coordinates: list[Tensor] = []
    for size in reversed(shape):
        coordinates.insert(0, numbers % size)
        numbers = numbers // size
    return coordinates


# Functions that work along some dimensions, and treat all others element by element.
#
# The dimensions they work along are made whole on every rank first, which is recorded as a
# redistribution; the others stay cut. If the values of an argument are bad, such as a singular
# matrix, the rank that holds them raises.


def _distributed(result: Any, shapes: Any, cuts_of: Callable[[Shape], Cuts], grid: Grid) -> Any:
    """Return one block, or a tuple of blocks, as DistTensors of these global shapes.

    `cuts_of` takes the global shape of a result and returns its cuts. A rank without elements has
    computed with substitutes, and its results are cropped to no elements.
    """
    if not isinstance(result, Tensor):
        pairs = zip(result, shapes, strict=True)
        return type(result)([_distributed(*pair, cuts_of, grid) for pair in pairs])
    cuts = cuts_of(shapes)
    own = box_on_rank(shapes, cuts, grid).shape
    return DistTensor(result[tuple(map(slice, own))] if 0 in own else result, shapes, cuts, grid)


def apply_along(
    function: Callable[..., Any],
    name: str,
    input: DistTensor,
    dims: Sequence[int],
    *args: Any,
    dropped: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Return `function(input, *args, **kwargs)`, which works along `dims`.

    Its results have the dimensions of the input without those in `dropped`, and perhaps further
    ones after them. `name` is the called function, for the records of redistributions.
    """
    shapes = check_on_meta(function, input, *args, **kwargs)
    x = uncut(input, dims, name)
    kept = tuple(axes for d, axes in enumerate(x.cuts) if d not in dropped)

    def cuts_of(shape: Shape) -> Cuts:
        return (*kept, *((),) * (len(shape) - len(kept)))

    block = filled_block(x.shard) if 0 in x.shard.shape and input.numel() else x.shard
    return _distributed(function(block, *args, **kwargs), shapes, cuts_of, x.grid)


def apply_to_batches(
    function: Callable[..., Any],
    name: str,
    operands: Sequence[Tensor],
    inner: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `function(*operands, *args, **kwargs)`, which works along the last dimensions of each.

    `inner` is the number of these dimensions for each operand. The leading dimensions are broadcast
    against each other, and come first in the results. `name` is the called function, for errors and
    for the records of redistributions.
    """
    grid = common_grid(name, operands)
    shapes = check_on_meta(function, *operands, *args, **kwargs)
    given = [as_distributed(x, grid) for x in operands]
    leading = [
        (tuple(x.shape[: x.dim() - n]), x.cuts[: x.dim() - n])
        for x, n in zip(given, inner, strict=True)
    ]
    batch: Shape = tuple(torch.broadcast_shapes(*(shape for shape, _ in leading)))
    cuts = cuts_of_broadcast(tuple(leading), batch)
    blocks = [
        local_operand(x, (*batch, *x.shape[x.dim() - n :]), (*cuts, *((),) * n), grid, name)
        for x, n in zip(operands, inner, strict=True)
    ]

    def cuts_of(shape: Shape) -> Cuts:
        return (*cuts, *((),) * (len(shape) - len(batch)))

    if prod(batch) and 0 in box_on_rank(batch, cuts, grid).shape:
        blocks = [_matrices(x, n) for x, n in zip(blocks, inner, strict=True)]
    return _distributed(function(*blocks, *args, **kwargs), shapes, cuts_of, grid)


def _matrices(block: Tensor, inner: int) -> Tensor:
    """Return `block`, or valid operands in place of a block without elements.

    These are identity matrices if `inner`, the number of dimensions along which the function works,
    is 2, as matrices of ones may have no inverse; zeros for labels of 64 bits; ones otherwise.
    """
    if block.numel():
        return block
    # Matrices without rows or columns stay so, as on ranks that have some.
    lead = block.dim() - inner
    filled = filled_block(block, [max(n, 1) for n in block.shape[:lead]] + list(block.shape[lead:]))
    if block.dtype == torch.int64:
        return torch.zeros_like(filled)
    if inner < 2:
        return filled
    return filled * torch.eye(*block.shape[-2:], dtype=block.dtype, device=block.device)
