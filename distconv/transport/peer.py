"""Transport between GPUs of a node: ranks write into each other's memory, which CUDA IPC shares.

The host gives copies and waits to a stream, and goes on: a step has no host synchronisation, needs
no library for messages, and can be captured as a graph of CUDA. Other ranks than those of the node
are reached by another transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from distconv.transport import ipc
from distconv.transport.interface import SUM_TYPES, Message, Request, Transport
from distconv.transport.mailboxes import Mailboxes, OrderedCopies, initial_semaphores, mailbox_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

_AT_ONCE = 2**16
"""Bytes up to which a sum is made of all tensors on every rank, instead of a part on each."""


def why_unavailable() -> str | None:
    """Return why this process cannot use CUDA IPC; None where it can."""
    try:
        from cupy.cuda import runtime  # noqa: F401
    except ImportError as error:
        return f"cupy is missing ({error}); install cupy-cuda12x or cupy-cuda13x"
    return None


class OrderedStream(OrderedCopies, Protocol):
    """A stream on which a rank copies, computes and waits in order, as a `PeerStream`."""

    def follow(self) -> None:
        """Go on after all that the current stream has been given so far."""

    def run(self, work: Callable[[], object]) -> None:
        """Compute with tensors."""

    def mark(self, tensors: Iterable[Tensor]) -> Request:
        """Return a request for all that this stream has been given so far, which uses `tensors`."""


class _Requests:
    """Several requests as one, or none."""

    def __init__(self, *requests: Request):
        self._requests = requests

    def wait(self) -> None:
        for request in self._requests:
            request.wait()


class PeerTransport:
    """Messages between ranks that reach each other's memory; see `Transport`.

    Parameters
    ----------
    comm: the ranks.
    reached: for each rank the ranks whose memory it has been given, itself among them. Two ranks
        write to each other where each has been given the other's memory.
    node: the numbers by which `boxes` knows the ranks of this node.
    lane, boxes: the stream that works in order, and the memory in which messages arrive.
    beyond: the transport of messages and reductions between other ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        reached: Sequence[frozenset[int]],
        node: Mapping[int, int],
        lane: OrderedStream,
        boxes: Mailboxes,
        beyond: Transport,
    ):
        self._comm, self._node = comm, node
        self._lane, self._boxes, self._beyond = lane, boxes, beyond
        self._peers = [
            frozenset(other for other in others if rank in reached[other])
            for rank, others in enumerate(reached)
        ]
        self._groups: dict[int, list[int]] = {}
        everywhere = all(len(peers) == comm.size for peers in self._peers)
        self.name = "peer" if everywhere else f"peer and {beyond.name}"

    def next_tag(self) -> int:
        """Return the tag of the next exchange, for messages that go beyond the node."""
        return self._beyond.next_tag()

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory for a message; torch keeps enough of it for later."""
        return like.new_empty(shape)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange."""
        near = self._near(arriving), self._near(leaving)
        if len(near[0]) == len(arriving) and len(near[1]) == len(leaving):
            return self._exchange(*near)
        far = self._far(arriving), self._far(leaving)
        return _Requests(self._beyond.exchange(*far, tag), self._exchange(*near))

    def all_reduce(self, tensor: Tensor, group: MPI.Intracomm) -> Request:
        """Start adding up a tensor in place over the ranks of `group`; to the same bits on all.

        Every rank adds up one part and sends it to all ranks; of a small tensor, each rank adds up
        all.
        """
        ranks = self._members(group)
        if len(ranks) == 1:
            return _Requests()
        if not self._all_near(ranks):
            return self._beyond.all_reduce(tensor, group)
        total = tensor.to(SUM_TYPES.get(tensor.dtype, tensor.dtype))
        flat, n = total.view(-1), len(ranks)
        whole = flat.nbytes <= _AT_ONCE
        parts = [flat] * n if whole else flat.tensor_split(n)
        mine = parts[group.rank]
        each = mine.new_empty((n, mine.numel()))
        self._lane.follow()
        self._move(zip(ranks, each, strict=True), zip(ranks, parts, strict=True))
        self._lane.run(lambda: torch.sum(each, 0, dtype=mine.dtype, out=mine))
        if not whole:
            others = [i for i in range(n) if i != group.rank]
            self._move([(ranks[i], parts[i]) for i in others], [(ranks[i], mine) for i in others])
        if total is not tensor:
            self._lane.run(lambda: tensor.copy_(total))
        return self._lane.mark([tensor, total, each])

    def all_gather(self, tensor: Tensor, group: MPI.Intracomm) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        ranks = self._members(group)
        if not self._all_near(ranks):
            return self._beyond.all_gather(tensor, group)
        gathered = tensor.new_empty((len(ranks), *tensor.shape))
        messages = list(zip(ranks, gathered, strict=True)), [(rank, tensor) for rank in ranks]
        self.exchange(*messages, 0).wait()
        return gathered

    def broadcast(self, tensor: Tensor, group: MPI.Intracomm) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        ranks = self._members(group)
        if not self._all_near(ranks):
            self._beyond.broadcast(tensor, group)
        elif group.rank:
            self.exchange([(ranks[0], tensor)], (), 0).wait()
        else:
            self.exchange((), [(rank, tensor) for rank in ranks[1:]], 0).wait()

    def _exchange(self, arriving: Sequence[Message], leaving: Sequence[Message]) -> Request:
        if not (arriving or leaving):
            return _Requests()
        self._lane.follow()
        self._boxes.exchange(arriving, leaving)
        return self._lane.mark(tensor for _, tensor in (*arriving, *leaving))

    def _move(self, arriving: Iterable[Message], leaving: Iterable[Message]) -> None:
        self._boxes.exchange(self._near(arriving), self._near(leaving))

    def _near(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages within the node, with the numbers that ranks have there."""
        return [(self._node[rank], tensor) for rank, tensor in messages if self._is_near(rank)]

    def _far(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages that go beyond the node."""
        return [message for message in messages if not self._is_near(message[0])]

    def _is_near(self, rank: int) -> bool:
        return rank in self._peers[self._comm.rank]

    def _all_near(self, ranks: Sequence[int]) -> bool:
        """Return whether all ranks of a group reach each other, which all of them know."""
        return all(self._peers[rank].issuperset(ranks) for rank in ranks)

    def _members(self, group: MPI.Intracomm) -> list[int]:
        """Return the ranks of a group, by their numbers in this transport."""
        if group.handle not in self._groups:
            from mpi4py import MPI

            ranks = MPI.Group.Translate_ranks(group.group, None, self._comm.group)
            self._groups[group.handle] = list(ranks)
        return self._groups[group.handle]


def connect(comm: MPI.Intracomm, device: torch.device, beyond: Transport) -> PeerTransport:
    """Return the transport of the ranks of `comm`, on each one's current GPU; all call it."""
    from mpi4py import MPI

    from distconv.transport.peer_stream import PeerStream

    node: Any = comm.Split_type(MPI.COMM_TYPE_SHARED)
    places = node.allgather(comm.rank)
    bases = ipc.share_memory(node, mailbox_bytes(node.size), initial_semaphores(node.size))
    near = {rank: i for i, (rank, base) in enumerate(zip(places, bases, strict=True)) if base}
    reached = comm.allgather(frozenset(near))
    lane = PeerStream(device)
    boxes = Mailboxes(lane, bases, node.rank)
    node.Free()
    return PeerTransport(comm, reached, near, lane, boxes, beyond)
