"""Messages between ranks that can write to each other's memory: slots, and who may use them when.

Every rank has memory that all ranks of its node reach. For each of them it holds `SLOTS` slots, to
which that rank writes messages by turns, and two semaphores for each slot:

- `FULL`, in the receiver's memory: a message is there;
- `FREE`, in the sender's memory: the message before has been read.

So a rank waits for its own memory alone, and a fast neighbour overwrites nothing that is unread. A
message that is longer than a slot travels in pieces, and an exchange in rounds: a rank first sends
at most one piece to each other rank, then receives at most one from each. To send a piece waits for
what the receiver has done in earlier rounds alone, and to receive it for what the sender does first
in this round. So nobody waits in a circle, even where a GPU works off in one sequence what it is
given on all streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

from distconv.transport.interface import Message

SLOT = 4 * 2**20
"""Bytes of a slot."""
SLOTS = 2
FULL, FREE = range(2)
_SEMAPHORE = 4
_HEAD = 2**16
"""Bytes before the slots, of which semaphores take what they need."""

Chunk = tuple[int, int]
"""An address, and a number of bytes."""


class OrderedCopies(Protocol):
    """Copies and semaphores that are worked off in order, as by `peer_stream.PeerStream`."""

    def acquire(self, semaphore: int) -> None:
        """Wait until the semaphore at an address is released, and take it."""

    def release(self, semaphore: int) -> None:
        """Release the semaphore at an address."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes between addresses."""


def mailbox_bytes(ranks: int, slot: int = SLOT) -> int:
    """Return the bytes of a rank's memory on a node with this number of ranks."""
    return _HEAD + ranks * SLOTS * slot


def initial_semaphores(ranks: int) -> list[int]:
    """Return the numbers with which the memory begins before anything is sent: all slots free."""
    return [int(what == FREE) for _ in range(ranks * SLOTS) for what in (FULL, FREE)]


class Mailboxes:
    """The mailboxes of the ranks of a node, as one of these ranks sees them.

    Parameters
    ----------
    bases: for each rank of the node, the address of its memory in this process; None where it
        cannot be reached.
    mine: this rank's number among them.
    slot: bytes of a slot, the same everywhere.
    """

    def __init__(
        self, lane: OrderedCopies, bases: Sequence[int | None], mine: int, slot: int = SLOT
    ):
        assert len(initial_semaphores(len(bases))) * _SEMAPHORE <= _HEAD
        self._lane, self._bases, self._mine, self._slot = lane, bases, mine, slot
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)

    def exchange(self, arriving: Iterable[Message], leaving: Iterable[Message]) -> None:
        """Move contiguous tensors; tensors for one rank arrive there in the order in which they
        leave.

        A tensor that this rank sends to itself is copied.
        """
        out, into = self._chunks(leaving), self._chunks(arriving)
        for (source, nbytes), (target, _) in zip(
            out.pop(self._mine, ()), into.pop(self._mine, ()), strict=True
        ):
            self._lane.copy(target, source, nbytes)
        for leave, arrive in zip_longest(_rounds(out), _rounds(into), fillvalue=()):
            for rank, (source, nbytes) in leave:
                self._send(rank, source, nbytes)
            for rank, (target, nbytes) in arrive:
                self._receive(rank, target, nbytes)

    def _send(self, rank: int, source: int, nbytes: int) -> None:
        turn = self._sent[rank] % SLOTS
        self._sent[rank] += 1
        self._lane.acquire(self._semaphore(self._mine, rank, turn, FREE))
        self._lane.copy(self._place(rank, self._mine, turn), source, nbytes)
        self._lane.release(self._semaphore(rank, self._mine, turn, FULL))

    def _receive(self, rank: int, target: int, nbytes: int) -> None:
        turn = self._received[rank] % SLOTS
        self._received[rank] += 1
        self._lane.acquire(self._semaphore(self._mine, rank, turn, FULL))
        self._lane.copy(target, self._place(self._mine, rank, turn), nbytes)
        self._lane.release(self._semaphore(rank, self._mine, turn, FREE))

    def _chunks(self, messages: Iterable[Message]) -> dict[int, list[Chunk]]:
        """Return the pieces of the messages for each rank, or from each."""
        pieces: dict[int, list[Chunk]] = defaultdict(list)
        for rank, tensor in messages:
            address, nbytes = tensor.data_ptr(), tensor.nbytes
            pieces[rank] += [
                (address + start, min(self._slot, nbytes - start))
                for start in range(0, nbytes, self._slot)
            ]
        return pieces

    def _semaphore(self, owner: int, other: int, turn: int, what: int) -> int:
        """Return the address, in `owner`'s memory, of a semaphore of a slot shared with `other`."""
        return self._base(owner) + _SEMAPHORE * (2 * (SLOTS * other + turn) + what)

    def _place(self, owner: int, sender: int, turn: int) -> int:
        """Return the address, in `owner`'s memory, of a slot for messages of `sender`."""
        return self._base(owner) + _HEAD + self._slot * (SLOTS * sender + turn)

    def _base(self, rank: int) -> int:
        base = self._bases[rank]
        assert base is not None, f"rank {rank} of the node is out of reach"
        return base


def _rounds(pieces: Mapping[int, Sequence[Chunk]]) -> Iterable[list[tuple[int, Chunk]]]:
    """Yield the pieces of each round: at most one of each rank."""
    for number in range(max(map(len, pieces.values()), default=0)):
        yield [(rank, each[number]) for rank, each in pieces.items() if number < len(each)]
