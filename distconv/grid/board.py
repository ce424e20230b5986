"""A board on which the watching threads of all ranks leave notes for each other.

The ranks form a tree: each has a link to the rank above it, and rank 0 keeps the notes. Notes and
questions go up the tree, and answers come down. Nothing else is sent. A call waits at most some
seconds for a rank that has stopped.
"""

from __future__ import annotations

import json
import math
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from distconv.transport.interface import ObjectCommunicator
from distconv.transport.link import Link, LinkLost, LinkMessage, message, open_links

ALARM, LEFT = "alarm", "left"
"""The counters of ranks that raise the alarm, and of ranks whose programs have ended. The first
alarm, and the last end, are announced to all ranks."""

_FANOUT = 64
"""The number of ranks of a group, of groups of a larger group, and so on; the first rank of a group
is above the others. The tree of 65,536 ranks has three levels, and rank 0 has 141 links."""

_ANSWER = 5.0
"""Seconds that the rank above has for an answer; after them it counts as lost."""

_FAREWELL = 5.0
"""Seconds that the ranks below have to close their links, at the end of their programs."""

_REACH = 20.0
"""Seconds allowed for the links to be made."""


def above(rank: int) -> int:
    """Return the rank above `rank`, which is not 0: its last digit to the base 64 replaced by 0."""
    place = 1
    while rank // place % _FANOUT == 0:
        place *= _FANOUT
    return rank - rank // place % _FANOUT * place


def below(rank: int, size: int) -> Iterator[int]:
    """Yield the ranks, of `size` ranks in all, whose rank `above` is `rank`."""
    place = 1
    while place < size and rank % (place * _FANOUT) == 0:
        yield from range(rank + place, min(rank + place * _FANOUT, size), place)
        place *= _FANOUT


def open_board(comm: ObjectCommunicator) -> Board:
    """Return a board of the ranks of `comm`, which all call it.

    A rank that cannot reach the rank above it prints so, and has a board without the others.
    """
    up = [above(comm.rank)] if comm.rank else []
    try:
        links = open_links(comm, up, [*below(comm.rank, comm.size)], _REACH)
    except LinkLost as error:
        print(
            f"distconv: the watching thread of rank {comm.rank} cannot reach the other ranks: "
            f"{error}. If this rank waits too long, its report will not show where other ranks "
            "are; open the ports between the nodes",
            file=sys.stderr,
            flush=True,
        )
        return Board()
    return Board(comm.rank, comm.size, links)


class Board:
    """Notes of all ranks, kept by rank 0; one thread of a rank calls the methods, but for `wake`.

    `links` has the links to the ranks `above` and `below`. A board without them has no notes.

    Attributes
    ----------
    announced: the counters, `ALARM` or `LEFT`, that have been announced to all ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1, links: Mapping[int, Link] | None = None):
        self._size = size
        self._down = dict(links or {})
        self._up = self._down.pop(above(rank)) if rank else None
        self._notes: dict[str, Any] | None = {} if links and not rank else None
        self._asking: deque[Link | None] = deque()
        """Who waits for an answer from above, in order: a rank below, or this rank for None."""
        self._answers: deque[Any] = deque()
        self._parted = False
        """Whether a rank below has been lost, whose last note may not arrive."""
        self._woken, self._waker = socket.socketpair()
        self.announced: set[str] = set()

    @property
    def reaches(self) -> bool:
        """Return whether notes of other ranks can be read."""
        return self._up is not None or self._notes is not None

    def post(self, key: str, value: Any) -> None:
        """Leave a note, a value for JSON, under the name `key`."""
        self._ask("post", key, value)

    def add(self, key: str) -> int | None:
        """Add 1 to a counter, and return it; None if the others cannot be reached."""
        count = self._ask("add", key)
        return count if isinstance(count, int) else None

    def read(self, keys: Sequence[str]) -> list[Any]:
        """Return the notes of these names, None for one that is not there or cannot be read."""
        notes = self._ask("read", keys)
        found = isinstance(notes, list) and len(notes) == len(keys)
        return notes if found else [None] * len(keys)

    def serve(self, seconds: float) -> None:
        """Pass messages on for at most `seconds`; return earlier after a message or a wake-up."""
        waiting = select.poll()
        waiting.register(self._woken, select.POLLIN)
        links = self._links()
        for link in links:
            link.register(waiting)
        try:
            ready = waiting.poll(1000 * max(seconds, 0.0))
            if any(number == self._woken.fileno() for number, _ in ready):
                self._woken.recv(1)
        except OSError:
            # The program has closed a file of a link, or its limit forbids to wait for files.
            time.sleep(min(max(seconds, 0.0), 1.0))
            for link in links:
                self._lose(link)
            return
        for link in links:
            while self._handle_message(link):
                pass

    def wake(self) -> None:
        """End the present call of `serve`, or the next one. Any thread may call it."""
        with suppress(OSError):  # which has been closed
            self._waker.send(b"x")

    def close(self) -> None:
        """Wait until the programs of all ranks have ended, or cannot be reached; close all links.

        The ranks below close theirs first. If one of them has been lost, nobody can count all ranks
        that have ended, and the wait takes five seconds.
        """
        until = math.inf
        while self.reaches and LEFT not in self.announced and time.monotonic() < until:
            if self._parted:
                until = min(until, time.monotonic() + _FAREWELL)
            self.serve(1.0)
        until = time.monotonic() + _FAREWELL
        while self._down and time.monotonic() < until:
            self.serve(0.1)
        for link in self._links():
            link.close()
        self._woken.close()
        self._waker.close()

    def _links(self) -> list[Link]:
        return [*self._down.values(), *([] if self._up is None else [self._up])]

    def _ask(self, kind: str, key: Any, value: Any = None) -> Any:
        """Handle this rank's own request; return the answer, or None, also if none comes in time.

        Posts have no answer.
        """
        if self._notes is not None:
            return self._kept(kind, key, value)
        if self._up is None:
            return None
        if kind != "post":
            self._asking.append(None)
        self._send(self._up, _request(kind, key, value))
        until = time.monotonic() + _ANSWER
        while kind != "post" and not self._answers:
            if time.monotonic() > until:
                self._lose(self._up)
            else:
                self.serve(0.1)
        return self._answers.popleft() if self._answers else None

    def _kept(self, kind: str, key: Any, value: Any) -> Any:
        """Handle a request where the notes are kept, and return its answer."""
        notes = self._notes
        assert notes is not None
        if kind == "read":
            return [notes.get(one) for one in key]
        notes[key] = count = value if kind == "post" else notes.get(key, 0) + 1
        if (kind, key) == ("add", ALARM) or (key, count) == (LEFT, self._size):
            self._announce(key)
        return count

    def _handle_message(self, link: Link) -> bool:
        """Handle a message of a link, and return whether one had come.

        A message that is none of a board's is ignored.
        """
        try:
            arrived = link.poll()
        except LinkLost:
            self._lose(link)
            return False
        if arrived is None:
            return False
        # A value of an unexpected kind fails in one of these ways.
        with suppress(ValueError, TypeError, IndexError):
            kind, key, value = json.loads(bytes(arrived.payload.numpy()))
            if link is not self._up:
                self._pass_up(link, kind, key, value, arrived)
            elif kind == "announce":
                self._announce(key)
            elif kind == "answer":
                self._answer(self._asking.popleft(), value)
        return True

    def _pass_up(self, link: Link, kind: str, key: Any, value: Any, arrived: LinkMessage) -> None:
        """Handle the request of a rank below."""
        if self._notes is not None:
            answer = self._kept(kind, key, value)
        elif self._up is not None:
            if kind != "post":
                self._asking.append(link)
            self._send(self._up, arrived)
            return
        else:
            answer = None
        if kind != "post":
            self._answer(link, answer)

    def _answer(self, asking: Link | None, value: Any) -> None:
        if asking is None:
            self._answers.append(value)
        else:
            self._send(asking, _request("answer", None, value))

    def _announce(self, key: str) -> None:
        """Announce a counter to this rank and all below it."""
        self.announced.add(key)
        for link in list(self._down.values()):
            self._send(link, _request("announce", key))

    def _send(self, link: Link, request: LinkMessage) -> None:
        try:
            link.send(request)
        except LinkLost:
            self._lose(link)

    def _lose(self, link: Link | None) -> None:
        """Close a link. Without the one above, all ranks that wait for an answer get None."""
        if link is None:
            return
        link.close()
        if link is self._up:
            self._up = None
            while self._asking:
                self._answer(self._asking.popleft(), None)
        elif self._down.pop(link.peer, None) is not None:
            self._parted = True


def _request(kind: str, key: Any, value: Any = None) -> LinkMessage:
    text = json.dumps((kind, key, value))
    return message((), torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
