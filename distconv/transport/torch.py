"""Carriers over torch's own process groups: gloo between hosts, NCCL and others between GPUs.

Each group of ranks has a process group for each purpose, so that sums of different purposes never
mix. gloo tells messages apart by tags, and the host waits for them. Between accelerators messages
are matched by the order in which ranks start them, the same on all, and the current stream waits.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from distconv.device.groups import error_of, make_group
from distconv.device.kinds import library_of
from distconv.device.streams import SideStream, StreamRequest, using
from distconv.torch_private import end_batch, end_group, gather_flat, start_batch
from distconv.transport.buffers import BufferPool
from distconv.transport.interface import Communicator, Message, Request
from distconv.transport.sums import Summand
from distconv.transport.tags import Tags
from distconv.transport.torch_groups import (
    ProcessGroup,
    Store,
    TorchCommunicator,
    explained,
    gloo_group,
    group_name,
    lent,
    prefixed,
    start,
)


class TorchRequest:
    """A started exchange or reduction of gloo, with the memory that torch reads and writes."""

    def __init__(self, works: list[Any], memory: Any):
        self.works, self._memory = works, memory

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise explained(error) from error
        self.works, self._memory = [], None

    def __del__(self) -> None:
        # An exception may leave messages behind, which still arrive in their memory. gloo reports
        # their completion only to a wait.
        if not self.works or sys.is_finalizing():
            return
        abandoned = TorchRequest(self.works, self._memory)
        self.works = []
        threading.Thread(target=_outlive, args=(abandoned,), daemon=True).start()


def _outlive(request: TorchRequest) -> None:
    """Wait for an abandoned request, in a thread, to keep its memory until it is complete."""
    with suppress(RuntimeError):
        request.wait()
    request.works = []


class TorchTransport:
    """A carrier between hosts by gloo; see `Transport`. All ranks of `comm` make it together.

    Its process groups meet over `store`, which is None for a single rank.
    """

    name, ordered = "torch", False
    _library = "gloo"

    def __init__(self, comm: Communicator, store: Store | None):
        self._store, self._rank = store, comm.rank
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
        self.next_tag, self.empty = Tags().next, BufferPool().empty
        self._messages: ProcessGroup = self._group_of(comm) if comm.size > 1 else None

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        receives, sends = self._to_others(arriving, leaving)
        group, works = self._messages, list[Any]()
        under_way = TorchRequest(works, (arriving, leaving))
        try:
            for rank, message in receives:
                works.append(group.recv([message], rank, tag))
            for rank, message in sends:
                works.append(group.send([message], rank, tag))
        except RuntimeError as error:
            raise explained(error) from error
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
        """Start a collective of a process group with these arguments, and return its request."""
        given = [lent(a) if isinstance(a, Tensor) else a for a in arguments]
        return TorchRequest([start(collective, *given)], arguments)

    def _to_others(
        self, arriving: Sequence[Message], leaving: Sequence[Message]
    ) -> tuple[list[Message], list[Message]]:
        """Copy the messages of this rank to itself; return all others, as bytes.

        The result has the messages that arrive from other ranks, and those that leave for them.
        """
        _copy_own(self._rank, arriving, leaving)
        arriving, leaving = (
            [(r, _bytes(t)) for r, t in messages if r != self._rank and t.numel()]
            for messages in (arriving, leaving)
        )
        return arriving, leaving

    def _group_of(self, comm: Communicator) -> ProcessGroup:
        """Return the process group for `comm`, whose ranks make it together at the first call."""
        if isinstance(comm, TorchCommunicator):
            return comm.group
        return self._made(comm, lambda name: gloo_group(self._store, name, comm.rank, comm.size))

    def _made(self, comm: Communicator, make: Callable[[str], ProcessGroup]) -> ProcessGroup:
        key = comm.purpose, comm.ranks
        if key not in self._groups:
            self._groups[key] = make(group_name(*key))
        return self._groups[key]


class TorchStreamTransport(TorchTransport):
    """A carrier between accelerators that each belong to one rank; see `StreamTransport`.

    A message that takes longer than `limit` is an error. All messages of the process start on the
    stream `side`.
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
        """Raise RuntimeError if a thread of torch has found an error of NCCL, or its like.

        torch ends the process some time later.
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
        """Start a collective on the side stream, after all work queued on the current stream."""
        self._side.follow()
        with using(self._side.stream):
            start(collective, *arguments).wait()
        return self._side.mark(a for a in arguments if isinstance(a, Tensor))

    def _group_of(self, comm: Communicator) -> ProcessGroup:
        """Return the process group for `comm`, whose ranks make it together at the first call.

        A first all-reduce connects all its ranks; a first batch of messages would connect only
        some.
        """

        def make(name: str) -> ProcessGroup:
            store = prefixed(f"{self.device.type} {name}", self._store)
            group = make_group(store, comm.rank, comm.size, self.device, self._limit)
            self._started(group.allreduce, torch.zeros(1, device=self.device)).wait()
            return group

        return self._made(comm, make)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a vector of bytes."""
    # A single element is contiguous whatever its stride, which a view would keep.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copy_own(rank: int, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
    """Copy the messages that rank `rank`, this one, sends to itself."""
    into = [tensor for other, tensor in arriving if other == rank]
    own = [tensor for other, tensor in leaving if other == rank]
    for target, source in zip(into, own, strict=True):
        _bytes(target).copy_(_bytes(source))
