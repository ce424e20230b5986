"""Checks that the ranks' blocks form one tensor; errors name the rank whose block does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from distconv.comm.checksums import CURE, checksum, differing, due
from distconv.geometry.layout import Cuts, Layout, block, cutting_axes, rank_box
from distconv.geometry.topology import Topology
from distconv.grid.calls import operator_name
from distconv.grid.interface import Grid
from distconv.grid.program_lines import user_line
from distconv.grid.rank_words import differences
from distconv.tensor.aliasing import prepare_write
from distconv.tensor.base import DistTensorBase
from distconv.tensor.dispatch import WAYS_OUT, refuse
from distconv.tensor.nested import tensors_in


def global_shape(
    local: Tensor, grid: Grid, cuts: Cuts, layout: Layout, operator: str
) -> tuple[int, ...]:
    """Return the global shape of the tensor of which each rank passes its block. Collective.

    `cuts` are the cuts of the tensor. `layout` is compared between ranks, as each may pass another;
    `operator` is named in errors. In the first 16 calls, and in every 64th later, the contents are
    compared, too: ranks that hold the same block must pass equal ones. Raises `ValueError` on every
    rank, naming the rank whose block does not fit.
    """
    # A tensor on the CPU moves to the grid's device.
    device = "cpu" if local.device == grid.device else str(local.device)
    line = user_line()
    replicated = grid.topology.parts(cutting_axes(cuts)) < grid.size
    # A use counted by block would differ between ranks.
    whole = None if any(cuts) else local.shape
    check = replicated and due((operator, line, whole), grid)
    mine = {"type": str(local.dtype), "requires_grad": local.requires_grad}
    mine |= {"layout": layout, "grid": str(grid)}
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
                f"the tensor of rank {rank} lives on {elsewhere}, not on the device of the grid "
                "there; pass x.to(grid.device), or a CPU tensor, which is moved there"
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
                f"rank has to pass equal ones: {CURE}; or read a block of its own on each rank and "
                "pass that to DistTensor.from_local"
            )
    return shape


def check_plain(x: object, what: str) -> None:
    """Raise TypeError if `x` is no plain tensor; the message calls it `what`."""
    if isinstance(x, DistTensorBase):
        raise TypeError(f"{what} is distributed already; use x.redistribute(layout)")
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} is a {type(x).__name__}; pass torch.as_tensor(x)")


def check_block(local: Tensor, grid: Grid, cuts: Cuts, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` on this rank if `local` is not its block of a tensor of shape `shape`.

    Nothing is sent.
    """
    expected = rank_box(shape, cuts, grid.topology, grid.rank).shape
    if tuple(local.shape) != expected:
        raise ValueError(
            f"from_local: rank {grid.rank} holds a block of shape {tuple(local.shape)}; of a "
            f"tensor of shape {shape} in {Layout.of(cuts)} it should hold {expected}. "
            "distconv.local_box(shape, grid, layout) tells each rank its box"
        )
    if local.device.type != "cpu" and local.device != grid.device:
        raise ValueError(
            f"from_local: the block of rank {grid.rank} lives on {local.device}, and the grid on "
            f"{grid.device} there; pass x.to(grid.device), or a CPU tensor, which is moved there"
        )


@lru_cache(maxsize=1024)
def _fitting_shape(
    shapes: tuple[tuple[int, ...], ...], cuts: Cuts, topology: Topology
) -> tuple[int, ...]:
    """Return the global shape whose cut gives the ranks blocks of these shapes, or raise."""
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
                f"the whole tensors of the ranks are not of one shape: {listed}{more}. Pass "
                "the same on every rank; DistTensor.from_local takes each rank's own block"
            )
        raise ValueError(
            f"the blocks do not make a tensor of shape {shape} in {Layout.of(cuts)}: "
            f"{listed}{more}. A dimension of size n over p parts gives the first n mod p parts "
            "one element more; distconv.local_box(shape, grid, layout) tells each rank its box"
        )
    return shape


def _global_size(
    shapes: tuple[tuple[int, ...], ...], dimension: int, axes: tuple[str, ...], topology: Topology
) -> int:
    """Return the global size of one dimension that fits the blocks of the most ranks."""
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
    """Refuse an `out`, passed as `out=`, that cannot hold the result of an operator."""
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
            "out= has to be a distributed tensor of the shape, layout and type of the result, "
            "outside autograd",
            *tensors_in(out, *operands),
            way_out=WAYS_OUT.get(operator, "Use the returned tensor"),
        )
    prepare_write(out, operator_name(operator))
