"""`ProcessGrid`: all or some ranks of a job as a grid with named axes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, nan, prod
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch

from distconv.device.kinds import asks_for_channels_last, backend_of, is_accelerator
from distconv.geometry.topology import AXES, Topology
from distconv.grid import communicators, devices
from distconv.grid.abort import abort_when_a_rank_raises, end_when_abandoned
from distconv.grid.interface import Grid
from distconv.grid.journal import Wait
from distconv.grid.ranks import ranks_of, world
from distconv.grid.stall import time_limit
from distconv.grid.words import running
from distconv.transport.interface import Communicator, ObjectCommunicator
from distconv.transport.launch import (
    check_is_rank,
    keep_launcher_from_children,
    launched,
    start_line,
)
from distconv.transport.torch import TorchCommunicator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# Conversion between a grid and a device mesh of torch.distributed with the same axis names.


def axes_of_mesh(mesh: DeviceMesh, axes: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return the grid axis of each mesh dimension: `axes[name]`, or by default the name itself.

    Raises ValueError if a dimension has no grid axis, or two dimensions have the same.
    """
    named = tuple((axes or {}).get(name, name) for name in mesh.mesh_dim_names or ())
    if len(named) != mesh.ndim or len(set(named)) < len(named) or not set(named) <= set(AXES):
        raise ValueError(
            f"from_device_mesh: the dimensions of {mesh} are named {mesh.mesh_dim_names}; name "
            f"each after a different axis of {', '.join(AXES)}: mesh_dim_names, or axes={{name: "
            "axis}"
        )
    return named


def arranged(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[list[int], dict[str, int]]:
    """Return the mesh's ranks in the order of a grid, and the number of ranks along each grid axis.

    `axes` has the grid axis of each mesh dimension. Raises `ValueError` if ranks do not ascend
    along each dimension.
    """
    _check_ascending(mesh.mesh)
    order = sorted(range(mesh.ndim), key=lambda i: AXES.index(axes[i]))
    ranks: list[int] = mesh.mesh.permute(order).reshape(-1).tolist()
    return ranks, dict(zip(axes, mesh.mesh.shape, strict=True))


def _check_ascending(ranks: torch.Tensor) -> None:
    """Raise ValueError if ranks do not ascend along each dimension of the mesh `ranks`.

    torch would sort such ranks when it creates the mesh's process groups.
    """
    for dimension in range(ranks.dim()):
        if not (ranks.diff(dim=dimension) > 0).all():
            raise ValueError(
                f"device_mesh: the ranks {ranks.tolist()} do not ascend along every dimension, "
                "and torch.distributed would sort them; create the grid with ascending ranks"
            )


def mesh_axes(grid: Grid) -> tuple[str, ...]:
    """Return the axes of the device mesh of `grid`: those with several ranks, or only "sample"."""
    return tuple(axis for axis, n in grid.shape.items() if n > 1) or ("sample",)


def make_device_mesh(grid: Grid, ranks: tuple[int, ...]) -> DeviceMesh:
    """Return a device mesh of torch.distributed with the ranks and the axes of `grid`. Collective.

    `ranks` has the number in the job of each rank of the grid. If the program has no default group
    of torch.distributed, one is initialised. Raises ValueError on every rank if the grid does not
    have all ranks of the job, if ranks do not ascend along its axes, or if the program's default
    group numbers the ranks differently.
    """
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh

    job = world()
    if grid.size != job.size:
        raise ValueError(
            f"device_mesh: the grid has {grid.size} of {job.size} ranks, but torch.distributed "
            "creates groups with all ranks; use a grid of all ranks"
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
            f"device_mesh: the default group numbers the ranks of the grid {theirs}, but the job "
            f"numbers them {ranks}; initialize the default group with the job's numbers"
        )
    axes = mesh_axes(grid)
    arranged_ranks = torch.tensor(ranks).reshape([grid.shape[axis] for axis in axes])
    _check_ascending(arranged_ranks)
    mesh: Any = DeviceMesh(grid.device.type, arranged_ranks, mesh_dim_names=axes)
    return mesh  # type: ignore[no-any-return]


if launched():  # a rank may raise before it makes a grid, while other ranks wait to make the grid
    abort_when_a_rank_raises()
    keep_launcher_from_children()

_grids: WeakValueDictionary[int, ProcessGrid] = WeakValueDictionary()
"""All grids of this process, by `id`, as several grids may be equal."""


class ProcessGrid(Grid):
    """P_N x P_S ranks: `sample` partitions the mini-batch, the other axes partition each sample.

    P_N is the number of ranks along `sample`; P_S, the product of the other numbers, is the number
    of ranks that share a sample. Ranks are numbered row-major over (sample, channel, filter, depth,
    height, width), so ranks that share a sample have consecutive numbers, on one node if possible.

    Raises ValueError on every rank if the extents do not fit the number of ranks, or if device or
    transport is not available. Raises RuntimeError on every rank if the environment shows that
    several processes were started without a connection between them, unless
    DISTCONV_ALLOW_SINGLE=1; and in a worker process, which is not a rank. Raises TypeError for any
    other axis. Warns if one rank is alone in a job of several tasks.

    Parameters
    ----------
    comm: the ranks, all of which construct the grid: a communicator of mpi4py, a process group of
        torch.distributed, `comm` of another grid, or rank numbers in the job. By default all ranks
        of the job: those started by mpiexec or torchrun, or in a default group of
        torch.distributed.
    sample, channel, filter, depth, height, width: the number of ranks along each axis. The product
        is the number of ranks of the grid. One axis may be -1, which is inferred.
    device: this rank's device, such as "cpu", "cuda" or "cuda:1". By default, if torch finds
        accelerators, each rank in order gets the accelerator that the fewest ranks have. A rank
        keeps its accelerator on later grids. The accelerator becomes torch's current device.
    transport: the library that sends messages: "torch", by torch.distributed (NCCL, RCCL or oneCCL
        between GPUs that each belong to one rank, and gloo between CPUs); "nccl", by cupy between
        such GPUs; or "mpi", for GPUs through the host unless the MPI is GPU-aware. The default is
        DISTCONV_TRANSPORT if set; otherwise, between GPUs, the first of "torch", "mpi" and "nccl"
        that is possible, and between CPUs "mpi", except under torchrun.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=-1)  # on 2 ranks
    >>> print(grid)
    ProcessGrid(height=2) on 2 ranks
    >>> grid.size, grid.shape["height"], grid.shape["sample"]
    (2, 2, 1)
    """

    def __init__(
        self,
        comm: ObjectCommunicator | ProcessGroup | Sequence[int] | None = None,
        *,
        sample: int = 1,
        channel: int = 1,
        filter: int = 1,
        depth: int = 1,
        height: int = 1,
        width: int = 1,
        device: str | torch.device | None = None,
        transport: str | None = None,
        **unknown: Any,
    ):
        if unknown:
            name, extent = next(iter(unknown.items()))
            raise TypeError(
                f"ProcessGrid: {name}={extent!r} is not an axis; choose from {', '.join(AXES)}"
                + ("; sample partitions the mini-batch" if "batch" in name else "")
            )
        self._ranks = ranks_of(comm)
        extents = dict(zip(AXES, (sample, channel, filter, depth, height, width), strict=True))
        abort_when_a_rank_raises()
        if len(self._ranks) > 1:
            end_when_abandoned()
        journal = communicators.journal(self._ranks)
        with Wait(journal.waiting):
            self._comm = communicators.communicator(self._ranks, "user")
            rank = self._comm.rank
            topology, offers = _agreed(self._comm, journal.debug, extents, device, transport)
        choice = devices.choose(offers)
        if choice.notice and rank == 0:
            warnings.warn(f"ProcessGrid: {choice.notice}", stacklevel=2)
        self._devices = choice.devices
        own = torch.device(choice.devices[rank])
        if is_accelerator(own):
            communicators.use_gpu(own)
        with Wait(journal.waiting):
            carrier = communicators.transport(self._ranks, choice.transport, self._devices)
        super().__init__(topology, rank, own, carrier, journal, is_accelerator(own))
        self._communicators: dict[tuple[frozenset[str], str], Communicator] = {}
        _grids[id(self)] = self

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the number in the job of each rank of the grid, in the grid's order.

        Examples
        --------
        >>> dc.ProcessGrid(height=2).ranks
        (0, 1)
        """
        return self._ranks

    @property
    def comm(self) -> Any:
        """Return a communicator of the grid's ranks, in grid order, for the program's own use.

        If MPI started the ranks, the result is a communicator of mpi4py. Otherwise it has the same
        interface for small objects: `rank`, `size`, `bcast(value)`, `allgather(value)`.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> grid.comm.bcast("from rank 0" if grid.rank == 0 else None)
        'from rank 0'
        """
        return self._comm.for_program()

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, axes: Mapping[str, str] | None = None, **options: Any
    ) -> ProcessGrid:
        """Return a grid with the ranks and dimensions of a device mesh of torch.distributed.

        Collective over the ranks of the mesh. Raises ValueError if a mesh dimension has no grid
        axis, or two dimensions have the same.

        Parameters
        ----------
        mesh: a mesh whose dimensions are named by axes of the grid, in any order.
        axes: the grid axis for each name of a mesh dimension that differs: {"dp": "sample"}.
        options: `device` and `transport`, as in `ProcessGrid`.

        Examples
        --------
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> mesh = dc.ProcessGrid(sample=2).device_mesh
        >>> print(dc.ProcessGrid.from_device_mesh(mesh))
        ProcessGrid(sample=2) on 2 ranks
        >>> print(dc.ProcessGrid.from_device_mesh(mesh, {"sample": "height"}))
        ProcessGrid(height=2) on 2 ranks
        """
        ranks, extents = arranged(mesh, axes_of_mesh(mesh, axes))
        return cls(ranks, **(options | extents))

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """Return the grid's ranks as a device mesh of torch.distributed, without axes of one rank.

        The grid must have all ranks of the job; otherwise ValueError is raised. If the program has
        no default group of torch.distributed, one is initialised. Collective at the first access.

        Examples
        --------
        >>> mesh = dc.ProcessGrid(height=2).device_mesh
        >>> mesh.mesh_dim_names, mesh.mesh
        (('height',), tensor([0, 1], dtype=torch.int32))
        """
        return make_device_mesh(self, self._ranks)

    def communicator(self, axes: Iterable[str], purpose: str = "reductions") -> Communicator:
        key = (frozenset(axes), purpose)
        if key not in self._communicators:
            peers = self.topology.peers(self.rank, key[0])
            ranks = tuple(self._ranks[r] for r in peers)
            if len(ranks) > 1:
                self.journal.step("creating a communicator")
            with self.waiting():
                self._communicators[key] = communicators.communicator(ranks, purpose)
        return self._communicators[key]

    def all_gather_object(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        self.journal.step("all_gather_object")
        with self.waiting():
            return self._comm.allgather(value)

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """Return the weighted mean over the ranks of `value`, such as a metric of local samples.

        Collective. Ranks that share samples pass the same value, with the number of samples as
        weight. A value of weight 0 is ignored, even NaN. If all weights are 0, the mean is NaN.

        Raises ValueError on every rank if a weight is negative or not finite on any rank.

        Parameters
        ----------
        value: this rank's number, or a tensor of one element.
        weight: the weight of this rank's value, 0 or more.

        Examples
        --------
        >>> grid = dc.ProcessGrid(sample=2)
        >>> correct, samples = [(3, 4), (1, 2)][grid.rank]  # of this rank's own samples
        >>> round(grid.mean(correct / samples, samples), 3)
        0.667
        """
        own = value.item() if isinstance(value, torch.Tensor) else float(value)
        wrong = not 0 <= weight < inf
        counts = not wrong and weight > 0
        numbers = torch.tensor(
            (weight * own if counts else 0.0, weight if counts else 0.0, float(wrong)),
            dtype=torch.float64,
            device=self.device,
        )
        if self.size > 1:
            group = self.communicator(AXES)
            with running("ProcessGrid.mean"):
                self.transport.all_reduce(numbers, group).wait()
        total, weights, bad = numbers.tolist()
        if bad:
            mine = f"weight={weight!r} here" if wrong else "the weight on another rank"
            raise ValueError(
                f"mean: {mine} is not a weight; pass the number of samples, 0 or more, on every "
                "rank"
            )
        return total / weights if weights else nan

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ProcessGrid)
            and self.topology == other.topology
            and self._ranks == other._ranks
            and self._devices == other._devices
        )

    def __hash__(self) -> int:
        return hash((self.topology, self._ranks))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ProcessGrid belongs to its MPI job and cannot be pickled; create it again in the "
            "other process"
        )

    def __repr__(self) -> str:
        gpus = f" with GPUs, {self.transport.name}" if self.computes_on_gpu else ""
        return f"{super().__repr__()}{gpus}"


class _ForkedTransport:
    """A replacement for a grid's transport in a process forked from a rank: every use raises."""

    def __getattr__(self, name: str) -> NoReturn:
        check_is_rank()
        raise AttributeError(name)


def _leave_messages_to_the_rank() -> None:
    """In a forked process, such as a reading worker, make grids raise when a message is to be sent.

    Otherwise the process, which is not a rank, would wait forever. Coordinates and boxes need no
    messages, and still work.
    """
    for grid in list(_grids.values()):
        # By `__dict__`, as `Grid` forbids to change its attributes.
        grid._comm = grid.__dict__["transport"] = _ForkedTransport()  # type: ignore[assignment]
        grid._communicators = {}


os.register_at_fork(after_in_child=_leave_messages_to_the_rank)


def _agreed(
    comm: Communicator,
    debug: bool,
    extents: dict[str, int],
    device: str | torch.device | None,
    transport: str | None,
) -> tuple[Topology, list[devices.Offer]]:
    """Return the grid's topology, and the offers of devices from all ranks. Collective.

    `extents` has the requested number of ranks along each axis, or -1. `debug` is whether this rank
    compares every step. Raises ValueError on every rank if the requests of ranks differ, or the
    request of a rank cannot be met.
    """
    mine: tuple[Topology, devices.Offer, bool] | str
    try:
        time_limit()
        asks_for_channels_last()
        by_mpi = not isinstance(comm, TorchCommunicator)
        offer = devices.make_offer(device, transport, communicators.gpu(), by_mpi)
        mine = _fit(extents, comm.size), offer, debug
    except ValueError as error:
        mine = str(error)
    everyone = comm.allgather(mine)
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(theirs if theirs == everyone[0] else f"{theirs} (on rank {rank})")
        if theirs[0] != everyone[0][0]:
            raise ValueError(
                f"ProcessGrid: {theirs[0]} on rank {rank} and {everyone[0][0]} on "
                "rank 0; pass the same on every rank"
            )
        if theirs[2] != everyone[0][2]:
            on, off = (rank, 0) if theirs[2] else (0, rank)
            raise ValueError(
                f"ProcessGrid: DISTCONV_DEBUG is set on rank {on} but not on rank {off}, so ranks "
                "would not compare their steps; set it on every rank, or on none"
            )
    return everyone[0][0], [offer for _, offer, _ in everyone]


def _fit(extents: dict[str, int], ranks: int) -> Topology:
    """Return the topology of `ranks` ranks, with `extents[axis]` ranks along each axis.

    One extent may be -1, which is inferred. Raises ValueError if the extents do not fit the number
    of ranks.
    """
    for axis, n in extents.items():
        if isinstance(n, bool) or not isinstance(n, Integral) or (n < 1 and n != -1):
            raise ValueError(
                f"ProcessGrid: {axis}={n!r} is not a number of ranks; choose an integer of 1 or "
                "more, or -1"
            )
    inferred = [axis for axis, n in extents.items() if n == -1]
    if len(inferred) > 1:
        raise ValueError(f"ProcessGrid: only one axis can be -1, not {' and '.join(inferred)}")
    given = {axis: n for axis, n in extents.items() if n > 1}
    product, needed, beside = 1, prod(given.values()), list[str]()
    start = ""
    if not inferred and ranks == world().size:
        start = f". This grid needs {needed} rank{'s' if needed > 1 else ''}, {ranks} "
        start += f"{'were' if ranks > 1 else 'was'} started: {start_line(needed)}"
    for axis, n in given.items():
        if ranks % (product * n):
            left = ranks // product
            choices = [str(d) for d in range(1, left + 1) if left % d == 0]
            raise ValueError(
                f"ProcessGrid: {axis}={n} does not divide {ranks} ranks"
                f"{' beside ' if beside else ''}{', '.join(beside)}; choose {', '.join(choices)}, "
                f"or -1{start}"
            )
        product *= n
        beside.append(f"{axis}={n}")
    if inferred:
        extents = extents | {inferred[0]: ranks // product}
    elif product != ranks:
        axes = ", ".join(f"{axis}={n}" for axis, n in given.items()) or "all axes 1"
        raise ValueError(
            f"ProcessGrid: {axes} makes {product} of {ranks} ranks; set one axis to -1 to use all "
            f"ranks{start}"
        )
    return Topology(tuple(int(extents[axis]) for axis in AXES))
