"""Blocks and DTensors as DistTensors, and back; blocks in torch's distributed checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from distconv.comm import collectives
from distconv.comm.checksums import CURE, checksum, differing
from distconv.geometry.layout import Cuts, Layout, block, cutting_axes, rank_box, replicating_axes
from distconv.geometry.topology import Topology
from distconv.grid.interface import Grid
from distconv.grid.process_grid import ProcessGrid, mesh_axes
from distconv.grid.words import differences, operator_name, user_line
from distconv.tensor.aliasing import prepare_write
from distconv.tensor.base import DistTensorBase, tensors_in
from distconv.tensor.dispatch import WAYS_OUT, refuse
from distconv.tensor.ownership import plain_roots
from distconv.tensor.redistribution import redistribute

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor


# Checks that the ranks' blocks form one tensor; errors name the rank whose block does not fit.


def global_shape(
    local: Tensor, grid: Grid, cuts: Cuts, layout: Layout, operator: str, **arguments: object
) -> tuple[int, ...]:
    """Return the global shape of the tensor of which each rank passes its block. Collective.

    `cuts` are the grid axes that partition each dimension. `layout` and further `arguments` must be
    equal on all ranks, which is checked; `operator` is named in errors. In the first 16 calls, and
    in every 64th later, ranks that hold the same block also compare its contents. Raises
    `ValueError` on every rank, naming the rank whose block does not fit.
    """
    # A tensor on the CPU moves to the grid's device.
    device = "cpu" if local.device == grid.device else str(local.device)
    line = user_line()
    replicated = grid.topology.parts(cutting_axes(cuts)) < grid.size
    # A use counted by block would differ between ranks.
    whole = None if any(cuts) else local.shape
    check = replicated and grid.journal.is_due((operator, line, whole), grid.device)
    mine = {"type": str(local.dtype), "requires_grad": local.requires_grad}
    mine |= {"layout": layout, "grid": str(grid), **arguments}
    number = checksum(local, grid.journal.debug) if check else None
    held = grid.all_gather_object((tuple(local.shape), mine, device, number, line))
    shapes, facts, devices, sums, lines = zip(*held, strict=True)
    if len({len(s) for s in shapes}) > 1:
        raise ValueError(f"the ranks' blocks differ in their number of dimensions: {shapes}")
    for found in differences(facts):
        raise ValueError(f"the ranks' blocks differ: {found}; pass the same on every rank")
    for rank, elsewhere in enumerate(devices):
        if elsewhere != "cpu":
            raise ValueError(
                f"the tensor of rank {rank} is on {elsewhere}, not on the grid's device of this "
                "rank; pass x.to(grid.device), or a CPU tensor, which is moved to that device"
            )
    try:
        shape = _fitting_shape(shapes, cuts, grid.topology)
    except ValueError as error:
        raise ValueError(f"{operator} at {line}: {error}") from None
    if None not in sums:
        axes = cutting_axes(cuts)
        ranks = differing(local, axes, sums, grid)
        if ranks:
            which = "the blocks of ranks that hold the same box are" if axes else "the tensor is"
            raise ValueError(
                f"{operator} at {lines[0]}: {which} not the same on all ranks: {ranks}. Every "
                f"rank must pass equal tensors: {CURE}; or read only the block of each rank and "
                "pass it to DistTensor.from_local"
            )
    return shape


def check_plain(x: object, what: str) -> None:
    """Raise TypeError if `x` is not a plain tensor; the message calls `x` by the name `what`."""
    if isinstance(x, DistTensorBase):
        raise TypeError(f"{what} is already distributed; use x.redistribute(layout)")
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} is a {type(x).__name__}; pass torch.as_tensor(x)")


def check_block(local: Tensor, grid: Grid, cuts: Cuts, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` if `local` is not this rank's block of a tensor of global `shape`.

    Shape and device are checked, on this rank alone. No communication.
    """
    expected = rank_box(shape, cuts, grid.topology, grid.rank).shape
    if tuple(local.shape) != expected:
        raise ValueError(
            f"from_local: rank {grid.rank} holds a block of shape {tuple(local.shape)}; of a "
            f"tensor of shape {shape} in {Layout.of(cuts)} it should hold {expected}. "
            "distconv.local_box(shape, grid, layout) returns the indices of each rank's block"
        )
    if local.device.type != "cpu" and local.device != grid.device:
        raise ValueError(
            f"from_local: the block of rank {grid.rank} is on {local.device}, but the grid's "
            f"device of this rank is {grid.device}; pass x.to(grid.device), or a CPU tensor, "
            "which is moved to that device"
        )


@lru_cache(maxsize=1024)
def _fitting_shape(
    shapes: tuple[tuple[int, ...], ...], cuts: Cuts, topology: Topology
) -> tuple[int, ...]:
    """Return the global shape whose partitioning by `cuts` results in blocks of `shapes`.

    `shapes` has the shape of the block of each rank. Raises ValueError if there is none.
    """
    shape = tuple(_global_size(shapes, d, cuts[d], topology) for d in range(len(cuts)))
    expected = [rank_box(shape, cuts, topology, r).shape for r in range(topology.size)]
    off = [r for r in range(topology.size) if shapes[r] != expected[r]]
    if off:
        listed = "; ".join(
            f"rank {r} holds {shapes[r]} and should hold {expected[r]}" for r in off[:8]
        )
        more = f"; and {len(off) - 8} more" if len(off) > 8 else ""
        if not any(cuts):
            raise ValueError(
                f"the whole tensors differ in shape between ranks: {listed}{more}. Pass the same "
                "tensor on every rank, or each rank's block to DistTensor.from_local"
            )
        raise ValueError(
            f"the blocks do not form a tensor of shape {shape} in {Layout.of(cuts)}: "
            f"{listed}{more}. A dimension of size n over p ranks gives the first n mod p ranks "
            "one element more; distconv.local_box(shape, grid, layout) returns the indices of "
            "each rank's block"
        )
    return shape


def _global_size(
    shapes: tuple[tuple[int, ...], ...], dimension: int, axes: tuple[str, ...], topology: Topology
) -> int:
    """Return the global size of one dimension that fits the blocks of the most ranks.

    `shapes` has the shape of the block of each rank; `axes` partition the dimension.
    """
    parts = topology.parts(axes)
    part = [topology.part(topology.coordinates(r), axes) for r in range(topology.size)]
    held = [shape[dimension] for shape in shapes]
    by_part: list[Counter[int]] = [Counter() for _ in range(parts)]
    for p, n in zip(part, held, strict=True):
        by_part[p][n] += 1
    total = sum(sizes.most_common(1)[0][0] for sizes in by_part)

    def misfits(size: int) -> int:
        bounds = [block(size, parts, j) for j in range(parts)]
        return sum(h != bounds[p][1] - bounds[p][0] for h, p in zip(held, part, strict=True))

    if not misfits(total):
        return total
    near = {n for h in set(held) for n in range(max(0, (h - 1) * parts), (h + 1) * parts)}
    return min(sorted(near), key=misfits)


def check_out(operator: Callable[..., Any], out: Any, result: Any, *operands: Tensor) -> None:
    """Raise UnsupportedOperation if `out`, passed as `out=`, cannot hold the result of `operator`.

    Prepare `out` for the write. Collective.
    """
    if not (
        isinstance(out, DistTensorBase)
        and isinstance(result, DistTensorBase)
        and any(isinstance(x, DistTensorBase) for x in operands)
        and (out.shape, out.cuts, out.grid) == (result.shape, result.cuts, result.grid)
        and out.dtype == result.dtype
        and not any(x.requires_grad for x in (out, *operands) if torch.is_grad_enabled())
    ):
        refuse(
            operator_name(operator),
            "out= must be a distributed tensor of the shape, layout and type of the result, "
            "outside autograd",
            *tensors_in(out, *operands),
            way_out=WAYS_OUT.get(operator, "Use the returned tensor"),
        )
    prepare_write(out, operator_name(operator))


# Conversion between torch's DTensor and DistTensor, in both directions.
#
# torch partitions a dimension of n elements over p ranks into chunks of ceil(n / p) elements, the
# last of which are smaller or empty. The canonical blocks of this library differ by one element at
# most. If p divides n, and in some other cases, chunks and blocks are equal, and nothing is copied.
# Otherwise the dimension is replicated first, and each rank slices its chunk or block.


def to_dtensor(x: DistTensorBase) -> DTensor:
    """Return `x` as a DTensor on the device mesh of its grid. Collective.

    Raises TypeError on the grid of a dry run, which has no mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    grid = x.grid
    if not isinstance(grid, ProcessGrid):
        raise TypeError(f"to_dtensor: {grid!r} is a rehearsal and has no mesh of ranks")
    axes, topology = mesh_axes(grid), grid.topology
    placements = [
        next((Shard(d) for d, cut in enumerate(x.cuts) if axis in cut), Replicate())
        for axis in axes
    ]
    odd = _odd_dimensions(x.shape, x.cuts, axes, topology)
    kept = tuple(() if d in odd else cut for d, cut in enumerate(x.cuts))
    whole = redistribute(x, kept, "to_dtensor")
    # Along the axes of the odd dimensions each rank slices another chunk; the gradients of all
    # chunks are summed.
    local = collectives.unreplicate(whole.shard, grid, replicating_axes(x.cuts, topology))
    here = topology.coordinates(grid.rank)
    for d in odd:
        places = ((topology.extent(axis), here[axis]) for axis in axes if axis in x.cuts[d])
        start, stop = _chunk(x.shape[d], places)
        local = local.narrow(d, start, stop - start)
    if local.requires_grad:
        local = collectives.alias(local)
        local.register_hook(_check_declared)
    stride = torch.empty(x.shape, device="meta").stride()
    result: Any = DTensor.from_local(
        local.contiguous(),
        grid.device_mesh,
        placements,
        run_check=False,
        shape=x.shape,
        stride=stride,
    )
    return result  # type: ignore[no-any-return]


def _check_declared(_: Tensor) -> None:
    """Raise RuntimeError if a plain loss depends on `to_local()` of a sharded DTensor.

    Each rank has the loss of its own shard; see `ownership.undeclared`. `to_local` with
    `grad_placements` declares that the losses are to be summed, and does not raise.
    """
    roots = (x for x in plain_roots() if x.requires_grad)
    waiting: list[Any] = [get_gradient_edge(x).node for x in roots]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        # Whatever is behind DTensor.from_local has become a DTensor again.
        if node is None or node in seen or node.name() == "_FromTorchTensorBackward":
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        spec = getattr(node, "dtensor_spec", None)
        if spec is None or node.grad_placements is not None:
            continue
        if any(placement.is_shard() for placement in spec.placements):
            raise RuntimeError(
                f"backward: a plain loss depends on DTensor.to_local() of {spec}, and every rank "
                "has the loss of its own shard. Compute the loss on the DTensor itself, or on "
                "full_tensor(). If the serial loss is the sum of the losses of the ranks, write "
                "to_local(grad_placements=d.placements)"
            )


def block_of_dtensor(d: DTensor, axes: Sequence[str], grid: ProcessGrid) -> tuple[Tensor, Layout]:
    """Return this rank's canonical block of `d` on `grid`, and the layout. Collective.

    `axes` names the grid axis of each dimension of the mesh of `d`. Raises TypeError for placements
    other than `Shard`, `Replicate` and `Partial`.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements = [Replicate() if p.is_partial() else p for p in d.placements]
    if any(type(p) not in (Replicate, Shard) for p in placements):
        raise TypeError(
            f"from_dtensor: placements {d.placements}; redistribute it to Shard and Replicate"
        )
    dims = [p.dim % d.dim() if isinstance(p, Shard) else None for p in placements]
    cuts = tuple(
        tuple(axis for axis, dim in zip(axes, dims, strict=True) if dim == i)
        for i in range(d.dim())
    )
    odd = _odd_dimensions(d.shape, cuts, axes, grid.topology)
    whole = [Replicate() if dim in odd else p for p, dim in zip(placements, dims, strict=True)]
    if whole != list(d.placements):
        d = d.redistribute(placements=whole)
    # Ranks slice different blocks of this tensor, so its gradient is the sum over the ranks.
    parts = [Partial() if dim in odd else p for p, dim in zip(whole, dims, strict=True)]
    local = d.to_local(grad_placements=parts)
    box = rank_box(tuple(d.shape), cuts, grid.topology, grid.rank)
    for i in odd:
        local = local.narrow(i, box.start[i], box.stop[i] - box.start[i])
    return local, Layout.of(cuts)


def _odd_dimensions(
    shape: Sequence[int], cuts: Cuts, axes: Sequence[str], topology: Topology
) -> list[int]:
    """Return the dimensions in which torch's chunks differ from the canonical blocks.

    `axes` names the grid axis of each dimension of torch's mesh.
    """
    odd = []
    for d, cut in enumerate(cuts):
        mine = [axis for axis in axes if axis in cut]
        extents = [topology.extent(axis) for axis in mine]
        parts = topology.parts(cut)
        for place in product(*map(range, extents)):
            there = dict.fromkeys(cut, 0) | dict(zip(mine, place, strict=True))
            ours = block(shape[d], parts, topology.part(there, cut))
            if _chunk(shape[d], zip(extents, place, strict=True)) != ours:
                odd.append(d)
                break
    return odd


def _chunk(size: int, places: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return start and stop of one rank's chunk of a dimension of `size` elements, as in torch.

    `places` has a pair for each mesh dimension that partitions the dimension: the number of chunks,
    and the number of this rank's chunk.
    """
    start = 0
    for parts, index in places:
        longest = -(-size // parts)
        first = min(index * longest, size)
        start, size = start + first, min(longest, size - first)
    return start, start + size


# Blocks as chunks of torch.distributed.checkpoint.


class Chunked(DistTensorBase):
    """A distributed tensor that `torch.distributed.checkpoint` saves and loads like a DTensor.

    Each rank writes its own block. On loading, each rank reads its own block, also from a
    checkpoint of a different number of ranks.
    """

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return the items to write for this rank's block of the tensor with the full name `fqn`.

        torch writes a block once if several ranks hold it.
        """
        from torch import distributed
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if self.grid.size > 1 and not distributed.is_initialized():
            raise RuntimeError(
                "torch.distributed.checkpoint: there is no default group of torch.distributed, and "
                "every rank would write all files; ask for grid.device_mesh before, which "
                "initialises it"
            )
        properties = TensorProperties.create_from_tensor(self.shard)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return offset and size of this rank's block; none if only this rank's block is empty."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self.numel() and not self.shard.numel():
            return []
        offsets, sizes = map(torch.Size, (self.box.start, self.shard.shape))
        return [ChunkStorageMetadata(offsets, sizes)]

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        """Return this rank's block, which is written and read in place."""
        return self.shard.detach()
