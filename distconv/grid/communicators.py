"""The communicators, transports and journals of this process, which all its grids share.

MPI supports about two thousand communicators, and a program may make more grids.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from distconv.device.kinds import (
    is_accelerator,
    library_of,
    version_of_library,
    warn_where_errors_stay_unknown,
)
from distconv.device.streams import SideStream, release_graphs
from distconv.grid.abort import ABANDONED
from distconv.grid.journal import Journal, Wait, Waiting, WatchedTransport
from distconv.grid.ranks import world
from distconv.grid.stall import Watch, time_limit
from distconv.transport.interface import Communicator, StreamTransport, Transport
from distconv.transport.nccl import NCCLTransport
from distconv.transport.staged import (
    LaunchQueue,
    PinnedCopies,
    StagedTransport,
    takes_device_memory,
)
from distconv.transport.torch import (
    Store,
    TorchCommunicator,
    TorchStreamTransport,
    TorchTransport,
    common_store,
)

# A test of a transport between accelerators, by messages with known values.
#
# On one vendor's machines batches of messages silently corrupted halos. One exchange and one
# collective of every kind find such a transport before a program uses it.


_VARIABLE = "DISTCONV_SELFTEST"

_ELEMENTS = 2**15
"""The elements of a test message: so many that libraries send the message in several steps."""

_SUMMED = torch.float32, torch.bfloat16


def found_wrong(carrier: Transport, comm: Communicator, device: torch.device) -> list[str]:
    """Test the transport `carrier` on `device`, and return a text for each wrong result.

    The texts are the same on all ranks. Return an empty list without a test if DISTCONV_SELFTEST=0
    on any rank. Collective over the ranks of `comm`.
    """
    if not all(comm.allgather(os.environ.get(_VARIABLE) != "0")):
        return []
    mine = [f"{what} on rank {comm.rank}" for what in _wrong_here(carrier, comm, device)]
    return sum(comm.allgather(mine), [])


def check_carrier(carrier: Transport, comm: Communicator, device: torch.device) -> None:
    """Raise RuntimeError on all ranks if any rank receives wrong values in a test of a transport.

    Collective over the ranks of `comm`.
    """
    wrong = found_wrong(carrier, comm, device)
    if not wrong:
        return
    library = f"torch {torch.__version__}"
    if is_accelerator(device) and carrier.name != "mpi":
        library += f", {library_of(device.type)} {version_of_library(device.type)}"
    raise RuntimeError(
        f"ProcessGrid: transport {carrier.name!r} ({library}) delivers other values than were "
        f"sent: {', '.join(wrong)}. Choose another transport=, or another version of the library; "
        f"{_VARIABLE}=0 skips the test"
    )


def _wrong_here(carrier: Transport, comm: Communicator, device: torch.device) -> list[str]:
    me, ranks = comm.rank, comm.size

    def numbers(rank: int) -> Tensor:
        return torch.arange(_ELEMENTS, dtype=torch.float32, device=device) + rank

    own, peers = numbers(me), sorted({(me - 1) % ranks, (me + 1) % ranks})
    arriving = [(peer, carrier.empty((_ELEMENTS,), own)) for peer in peers]
    carrier.exchange(arriving, [(peer, own) for peer in peers], carrier.next_tag()).wait()
    wrong = [f"a message of rank {r}" for r, got in arriving if not torch.equal(got, numbers(r))]
    for dtype in _SUMMED:
        total = torch.full((7,), me % 2, dtype=dtype, device=device)
        carrier.all_reduce(total, comm).wait()
        if not torch.equal(total, torch.full_like(total, ranks // 2)):
            wrong.append(f"a sum in {str(dtype).removeprefix('torch.')}")
    gathered = carrier.all_gather(torch.full((3,), me, device=device), comm)
    if gathered[:, 2].tolist() != list(range(ranks)):
        wrong.append("an all-gather")
    value = torch.full((3,), me, device=device)
    carrier.broadcast(value, comm)
    if value.any():
        wrong.append("a broadcast")
    return wrong


# Closing the transports between accelerators at the end of the program, within limited time.


_PATIENCE = 10.0
"""Seconds allowed for closing, and again for aborting. The programs of all ranks have ended by
then, so no result is lost with a message that is still in flight."""


class Closing:
    """Closes the transports that `carriers()` returns, at the end of the program.

    The constructor starts the threads that close, as Python 3.12 and later do not start threads at
    the end of a program.
    """

    def __init__(self, carriers: Callable[[], Iterable[StreamTransport]]):
        self._carriers = carriers
        self._close, self._abort = (
            _DeferredThread(partial(self._end, abort)) for abort in (False, True)
        )

    def run(self, abort: bool) -> None:
        """Close the transports: at once if `abort`, otherwise when their work is done.

        All captured graphs of the device are released first. Transports that are not closed within
        ten seconds are aborted.
        """
        release_graphs()
        if not abort and self._close.ends_within(_PATIENCE):
            return
        if not abort:
            print(
                f"distconv: connections between accelerators were not closed within {_PATIENCE:g} "
                "s and are aborted",
                file=sys.stderr,
                flush=True,
            )
        self._abort.ends_within(_PATIENCE)

    def _end(self, abort: bool) -> None:
        for carrier in self._carriers():
            carrier.close(abort)


class _DeferredThread:
    """A daemon thread that is started now, and calls `work` when `ends_within` is called."""

    def __init__(self, work: Callable[[], None]):
        self._work, self._begun = work, threading.Event()
        self._thread = threading.Thread(target=self._run, name="distconv-close", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Let the thread do its work, and return whether the work is done within `seconds`."""
        self._begun.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._begun.wait()
        self._work()


_LONGER = 60.0
"""Seconds by which the time limit of torch's groups between accelerators exceeds DISTCONV_TIMEOUT,
so that the report of the watching thread, which is more detailed, comes first."""

_LONGEST = timedelta(days=365)


_Key = tuple[str, tuple[str, ...], tuple[int, ...]]
"""The key of a transport: its name, the device of each rank, and the ranks' numbers in the job."""


class _Store:
    """The communicators, transports and journals that this process has made, and its GPU.

    `carriers` has the transports that send messages; `transports` has the same wrapped, for the
    watching thread and the journal.
    """

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
        """The functions of all active contexts `carried_by`, the innermost context last."""


@cache
def _store() -> _Store:
    return _Store()


def communicator(ranks: tuple[int, ...], purpose: str) -> Communicator:
    """Return the communicator of `ranks`, numbers in the job, for `purpose`.

    Each purpose, such as "reductions", has its own communicator, so that messages of different
    purposes cannot be confused. The first call is collective over `ranks`; later calls return the
    same object.
    """
    made = _store().communicators
    key = (purpose, ranks)
    if key not in made:
        made[key] = world().subgroup(ranks, purpose)
    return made[key]


def transport(ranks: tuple[int, ...], name: str, devices: tuple[str, ...]) -> Transport:
    """Return the transport called `name` between `ranks`, numbers in the job.

    `devices` has the device of each rank. Only the first call communicates. Collective over
    `ranks`.
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
    """Send this rank's messages by the transports that `wrap` returns, within the context.

    `wrap(transport)` is called for each transport of this process, also for transports made within
    the context. It returns a transport that may record messages, and sends them by
    `transport.carrier`. No communication.
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
    """Return the journal of `ranks`, numbers in the job, which all grids of these ranks share.

    The first call is collective over `ranks`, and starts the thread that watches waits.
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
    """Return a new transport called `name` between the ranks of `comm`. Collective.

    `devices` has the device of each rank.
    """
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
        from distconv.transport.mpi import MPITransport  # here, as the module imports MPI

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
                "ProcessGrid: MPI reports that it accepts GPU pointers, but delivers wrong values "
                f"for {wrong[0]}; messages are staged through the host",
                stacklevel=2,
            )
    return StagedTransport(on_host, copies, queue)


def store_of(comm: Communicator) -> Store:
    """Return a key-value store of torch.distributed that the ranks of `comm` share. Collective.

    For a single rank that torch has not started the store is None.
    """
    if isinstance(comm, TorchCommunicator):
        return comm.store
    return common_store(comm) if comm.size > 1 else None


def gpu() -> torch.device | None:
    """Return the GPU that this rank uses on earlier grids, or None."""
    return _store().gpu


def use_gpu(device: torch.device) -> None:
    """Make `device` this rank's GPU for later grids, and torch's current device."""
    torch.accelerator.set_device_index(device)
    _store().gpu = device


def _side_stream(device: torch.device) -> SideStream:
    """Return the stream on which this process sends all messages; make it at the first call."""
    store = _store()
    if store.side is None:
        store.side = SideStream(device)
    return store.side


def _between_accelerators() -> list[StreamTransport]:
    return [cast(StreamTransport, c) for c in _store().carriers.values() if c.ordered]


def _close() -> None:
    """Close the transports between accelerators: at once if the job is aborted, else when idle."""
    closing = _store().closing
    if closing is not None:
        closing.run(abort=ABANDONED.is_set())


atexit.register(_close)  # now, so that `_close` runs after the programs of all ranks have ended
