"""The things that a process has once: communicators for each purpose, transports, a GPU.

MPI has about two thousand communicators to give; a program may build any number of grids.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from distconv.grid.order import Order
from distconv.grid.stall import Watch
from distconv.transport.interface import Transport
from distconv.transport.launch import mpi
from distconv.transport.launch_queue import LaunchQueue
from distconv.transport.nccl import NCCLTransport
from distconv.transport.pinned_copies import PinnedCopies
from distconv.transport.staged import StagedTransport, takes_device_memory
from distconv.transport.watched import Wait, Waiting, WatchedTransport

if TYPE_CHECKING:
    from mpi4py import MPI

Key = tuple[str, tuple[int, ...]]


class _Store:
    """What this process has made so far; it hangs on MPI.COMM_WORLD, and does not outlive MPI."""

    def __init__(self) -> None:
        self.communicators: dict[Key, MPI.Intracomm] = {}
        self.carriers: dict[tuple[str, tuple[str, ...], tuple[int, ...]], Transport] = {}
        self.transports: dict[tuple[str, tuple[str, ...], tuple[int, ...]], Transport] = {}
        self.orders: dict[tuple[int, ...], Order] = {}
        self.queue = LaunchQueue()
        self.gpu: torch.device | None = None


@cache
def _keyval() -> int:
    return int(mpi().Comm.Create_keyval())


def _store() -> _Store:
    world = mpi().COMM_WORLD
    store: Any = world.Get_attr(_keyval())
    if store is None:
        store = _Store()
        world.Set_attr(_keyval(), store)
    return store  # type: ignore[no-any-return]


def world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of `comm` as ranks of MPI.COMM_WORLD; no communication."""
    MPI = mpi()
    ranks = MPI.Group.Translate_ranks(comm.group, None, MPI.COMM_WORLD.group)
    if MPI.UNDEFINED in ranks:
        raise ValueError("ProcessGrid: every rank of comm has to be a rank of MPI.COMM_WORLD")
    return tuple(ranks)


def communicator(parent: MPI.Intracomm, ranks: tuple[int, ...], purpose: str) -> MPI.Intracomm:
    """Return a communicator of `ranks` (of MPI.COMM_WORLD) for one purpose.

    Collective over those ranks at the first call, and a look-up ever after.
    """
    made = _store().communicators
    key = (purpose, ranks)
    if key not in made:
        made[key] = parent.Create_group(mpi().COMM_WORLD.group.Incl(ranks))
    return made[key]


def transport(
    parent: MPI.Intracomm,
    ranks: tuple[int, ...],
    name: str,
    devices: tuple[str, ...],
) -> Transport:
    """Return the transport of a name among `ranks`, between tensors on the device of each.

    Collective over those ranks at the first call, and a look-up ever after, on all of them; so it
    is known by the devices of all.
    """
    carrier = _carrier(parent, ranks, name, devices)
    if len(ranks) == 1:
        return carrier
    made = _store().transports
    key = name, devices, ranks
    if key not in made:
        steps = order(parent, ranks)
        comm = communicator(parent, ranks, "exchange")

        def members(group: MPI.Intracomm) -> list[int]:
            return list(mpi().Group.Translate_ranks(group.group, None, comm.group))

        made[key] = WatchedTransport(carrier, steps, steps.waiting, members)
    return made[key]


def order(parent: MPI.Intracomm, ranks: tuple[int, ...]) -> Order:
    """Return the collective steps of `ranks`, for all grids on them; made as `communicator` is.

    From the first call on, a thread looks at what this rank waits for.
    """
    made = _store().orders
    if ranks not in made:
        waiting = Waiting()
        if len(ranks) == 1:
            made[ranks] = Order(None, waiting)
            return made[ranks]
        watch = Watch(ranks, ranks.index(mpi().COMM_WORLD.rank), waiting)
        with Wait(waiting):
            comm = communicator(parent, ranks, "order")
            made[ranks] = Order(comm, waiting)
            watch.connect(comm, made[ranks])
    return made[ranks]


def _carrier(
    parent: MPI.Intracomm, ranks: tuple[int, ...], name: str, devices: tuple[str, ...]
) -> Transport:
    made = _store().carriers
    key = name, devices, ranks
    if key not in made:
        comm = communicator(parent, ranks, "exchange")
        device = torch.device(devices[comm.rank])
        if device.type == "cpu":
            from distconv.transport.mpi import MPITransport  # which imports MPI

            made[key] = MPITransport(comm)
        elif name == "nccl":
            made[key] = NCCLTransport(comm, device)
        else:
            mpi: Any = _carrier(parent, ranks, name, ("cpu",) * len(ranks))
            direct = takes_device_memory(comm)
            made[key] = StagedTransport(mpi, PinnedCopies(device), _store().queue, direct)
    return made[key]


def gpu() -> torch.device | None:
    """Return the GPU that this rank has on other grids."""
    return _store().gpu


def take_gpu(device: torch.device) -> None:
    """Make a GPU this rank's on all grids, and torch's current one."""
    torch.cuda.set_device(device)
    _store().gpu = device
