"""Carriers over torch's own process groups: gloo for CPU tensors, NCCL and others between GPUs.

Each group of ranks has a process group for each purpose, so that sums of different purposes never
mix. gloo matches messages by tags, and the host waits for messages. Between accelerators, messages
are matched by the order in which ranks start them, which is the same on all ranks, and the current
stream waits for messages.
"""

from __future__ import annotations

import pickle
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_char
from datetime import timedelta
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distconv.device import kinds
from distconv.device.kinds import error_of, is_accelerator, library_of, make_group
from distconv.device.streams import SideStream, StreamRequest, using
from distconv.torch_private import end_batch, end_group, gather_flat, start_batch
from distconv.transport.interface import (
    BufferPool,
    Communicator,
    Comparison,
    Message,
    Request,
    Summand,
    tags,
    with_opposites,
)
from distconv.transport.link import LOOPBACK

# Process groups and communicators by torch.distributed, without its default group.
#
# The ranks of a group find each other by the group's name in a store.


Store: TypeAlias = Any
"""A store of torch.distributed."""
ProcessGroup: TypeAlias = Any
"""A backend of torch.distributed, such as `ProcessGroupGloo`."""

NO_LIMIT = timedelta(days=365)
"""The time limit of gloo, longer than DISTCONV_TIMEOUT, which reports more details."""

_REACH = timedelta(seconds=20)
"""The time limit for a connection to the rank that hosts a store."""


def why_no_process_groups(device: str) -> str | None:
    """Return why torch cannot send messages between devices of type `device`; None if it can."""
    distributed = torch.distributed
    if not distributed.is_available():
        return "this torch is built without torch.distributed"
    if is_accelerator(torch.device(device)):
        return kinds.why_no_backend(device)
    return None if distributed.is_gloo_available() else "this torch has no gloo"


def open_store(comm: Communicator) -> Store:
    """Return a new store over TCP, hosted by the first rank, or None on ranks that cannot connect.

    Collective over `comm`. The first rank must drop the store last. If all ranks are on one host,
    only processes of that host can connect. All keys have a secret prefix, sent to the ranks only.
    """
    from torch.distributed import TCPStore

    store: Store = None
    hosts = comm.allgather(socket.gethostname())
    # A single machine may be unable to resolve its own name.
    first = hosts[0] if len(set(hosts)) > 1 else LOOPBACK
    if comm.rank == 0:
        listening = None
        if first == LOOPBACK:
            listening = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN).detach()
        with suppress(RuntimeError):
            store = TCPStore(
                first, 0, None, True, _REACH, wait_for_workers=False, master_listen_fd=listening
            )
    port, secret = comm.bcast((None if store is None else store.port, secrets.token_hex(16)))
    if comm.rank and port is not None:
        there = LOOPBACK if hosts[comm.rank] == hosts[0] else first
        with suppress(RuntimeError):
            store = TCPStore(there, port, None, False, _REACH, wait_for_workers=False)
    return None if store is None else prefixed(secret, store)


def common_store(comm: Communicator) -> Store:
    """Return a new store for process groups among the ranks of `comm`. Collective over `comm`.

    Raises RuntimeError on every rank if a rank cannot connect to the store.
    """
    store = open_store(comm)
    hosts = comm.allgather((socket.gethostname(), store is not None))
    lost = [f"{host} (rank {rank})" for rank, (host, reached) in enumerate(hosts) if not reached]
    if lost:
        raise RuntimeError(
            f"transport 'torch': {', '.join(lost)} cannot reach a port of {hosts[0][0]}, which "
            "ranks need to connect; open the ports between the nodes, or choose transport='mpi'"
        )
    store.set_timeout(NO_LIMIT)
    return store


def group_name(purpose: str, ranks: tuple[int, ...]) -> str:
    """Return a name for the group of `ranks`, of the same length for any number of ranks."""
    return f"{purpose} {sha256(repr(ranks).encode()).hexdigest()}"


def gloo_group(store: Store, name: str, rank: int, size: int) -> ProcessGroup:
    """Return a new gloo process group, in which this rank is `rank` of `size`. Collective."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(prefixed(name, store), rank, size, timeout=NO_LIMIT)


def prefixed(name: str, store: Store) -> Store:
    """Return a view of `store` that puts `name` before every key."""
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


def start(collective: Callable[..., Any], *arguments: Any) -> Any:
    """Start a collective or a message, and return its `Work`; raise RuntimeError with reasons."""
    try:
        return collective(*arguments)
    except RuntimeError as error:
        raise explained(error) from error


def wait_for(work: Any) -> None:
    """Wait for a `Work` of torch.distributed; raise RuntimeError with reasons if it fails."""
    try:
        work.wait()
    except RuntimeError as error:
        raise explained(error) from error


def complete(collective: Callable[..., Any], *arguments: Any) -> None:
    """Run `collective(*arguments)`, and wait until it is complete.

    `collective` is a method of a process group that returns a `Work`. Tensors among the arguments
    are contiguous and on the CPU; the caller may free their memory afterwards.
    """
    wait_for(start(collective, *(lent(a) if isinstance(a, Tensor) else a for a in arguments)))


def lent(tensor: Tensor) -> Tensor:
    """Return a tensor that shares, but does not own, the memory of a contiguous CPU tensor.

    A thread of gloo refers to its tensors for some time after a collective is complete. If gloo
    gets the result, the caller may free the memory as soon as the collective is complete.
    """
    if not tensor.numel():
        return tensor
    memory = (c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def explained(error: RuntimeError) -> RuntimeError:
    """Return a RuntimeError with an error message of torch.distributed and likely reasons."""
    return RuntimeError(
        f"torch.distributed could not complete the messages of an operator ({error}). If the "
        "error reports a closed connection, another rank has ended. If it reports different sizes "
        "or a timeout, the ranks run different operators, or one of them takes too long; "
        "DISTCONV_DEBUG=1 names the first operator that differs"
    )


class TorchCommunicator:
    """A `Communicator` of ranks that share a store of torch.distributed, or of one rank alone.

    `store` is None for a single rank. `me` is this rank's number in the job, and `ranks` are the
    numbers of all ranks. `purpose` distinguishes communicators of the same ranks.
    """

    def __init__(self, store: Store | None, me: int, ranks: tuple[int, ...], purpose: str):
        self.store, self.ranks, self.purpose = store, ranks, purpose
        self.rank, self.size = ranks.index(me), len(ranks)
        self._me = me

    @cached_property
    def group(self) -> ProcessGroup:
        """Return the gloo process group of the ranks. Collective at the first call."""
        name = group_name(self.purpose, self.ranks)
        return gloo_group(self.store, name, self.rank, self.size)

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        mine = _pickled(value)
        lengths = self._gathered(torch.tensor([len(mine)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        together = self._gathered(padded)
        return [_unpickled(row[:n]) for row, n in zip(together, lengths, strict=True)]

    def bcast(self, value: Any = None) -> Any:
        if self.size == 1:
            return value
        mine = _pickled(value if self.rank == 0 else None)
        length = torch.tensor([len(mine)])
        complete(self.group.broadcast, length, 0)
        message = mine if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        complete(self.group.broadcast, message, 0)
        return _unpickled(message)

    def _gathered(self, mine: Tensor) -> Tensor:
        """Return the vectors `mine` of all ranks, of one length, stacked by rank. Collective."""
        together = mine.new_empty((self.size, len(mine)))
        complete(gather_flat(self.group), together.view(-1), mine)
        return together

    def compare(self, numbers: Sequence[int]) -> Comparison:
        from torch.distributed import ReduceOp

        most = with_opposites(numbers)
        if self.size == 1:
            return Comparison(lambda: None, most)
        work = start(self.group.allreduce, torch.frombuffer(most, dtype=torch.int64), ReduceOp.MAX)
        return Comparison(partial(wait_for, work), most)

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> TorchCommunicator:
        made = TorchCommunicator(self.store, self._me, ranks, purpose)
        if made.size > 1:
            assert made.group is not None  # created now, not in the middle of an operator
        return made

    def for_program(self) -> TorchCommunicator:
        return self


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(message: Tensor) -> Any:
    return pickle.loads(message.numpy().tobytes())


class TorchRequest:
    """A started exchange or reduction of gloo, with the memory that torch reads and writes."""

    def __init__(self, works: list[Any], memory: Any):
        self.works, self._memory = works, memory

    def wait(self) -> None:
        for work in self.works:
            wait_for(work)
        self.works, self._memory = [], None

    def __del__(self) -> None:
        # After an exception, messages may still be in flight, and write to their memory. gloo
        # reports that a message is complete only to a wait.
        if not self.works or sys.is_finalizing():
            return
        abandoned = TorchRequest(self.works, self._memory)
        self.works = []
        threading.Thread(target=_outlive, args=(abandoned,), daemon=True).start()


def _outlive(request: TorchRequest) -> None:
    """Keep the memory of an abandoned request until it is complete. Runs in a thread of its own."""
    with suppress(RuntimeError):
        request.wait()
    request.works = []


class TorchTransport:
    """A carrier of CPU tensors by gloo; see `Transport`. All ranks of `comm` create it together.

    The ranks of a process group find each other by `store`, which is None for a single rank.
    """

    name, ordered = "torch", False
    _library = "gloo"

    def __init__(self, comm: Communicator, store: Store | None):
        self._store, self._rank = store, comm.rank
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
        self.next_tag, self.empty = tags(), BufferPool().empty
        self._messages: ProcessGroup = self._group_of(comm) if comm.size > 1 else None

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        receives, sends = self._to_others(arriving, leaving)
        group, works = self._messages, list[Any]()
        under_way = TorchRequest(works, (arriving, leaving))
        for rank, message in receives:
            works.append(start(group.recv, [message], rank, tag))
        for rank, message in sends:
            works.append(start(group.send, [message], rank, tag))
        return under_way

    def all_reduce(self, tensor: Tensor, group: Communicator) -> Request:
        summand = Summand.of(tensor, self._library)
        if group.size == 1 or not tensor.numel():
            return TorchRequest([], None)
        return summand.arriving(self._started(self._group_of(group).allreduce, summand.numbers))

    def all_gather(self, tensor: Tensor, group: Communicator) -> Tensor:
        gathered = tensor.new_empty((group.size, *tensor.shape))
        if group.size == 1:
            gathered[0] = tensor
        elif tensor.numel():
            gather = gather_flat(self._group_of(group))
            self._started(gather, _bytes(gathered), _bytes(tensor)).wait()
        return gathered

    def broadcast(self, tensor: Tensor, group: Communicator) -> None:
        if group.size > 1 and tensor.numel():
            self._started(self._group_of(group).broadcast, _bytes(tensor), 0).wait()

    def _started(self, collective: Callable[..., Any], *arguments: Any) -> Request:
        """Start `collective(*arguments)`, a method of a process group, and return its request."""
        given = [lent(a) if isinstance(a, Tensor) else a for a in arguments]
        return TorchRequest([start(collective, *given)], arguments)

    def _to_others(
        self, arriving: Sequence[Message], leaving: Sequence[Message]
    ) -> tuple[list[Message], list[Message]]:
        """Copy the messages from this rank to itself, and return the other messages, as bytes.

        Returns two lists: the messages to receive from other ranks, and the messages to send.
        Messages without elements are left out.
        """
        _copy_own(self._rank, arriving, leaving)
        arriving, leaving = (
            [(r, _bytes(t)) for r, t in messages if r != self._rank and t.numel()]
            for messages in (arriving, leaving)
        )
        return arriving, leaving

    def _group_of(self, comm: Communicator) -> ProcessGroup:
        """Return the process group for `comm`. Collective over `comm` at the first call."""
        if isinstance(comm, TorchCommunicator):
            return comm.group
        return self._made(comm, lambda name: gloo_group(self._store, name, comm.rank, comm.size))

    def _made(self, comm: Communicator, make: Callable[[str], ProcessGroup]) -> ProcessGroup:
        key = comm.purpose, comm.ranks
        if key not in self._groups:
            self._groups[key] = make(group_name(*key))
        return self._groups[key]


class TorchStreamTransport(TorchTransport):
    """A carrier between accelerators, of which each rank has its own; see `StreamTransport`.

    A message that takes longer than `limit` is an error. All messages of the process start on the
    stream `side`. `store` is that of `TorchTransport`.
    """

    ordered = True

    def __init__(
        self,
        comm: Communicator,
        store: Store | None,
        device: torch.device,
        limit: timedelta,
        side: SideStream,
    ):
        self.device, self._limit, self._side = device, limit, side
        self._library = library_of(device.type)
        super().__init__(comm, store)
        self.empty = lambda shape, like: like.new_empty(shape)

    def check(self) -> None:
        """Raise RuntimeError if a thread of torch has found an error of NCCL or another library.

        Some time after such an error, torch ends the process.
        """
        for group in self._groups.copy().values():
            if error := error_of(group):
                raise RuntimeError(f"torch.distributed reports {error} of {self._library}")

    def close(self, abort: bool) -> None:
        for key, group in self._groups.copy().items():
            with suppress(RuntimeError):
                end_group(group, abort)
            self._groups.pop(key, None)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        receives, sends = self._to_others(arriving, leaving)
        if not (receives or sends):
            return TorchRequest([], None)
        group = self._messages
        self._side.follow()
        with using(self._side.stream):
            try:
                start_batch(group)
                try:
                    for rank, message in sends:
                        group.send([message], rank, tag)
                    for rank, message in receives:
                        group.recv([message], rank, tag)
                except BaseException:
                    # An open batch would include all later messages.
                    with suppress(Exception):
                        end_batch(group)
                    raise
                end_batch(group).wait()
            except RuntimeError as error:
                raise explained(error) from error
        return self._side.mark(tensor for _, tensor in (*arriving, *leaving))

    def _started(self, collective: Callable[..., Any], *arguments: Any) -> StreamRequest:
        """Start `collective(*arguments)` on the side stream, after work on the current stream."""
        self._side.follow()
        with using(self._side.stream):
            start(collective, *arguments).wait()
        return self._side.mark(a for a in arguments if isinstance(a, Tensor))

    def _group_of(self, comm: Communicator) -> ProcessGroup:
        """Return the process group for `comm`. Collective over `comm` at the first call.

        An all-reduce connects all ranks of a new group. A first batch of messages would connect
        only the ranks that exchange messages.
        """

        def make(name: str) -> ProcessGroup:
            store = prefixed(f"{self.device.type} {name}", self._store)
            group = make_group(store, comm.rank, comm.size, self.device, self._limit)
            self._started(group.allreduce, torch.zeros(1, device=self.device)).wait()
            return group

        return self._made(comm, make)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as a vector of bytes."""
    # A tensor of one element is contiguous with any stride; Tensor.view would keep the stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copy_own(rank: int, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
    """Copy the messages that this rank, number `rank`, sends to itself."""
    into = [tensor for other, tensor in arriving if other == rank]
    own = [tensor for other, tensor in leaving if other == rank]
    for target, source in zip(into, own, strict=True):
        _bytes(target).copy_(_bytes(source))
