"""`ParallelStrategy`: how many ranks share a sample, and which dimensions they cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distconv.geometry.layout import Layout, dimension_names
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.whole_numbers import whole_numbers

_AXES = ("depth", "height", "width")
"""The grid axes for the entries of `num_shards`, whatever dimensions they cut."""


class ReplicaGrid(ProcessGrid):
    """The grid of the ranks of one replica, whose tensors are DCTensors.

    Attributes
    ----------
    strategy: the strategy to which it belongs.
    """

    strategy: ParallelStrategy


class StrategyMesh(DeviceMesh):
    """A device mesh whose dimensions "dc0" and "dc1" have further names.

    If tensors are cut along one dimension, "dc" is "dc0", as in earlier versions of LBANN's
    package. If they are cut along one or two, "dc2", "dc3" and "dc4" name the mesh dimension that
    cuts tensor dimension 2, 3 or 4, by the present `shard_dim`.
    """

    strategy: ParallelStrategy

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of the ranks that differ along the named dimensions only."""
        named = self._own(names) if isinstance(names, str) else tuple(map(self._own, names))
        return super().__getitem__(named)

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the process group of a dimension, by number or name."""
        return super().get_group(self._own(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim)

    def _own(self, name: str) -> str:
        """Return the name that the mesh itself knows."""
        own = self.strategy.distconv_dim_names
        # Of three dimensions the last is called "dc2", whichever it cuts.
        by_number = {f"dc{d}": n for d, n in zip(self.strategy.shard_dim, own, strict=True)}
        further = {1: {"dc": own[0]} | by_number, 2: by_number}.get(len(own), {})
        return further.get(name, name)


class ParallelStrategy:
    """All ranks of the job as replicas of the model; `num_shards` parts of a sample are a replica.

    All ranks of the job make it together. Consecutive ranks share samples.

    Parameters
    ----------
    num_shards: the number of parts of each dimension that is cut, at most three.
    shard_dim: the numbers of the dimensions to cut, from 2 on, one for each of `num_shards`. The
        attribute may be assigned again later.
    device_type: "cuda" or "cpu".

    Attributes
    ----------
    total_num_shards: the ranks of a replica.
    ddp_ranks, ddp_ind: the number of replicas, and the index of this rank's replica.
    shard_ind: the index of this rank's part along each dimension that is cut.
    device_mesh: all ranks as a mesh of torch.distributed, by the names "ddp" and
        `distconv_dim_names`, which are "dc0", "dc1", ...
    grid: the ranks of this replica, on which its tensors live.
    job: all ranks.

    Raises
    ------
    ValueError On every rank, if the number of ranks is no multiple of the parts of a sample, or
    `shard_dim` does not fit `num_shards`.
    """

    def __init__(
        self,
        num_shards: int | Sequence[int],
        shard_dim: int | Sequence[int] = (2,),
        device_type: str = "cuda",
    ):
        self.num_shards = whole_numbers(num_shards, "ParallelStrategy: num_shards")
        if not 1 <= len(self.num_shards) <= len(_AXES) or min(self.num_shards) < 1:
            raise ValueError(
                f"ParallelStrategy: num_shards={num_shards!r}; give 1 to {len(_AXES)} numbers of "
                "parts, from 1 on"
            )
        self.shard_dim = shard_dim
        extents: dict[str, Any] = dict(zip(_AXES, self.num_shards, strict=False))
        self.job = ProcessGrid(sample=-1, **extents, device=device_type)
        self.total_num_shards = prod(self.num_shards)
        self.rank, self.world_size = self.job.rank, self.job.size
        self.ddp_ranks = self.world_size // self.total_num_shards
        self.ddp_ind = self.job.coords["sample"]
        self.shard_ind = [self.job.coords[axis] for axis in extents]
        first = self.ddp_ind * self.total_num_shards
        members = self.job.ranks[first : first + self.total_num_shards]
        self.grid = ReplicaGrid(members, **extents, device=device_type)
        self.grid.strategy = self
        self.distconv_dim_names = tuple(f"dc{i}" for i in range(len(self.num_shards)))
        self.device_mesh = self._mesh()

    @property
    def shard_dim(self) -> tuple[int, ...]:
        """Return the dimensions that are cut, one for each number in `num_shards`."""
        return self._shard_dim

    @shard_dim.setter
    def shard_dim(self, value: int | Sequence[int]) -> None:
        dims = whole_numbers(value, "ParallelStrategy: shard_dim")
        if len(dims) != len(self.num_shards) or len(set(dims)) < len(dims) or min(dims) < 2:
            raise ValueError(
                f"ParallelStrategy: shard_dim={value!r} does not fit num_shards={self.num_shards}; "
                "give as many different dimensions, from 2 on"
            )
        self._shard_dim = dims

    def shard_to_rank(self, shard_ind: int | Sequence[int]) -> int:
        """Return the number, in the job, of this replica's rank that holds the part `shard_ind`.

        `shard_ind` has a part for each dimension that is cut, from 0; part -1 is the last one.
        """
        parts = whole_numbers(shard_ind, "ParallelStrategy.shard_to_rank: shard_ind")
        place = 0
        for part, n in zip(parts, self.num_shards, strict=True):
            place = place * n + part % n
        return self.grid.ranks[place]

    def layout(self, ndim: int) -> Layout:
        """Return the layout of tensors of `ndim` dimensions; raise `ValueError` for too few."""
        names = dimension_names(ndim)
        if max(self.shard_dim) >= ndim:
            raise ValueError(
                f"DCTensor: shard_dim={self.shard_dim} is cut, and the tensor has {ndim} "
                "dimensions; add one of size 1 by unsqueeze, or set shard_dim anew"
            )
        return Layout(**{names[d]: axis for d, axis in zip(self.shard_dim, _AXES, strict=False)})

    def _mesh(self) -> StrategyMesh:
        kind = self.job.device_mesh.device_type  # with the default group, where there is none
        ranks = torch.arange(self.world_size).view(self.ddp_ranks, *self.num_shards)
        mesh = StrategyMesh(kind, ranks, mesh_dim_names=("ddp", *self.distconv_dim_names))
        mesh.strategy = self
        return mesh


def check_strategy(given: object, where: str) -> None:
    """Raise TypeError unless `given` is a ParallelStrategy; `where` begins the message."""
    if not isinstance(given, ParallelStrategy):
        kind = type(given).__name__
        raise TypeError(f"{where}: {kind} is no ParallelStrategy; make one, and pass it")
