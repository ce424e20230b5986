"""Halo exchanges of plain blocks, for kernels that programs for LBANN's package bring along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distconv.comm.transfer import accumulate, gather
from distconv.geometry.index_maps import IndexMap, Interval, Pad, Same
from distconv.geometry.layout import effective_cuts
from distconv.geometry.plan import Plan, make_plan
from distconv.lbann.dc_tensor import ParallelStrategy, check_strategy
from distconv.tensor.conversion import check_plain, global_shape


@dataclass(frozen=True)
class _Halos:
    """An index map by which each block needs itself and `size` positions on either side of it."""

    size: int
    mode: str

    @property
    def _pad(self) -> Pad:
        return Pad(self.size, self.size, self.mode)

    def output_size(self, size: int) -> int:
        return self._pad.output_size(size) - 2 * self.size

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return self._pad.intervals(size, start, stop + 2 * self.size)

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        padded = self._pad.dependents(size, start, stop)
        return tuple((max(first - 2 * self.size, 0), min(last, size)) for first, last in padded)


def forward_halo_exchange(
    tensor: Tensor,
    halo_size: int,
    parallel_strategy: ParallelStrategy,
    dim_index: int = 0,
    is_periodic: bool = False,
) -> Tensor:
    """Return this rank's block with the neighbours' halos on both sides of one dimension.

    All ranks of a replica call it together. Differentiable: gradients of halos are summed where
    their elements come from. To exchange along several dimensions, corners included, call it for
    one dimension after the other.

    Parameters
    ----------
    tensor: this rank's block, a plain tensor. Of n elements over p parts the first n mod p have one
        more.
    halo_size: the elements on either side. Beyond the ends of the whole tensor they are zeros.
    dim_index: the position of the dimension in `parallel_strategy.shard_dim`.
    is_periodic: whether the elements beyond one end are those at the other end.

    Raises
    ------
    ValueError
        On every rank of the replica, if blocks do not fit, a block is empty, the size is negative,
        or there is no such dimension.
    RuntimeError
        On every rank of the replica, if a periodic dimension is shorter than the halo.
    """
    options = (parallel_strategy, dim_index, is_periodic)
    found = _plan("forward_halo_exchange", tensor, halo_size, *options, with_halos=False)
    return gather(tensor, found, parallel_strategy.grid)


def backward_halo_exchange(
    tensor: Tensor,
    halo_size: int,
    parallel_strategy: ParallelStrategy,
    dim_index: int = 0,
    is_periodic: bool = False,
) -> Tensor:
    """Return this rank's block, with the halos of `tensor` added where their elements come from.

    It is the adjoint of `forward_halo_exchange`, with its parameters and errors; `tensor` has its
    result's shape. All ranks of a replica call it together. Differentiable.
    """
    options = (parallel_strategy, dim_index, is_periodic)
    found = _plan("backward_halo_exchange", tensor, halo_size, *options, with_halos=True)
    return accumulate(tensor, found, parallel_strategy.grid)


def _plan(
    caller: str,
    tensor: Tensor,
    halo_size: int,
    parallel_strategy: ParallelStrategy,
    dim_index: Any,
    is_periodic: bool,
    with_halos: bool,
) -> Plan:
    """Return this rank's plan for a halo exchange by `caller`.

    `with_halos` says whether `tensor` has the halos already. The other parameters, and errors, are
    those of `forward_halo_exchange`.
    """
    check_plain(tensor, f"{caller}: tensor")
    check_strategy(parallel_strategy, caller)
    ps, grid = parallel_strategy, parallel_strategy.grid
    if type(dim_index) is not int or not 0 <= dim_index < len(ps.shard_dim):
        raise ValueError(
            f"{caller}: dim_index={dim_index!r}; give the position of a dimension in "
            f"shard_dim={ps.shard_dim}, from 0, and is_periodic by its name"
        )
    if halo_size < 0:
        raise ValueError(f"{caller}: halo_size={halo_size}; give a number from 0 on")
    layout, along = ps.layout(tensor.dim()), ps.shard_dim[dim_index]
    cuts = effective_cuts(layout.cuts(tensor.dim()), grid.topology)
    shape = list(global_shape(tensor, grid, cuts, layout, caller))
    if with_halos:
        shape[along] -= 2 * halo_size * ps.num_shards[dim_index]
    if shape[along] < ps.num_shards[dim_index]:
        raise ValueError(
            f"{caller}: dimension {along} has {shape[along]} elements for "
            f"{ps.num_shards[dim_index]} ranks, and a block without any has no halos; use fewer "
            "ranks along it"
        )
    needs: list[IndexMap] = [Same()] * tensor.dim()
    needs[along] = _Halos(halo_size, "circular" if is_periodic else "constant")
    return make_plan(grid.topology, grid.rank, tuple(shape), cuts, cuts, tuple(needs))
