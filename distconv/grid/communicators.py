"""The communicators, transports and journals of this process, each made once for all grids.

MPI offers about two thousand communicators, and a program may make more grids than that.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch

from distconv.device.groups import warn_where_errors_stay_unknown
from distconv.device.kinds import is_accelerator
from distconv.device.streams import SideStream
from distconv.grid.abort import ABANDONED
from distconv.grid.closing import Closing
from distconv.grid.journal import Journal
from distconv.grid.ranks import world
from distconv.grid.self_test import check_carrier, found_wrong
from distconv.grid.stall import Watch, time_limit
from distconv.grid.waits import Wait, Waiting
from distconv.grid.watched import WatchedTransport
from distconv.transport.interface import Communicator, StreamTransport, Transport
from distconv.transport.nccl import NCCLTransport
from distconv.transport.staged import (
    LaunchQueue,
    PinnedCopies,
    StagedTransport,
    takes_device_memory,
)
from distconv.transport.torch import TorchStreamTransport, TorchTransport
from distconv.transport.torch_groups import Store, TorchCommunicator, common_store

_LONGER = 60.0
"""Seconds by which the time limit of torch's groups between accelerators exceeds DISTCONV_TIMEOUT,
whose report says more."""

_LONGEST = timedelta(days=365)


_Key = tuple[str, tuple[str, ...], tuple[int, ...]]
"""The name of a carrier, the device of each rank, and the ranks."""


class _Store:
    """The communicators, transports and journals that this process has made, and its GPU."""

    def __init__(self) -> None:
        self.communicators: dict[tuple[str, tuple[int, ...]], Communicator] = {}
        self.carriers: dict[_Key, Transport] = {}
        self.transports: dict[_Key, WatchedTransport] = {}
        self.journals: dict[tuple[int, ...], Journal] = {}
        self.queue = LaunchQueue()
        self.gpu: torch.device | None = None
        self.side: SideStream | None = None
        self.closing: Closing | None = None
        self.wraps: list[Callable[[WatchedTransport], Transport]] = []
        """The functions that wrap transports now, the outermost last."""


@cache
def _store() -> _Store:
    return _Store()


def communicator(ranks: tuple[int, ...], purpose: str) -> Communicator:
    """Return the communicator of `ranks`, given by their numbers in the job, for one purpose.

    Each purpose, such as "reductions", has a communicator of its own, so that messages do not mix.
    All these ranks make it together at the first call; later calls look it up.
    """
    made = _store().communicators
    key = (purpose, ranks)
    if key not in made:
        made[key] = world().subgroup(ranks, purpose)
    return made[key]


def transport(ranks: tuple[int, ...], name: str, devices: tuple[str, ...]) -> Transport:
    """Return the transport called `name` among `ranks`, whose tensors live on `devices`.

    All these ranks call it together. Only the first call communicates.
    """
    carrier = _carrier(ranks, name, devices)
    if len(ranks) == 1:
        return carrier
    made = _store().transports
    key = name, devices, ranks
    if key not in made:

        def members(group: Communicator) -> list[int]:
            return [ranks.index(rank) for rank in group.ranks]

        made[key] = WatchedTransport(carrier, journal(ranks), members)
        for wrap in _store().wraps:
            made[key].carry_by(wrap(made[key]))
    return made[key]


@contextmanager
def carried_by(wrap: Callable[[WatchedTransport], Transport]) -> Iterator[None]:
    """Send this rank's messages through the carriers that `wrap` returns, within the context.

    `wrap(transport)` is called for each transport of this process, also for those made within the
    context. It returns a carrier that records messages and passes them to `transport.carrier`. No
    communication.
    """
    store = _store()
    store.wraps.append(wrap)
    for transport in store.transports.values():
        transport.carry_by(wrap(transport))
    try:
        yield
    finally:
        store.wraps.pop()
        for key, transport in store.transports.items():
            transport.carry_by(store.carriers[key])
            for outer in store.wraps:
                transport.carry_by(outer(transport))


def journal(ranks: tuple[int, ...]) -> Journal:
    """Return the journal of `ranks`, numbers in the job, which all grids on them share.

    All these ranks make it together at the first call, which starts the thread that watches waits.
    """
    made = _store().journals
    if ranks not in made:
        waiting = Waiting()
        if len(ranks) == 1:
            made[ranks] = Journal(None, waiting)
            return made[ranks]
        watch = Watch(ranks.index(world().rank), len(ranks), waiting)
        with Wait(waiting):
            comm = communicator(ranks, "journal")
            made[ranks] = Journal(comm, waiting)
            watch.connect(comm, made[ranks])
    return made[ranks]


def _carrier(ranks: tuple[int, ...], name: str, devices: tuple[str, ...]) -> Transport:
    made = _store().carriers
    key = name, devices, ranks
    if key not in made:
        comm = communicator(ranks, "exchange")
        made[key] = _connected(comm, name, devices)
        if made[key].ordered and _store().closing is None:
            _store().closing = Closing(_between_accelerators)
        device = torch.device(devices[comm.rank])
        if is_accelerator(device) and comm.size > 1:
            check_carrier(made[key], comm, device)
    return made[key]


def _connected(comm: Communicator, name: str, devices: tuple[str, ...]) -> Transport:
    """Make a new carrier called `name` among the ranks of `comm`, which all call it."""
    device = torch.device(devices[comm.rank])
    if name == "torch" and not is_accelerator(device):
        return TorchTransport(comm, store_of(comm))
    if name == "torch":
        limit = timedelta(seconds=min(time_limit() + _LONGER, _LONGEST.total_seconds()))
        if comm.rank == 0 and comm.size > 1:
            warn_where_errors_stay_unknown(device.type)
        return TorchStreamTransport(comm, store_of(comm), device, limit, _side_stream(device))
    if name == "nccl":
        return NCCLTransport(comm, device, _side_stream(device))
    if not is_accelerator(device):
        from distconv.transport.mpi import MPITransport  # which imports MPI

        of_mpi: Any = comm
        return MPITransport(of_mpi)
    on_host: Any = _carrier(comm.ranks, name, ("cpu",) * comm.size)
    copies, queue = PinnedCopies(device), _store().queue
    if takes_device_memory(comm, device.type):
        direct = StagedTransport(on_host, copies, queue, True)
        wrong = found_wrong(direct, comm, device)
        if not wrong:
            return direct
        if comm.rank == 0:
            warnings.warn(
                f"ProcessGrid: MPI says that it takes pointers to GPUs, and brings {wrong[0]} "
                "wrong; messages go through the host",
                stacklevel=2,
            )
    return StagedTransport(on_host, copies, queue)


def store_of(comm: Communicator) -> Store:
    """Return a store of torch.distributed for the ranks of `comm`, which all call it.

    It is None for a single rank.
    """
    if isinstance(comm, TorchCommunicator):
        return comm.store
    return common_store(comm) if comm.size > 1 else None


def gpu() -> torch.device | None:
    """Return the GPU that this rank took for an earlier grid, or None."""
    return _store().gpu


def take_gpu(device: torch.device) -> None:
    """Make `device` this rank's GPU for all later grids, and torch's current device."""
    torch.accelerator.set_device_index(device)
    _store().gpu = device


def _side_stream(device: torch.device) -> SideStream:
    """Return the one stream, made at the first call, on which this process sends all messages."""
    store = _store()
    if store.side is None:
        store.side = SideStream(device)
    return store.side


def _between_accelerators() -> list[StreamTransport]:
    return [cast(StreamTransport, c) for c in _store().carriers.values() if c.ordered]


def _close() -> None:
    """Close the carriers between accelerators: at once if the job was aborted, else when idle."""
    closing = _store().closing
    if closing is not None:
        closing.run(abort=ABANDONED.is_set())


atexit.register(_close)  # now, so that it runs after all ranks' programs have ended; see `Watch`
