"""Conversion between a grid and a device mesh of torch.distributed with the same axis names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distconv.device.kinds import backend_of
from distconv.geometry.topology import AXES
from distconv.grid import communicators
from distconv.grid.interface import Grid
from distconv.grid.ranks import world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def axes_of_mesh(mesh: DeviceMesh, axes: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return the grid axis of each mesh dimension: `axes[name]`, or by default its own name."""
    named = tuple((axes or {}).get(name, name) for name in mesh.mesh_dim_names or ())
    if len(named) != mesh.ndim or len(set(named)) < len(named) or not set(named) <= set(AXES):
        raise ValueError(
            f"from_device_mesh: the dimensions of {mesh} are called {mesh.mesh_dim_names}; name "
            f"each by another axis of {', '.join(AXES)}: mesh_dim_names, or axes={{name: axis}}"
        )
    return named


def arranged(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[list[int], dict[str, int]]:
    """Return the mesh's ranks in the order of a grid, and the grid's extents by axis.

    `axes` names the grid axis of each mesh dimension. Raises `ValueError` if ranks do not ascend
    along each dimension.
    """
    _check_ascending(mesh.mesh)
    order = sorted(range(mesh.ndim), key=lambda i: AXES.index(axes[i]))
    ranks: list[int] = mesh.mesh.permute(order).reshape(-1).tolist()
    return ranks, dict(zip(axes, mesh.mesh.shape, strict=True))


def _check_ascending(ranks: torch.Tensor) -> None:
    """Raise ValueError if ranks do not ascend along each dimension, as torch would sort them."""
    for dimension in range(ranks.dim()):
        if not (ranks.diff(dim=dimension) > 0).all():
            raise ValueError(
                f"device_mesh: the ranks {ranks.tolist()} do not ascend along each dimension, and "
                "torch.distributed would sort them; arrange them so that they do"
            )


def mesh_axes(grid: Grid) -> tuple[str, ...]:
    """Return the axes of a grid's mesh: all with several ranks, or `sample` if there is none."""
    return tuple(axis for axis, n in grid.shape.items() if n > 1) or ("sample",)


def make_device_mesh(grid: Grid, ranks: tuple[int, ...]) -> DeviceMesh:
    """Return a device mesh of the ranks of `grid`, which all call it.

    `ranks` are their numbers in the job. If the program has no default group of torch.distributed,
    this initialises one. Raises ValueError on every rank if the grid lacks ranks of the job, if the
    ranks do not ascend along its axes, or if the program's default group numbers the ranks
    differently.
    """
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh

    job = world()
    if grid.size != job.size:
        raise ValueError(
            f"device_mesh: the grid has {grid.size} of {job.size} ranks, and torch.distributed "
            "makes groups with all; ask a grid of all ranks"
        )
    if not distributed.is_initialized():
        kind = grid.device.type
        backend = f"cpu:gloo,{kind}:{backend_of(kind)}" if grid.computes_on_gpu else "gloo"
        store = communicators.store_of(communicators.communicator(job.ranks, "default group"))
        store = distributed.HashStore() if store is None else store
        distributed.init_process_group(backend, store=store, rank=job.rank, world_size=job.size)
    theirs = tuple(grid.all_gather_object(distributed.get_rank()))
    if theirs != ranks:
        raise ValueError(
            f"device_mesh: the default group numbers the ranks of the grid {theirs}, and the job "
            f"{ranks}; initialise it with the job's numbers"
        )
    axes = mesh_axes(grid)
    arranged_ranks = torch.tensor(ranks).reshape([grid.shape[axis] for axis in axes])
    _check_ascending(arranged_ranks)
    mesh: Any = DeviceMesh(grid.device.type, arranged_ranks, mesh_dim_names=axes)
    return mesh  # type: ignore[no-any-return]
