"""Operands of an operator, redistributed to layouts that fit together."""

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
    """Return the integers `numbers` as a cached tensor, (count,), on `device`."""
    return torch.tensor(numbers, dtype=dtype, device=device)


class Placement(NamedTuple):
    """The global shape, partition, type and rank of a tensor, from which plans are derived.

    `cuts` are the grid axes that partition each dimension. `on_gpu` states whether operators on the
    tensor run on a GPU.
    """

    shape: Shape
    cuts: Cuts
    topology: Topology
    rank: int
    dtype: torch.dtype
    on_gpu: bool

    @classmethod
    def of(cls, x: DistTensor) -> Placement:
        """Return the placement of the DistTensor `x` on this rank."""
        grid = x.grid
        where = grid.topology, grid.rank
        return cls(tuple(x.shape), x.cuts, *where, x.shard.dtype, grid.computes_on_gpu)

    def messages(self, plan: Plan) -> Plan:
        """Return the halo exchange `plan` with messages in the usual memory format of such tensors.

        The format is channels last for planes in float32 on CPUs (`tensor.memory_format`). Halo
        rows of one sample are then contiguous, and are sent and received without a copy. Blocks of
        different ranks may differ in format, so the block's own format cannot decide.
        """
        last = len(self.shape) == 4 and self.dtype == torch.float32 and not self.on_gpu
        return plan.with_channels_last if last else plan


def as_distributed(x: Tensor, grid: Grid) -> DistTensor:
    """Return `x` as a DistTensor; a plain tensor, equal on all ranks, becomes a replicated one."""
    if isinstance(x, DistTensor):
        return x
    return DistTensor(x, x.shape, ((),) * x.dim(), grid)


def shard_of(x: Any) -> Any:
    """Return the shard of a DistTensor; return any other value unchanged."""
    return x.shard if isinstance(x, DistTensor) else x


def may_read(x: DistTensor, in_replays: bool = False) -> bool:
    """Return whether a rule may read elements of `x` to send less; equal on all ranks.

    In a dry run tensors have no elements. While dc.compile traces a program, or a graph of the
    device is captured, a value that is read would be fixed for all replays. `in_replays` states
    that replays of the program read the elements again (`opaque_call`).
    """
    device = x.shard.device
    captured = is_accelerator(device) and is_capturing(device)
    return not (x.shard.is_meta or captured or (is_traced() and not in_replays))


def gather_whole(x: Any, operator: str) -> Any:
    """Return the global tensor of a DistTensor as a plain tensor on every rank. Collective.

    Other values are returned unchanged. `operator` is the called function, for the records of
    redistributions.
    """
    if not isinstance(x, DistTensor):
        return x
    return redistribute(x, ((),) * x.dim(), operator).shard


def uncut(x: DistTensor, dimensions: Iterable[int], operator: str) -> DistTensor:
    """Return `x` redistributed so that `dimensions` are not partitioned. Collective.

    `operator` is the called function, for the records of redistributions.
    """
    chosen = set(dimensions)
    return redistribute(x, tuple(() if d in chosen else a for d, a in enumerate(x.cuts)), operator)


def moved_elsewhere(
    shape: Sequence[int], cuts: Cuts, dims: Collection[int], topology: Topology
) -> Cuts | None:
    """Return `cuts` with the grid axes of the dimensions `dims` moved to other dimensions.

    `cuts` are the grid axes that partition each dimension of a tensor of `shape`. Each axis is
    moved to the dimension with the most elements for each of its parts. Returns None if the other
    dimensions have too few elements.
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
    """Return this rank's block of an operand that is broadcast to `shape`, partitioned by `cuts`.

    Numbers are returned unchanged. Plain tensors, equal on all ranks, are sliced. DistTensors with
    another partition are redistributed, which is collective; a result of `expand` is redistributed
    before it is expanded. `operator` is the called function, for the records of redistributions.
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
    """Return the shape to which the global shapes of `tensors` broadcast.

    Raises RuntimeError if the shapes do not broadcast; `name` is the called function, for the
    error.
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
    """Return the grid axes that partition each dimension of a result of several operands.

    `shape` is the global shape of the result, to which the operands are broadcast. Each dimension
    is partitioned as in the largest operand that partitions it and is not broadcast along it, over
    axes that no other dimension uses. Of operands of equal size the first decides.
    """
    return cuts_of_broadcast(tuple((tuple(x.shape), x.cuts) for x in operands), shape)


def box_on_rank(shape: Sequence[int], cuts: Cuts, grid: Grid) -> Box:
    """Return this rank's box of a tensor of global `shape` that is partitioned by `cuts`."""
    return rank_box(tuple(shape), cuts, grid.topology, grid.rank)


def filled_block(block: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return ones to compute with on a rank whose `block` has no elements.

    The ones have the given `shape`, or that of `block` with sizes 0 replaced by 1. They depend on
    `block` in the autograd graph, so that all ranks have the same graph. For empty tensors torch
    would leave out gradients, together with the exchanges that other ranks wait for.
    """
    ones = block.new_ones([max(n, 1) for n in block.shape] if shape is None else tuple(shape))
    return ones + block.sum().to(block.dtype)


def empty_block(buffer: Tensor, shape: Shape) -> Tensor:
    """Return an empty block of `shape` that depends on `buffer` in the autograd graph."""
    return buffer.reshape(-1)[:0].reshape(shape)


HALVES = torch.float16, torch.bfloat16


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which to sum many elements: float32 for half types, otherwise `dtype`."""
    return torch.float32 if dtype in HALVES else dtype


def to_accumulation_type(x: Tensor) -> Tensor:
    """Return `x` in the type in which to sum many elements: half types are converted to float32."""
    return x.float() if x.dtype in HALVES else x


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in type `dtype`; a tensor of this type is returned without calling `x.to`."""
    return x if x.dtype == dtype else x.to(dtype)


def check_same_types(name: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError on every rank if the types of `tensors` differ. None is left out.

    torch does not raise on ranks whose blocks have no elements. `name` is the called function, for
    the error.
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
    """Return `input` as a DistTensor; a plain one is replicated on the grid of the parameters.

    `name` is the called function, for errors.
    """
    if isinstance(input, DistTensor):
        return input
    return as_distributed(input, common_grid(name, (input, *parameters)))


def global_indices(x: DistTensor) -> list[Tensor]:
    """Return this rank's global indices along each dimension of `x`, one integer tensor for each.

    The tensors are shaped to broadcast to this rank's block.
    """
    box = x.box
    return [
        torch.arange(start, stop, device=x.device).view(-1, *(1,) * (x.dim() - 1 - d))
        for d, (start, stop) in enumerate(zip(box.start, box.stop, strict=True))
    ]


def global_numbers(x: DistTensor, dims: int) -> Tensor:
    """Return the row-major numbers, in the global tensor, of this rank's positions.

    A row-major number is an index into the flattened tensor. Only the first `dims` dimensions of
    `x` count, and the result has the shape of this rank's block in them.
    """
    box = Box(x.box.start[:dims], x.box.stop[:dims])
    return numbers_in_box(box, tuple(x.shape[:dims]), x.device)


def numbers_in_box(box: Box, shape: Shape, device: torch.device) -> Tensor:
    """Return the row-major numbers, in a tensor of global `shape`, of the positions in `box`."""
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop, n in zip(box.start, box.stop, shape, strict=True):
        numbers = numbers.unsqueeze(-1) * n + torch.arange(start, stop, device=device)
    return numbers


def unravel(numbers: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the coordinates, one tensor for each dimension, of row-major `numbers` in `shape`.

    Negative numbers give coordinates without meaning.
    """
    coordinates: list[Tensor] = []
    for size in reversed(shape):
        coordinates.insert(0, numbers % size)
        numbers = numbers // size
    return coordinates


# Functions that work along some dimensions, and treat all others element by element.
#
# First, the dimensions along which a function works are gathered on every rank, which is recorded
# as a redistribution. All other dimensions stay partitioned. If the values of an argument are bad,
# such as a singular matrix, the rank that holds them raises.


def _distributed(result: Any, shapes: Any, cuts_of: Callable[[Shape], Cuts], grid: Grid) -> Any:
    """Return a block, or a tuple of blocks, as DistTensors of the global shapes `shapes`.

    `cuts_of` takes the global shape of a result, and returns the grid axes that partition each
    dimension. A rank without elements has computed with substitutes, and its results are cropped to
    no elements.
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
    """Return `function(input, *args, **kwargs)`, which works along `dims`. Collective.

    `dims` are gathered on every rank; the other dimensions stay partitioned. The results have the
    dimensions of the input except `dropped`, and perhaps further ones after them. `name` is the
    called function, for the records of redistributions.
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
    """Return `function(*operands, *args, **kwargs)`, which works along last dimensions. Collective.

    `inner` is the number of last dimensions of each operand; they are gathered on every rank. The
    leading dimensions stay partitioned, are broadcast against each other, and come first in the
    results. `name` is the called function, for errors and for the records of redistributions.
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
        blocks = [_valid_operand(x, n) for x, n in zip(blocks, inner, strict=True)]
    return _distributed(function(*blocks, *args, **kwargs), shapes, cuts_of, grid)


def _valid_operand(block: Tensor, inner: int) -> Tensor:
    """Return `block`, or valid operands to compute with if it has no elements.

    `inner` is the number of last dimensions along which the function works. With 2 the substitutes
    are identity matrices, as matrices of ones may have no inverse. Otherwise they are zeros for
    labels in int64, and ones for all other types.
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
