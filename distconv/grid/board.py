"""A store of notes and counters on rank 0, through which the watching threads of ranks communicate.

The ranks form a tree: each rank has a link to its parent in the tree, and rank 0 is the root. Notes
and requests are sent up the tree, answers and announcements down. A call waits at most some seconds
for a rank that has stopped.
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
"""The names of two counters: ranks that have raised the alarm, and ranks whose programs have ended.
All ranks are informed of the first alarm, and of the end of the last program."""

_FANOUT = 64
"""The number of ranks in a group, of groups in a larger group, and so on. The first rank of a group
is the parent of the others. The tree of 65,536 ranks has three levels, and rank 0 has 141 links."""

_ANSWER = 5.0
"""Seconds allowed for an answer of the parent rank, which counts as lost afterwards."""

_FAREWELL = 5.0
"""Seconds allowed for the child ranks to close their links, at the end of their programs."""

_REACH = 20.0
"""Seconds allowed for opening the links."""


def above(rank: int) -> int:
    """Return the parent of `rank` in the tree; `rank` must not be 0.

    The parent has 0 in place of the last digit of `rank` to the base 64 that is not 0.
    """
    place = 1
    while rank // place % _FANOUT == 0:
        place *= _FANOUT
    return rank - rank // place % _FANOUT * place


def below(rank: int, size: int) -> Iterator[int]:
    """Yield the children of `rank` in the tree of `size` ranks."""
    place = 1
    while place < size and rank % (place * _FANOUT) == 0:
        yield from range(rank + place, min(rank + place * _FANOUT, size), place)
        place *= _FANOUT


def open_board(comm: ObjectCommunicator) -> Board:
    """Return a board that connects the ranks of `comm`. Collective.

    A rank that cannot connect to its parent prints a warning, and gets a board without other ranks.
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
    """One rank's access to the notes and counters that rank 0 keeps for `size` ranks.

    `links` has the links to parent and children in the tree, by rank; a board without links has no
    notes. Only one thread of a rank may call the methods, except for `wake`.

    Attributes
    ----------
    announced: the counters, `ALARM` or `LEFT`, that rank 0 has announced to all ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1, links: Mapping[int, Link] | None = None):
        self._size = size
        self._down = dict(links or {})
        self._up = self._down.pop(above(rank)) if rank else None
        self._notes: dict[str, Any] | None = {} if links and not rank else None
        self._asking: deque[Link | None] = deque()
        """The links of child ranks that wait for an answer of the parent, in order of the requests;
        None for a request of this rank."""
        self._answers: deque[Any] = deque()
        self._lost_child = False
        """Whether the link to a child rank has been lost, whose last note may be missing."""
        self._woken, self._waker = socket.socketpair()
        self.announced: set[str] = set()

    @property
    def reaches(self) -> bool:
        """Return whether notes of other ranks can be read."""
        return self._up is not None or self._notes is not None

    def post(self, key: str, value: Any) -> None:
        """Store `value`, which JSON can represent, on rank 0 under the name `key`."""
        self._ask("post", key, value)

    def add(self, key: str) -> int | None:
        """Add 1 to the counter `key`, and return its value; None if rank 0 cannot be reached."""
        count = self._ask("add", key)
        return count if isinstance(count, int) else None

    def read(self, keys: Sequence[str]) -> list[Any]:
        """Return the values stored under the names `keys`; None for a missing value.

        All are None if rank 0 cannot be reached.
        """
        notes = self._ask("read", keys)
        found = isinstance(notes, list) and len(notes) == len(keys)
        return notes if found else [None] * len(keys)

    def serve(self, seconds: float) -> None:
        """Handle messages of other ranks for at most `seconds`.

        Return earlier after a message, or when another thread calls `wake`.
        """
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
            # The program has closed a link's file, or its limit of open files forbids polling.
            time.sleep(min(max(seconds, 0.0), 1.0))
            for link in links:
                self._lose(link)
            return
        for link in links:
            while self._handle_message(link):
                pass

    def wake(self) -> None:
        """End the running call of `serve`, or the next call. Any thread may call this method."""
        with suppress(OSError):  # the board has been closed
            self._waker.send(b"x")

    def close(self) -> None:
        """Wait until the programs of all ranks have ended, then close all links.

        The wait also ends if rank 0 cannot be reached. Child ranks close their links first. If the
        link to a child has been lost, some ends are never counted, and the wait lasts five seconds.
        """
        until = math.inf
        while self.reaches and LEFT not in self.announced and time.monotonic() < until:
            if self._lost_child:
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
        """Send a request of this rank to rank 0, and return the answer; rank 0 answers itself.

        `kind` is "post" to store `value` under the name `key`, "add" to add 1 to the counter `key`,
        or "read" to get the values under the names `key`. The answer is the new count or the list
        of values. Other ranks get None for a post, and if no answer arrives in time.
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
        """Handle a request on rank 0, which keeps the notes, and return the answer."""
        notes = self._notes
        assert notes is not None
        if kind == "read":
            return [notes.get(one) for one in key]
        notes[key] = count = value if kind == "post" else notes.get(key, 0) + 1
        if (kind, key) == ("add", ALARM) or (key, count) == (LEFT, self._size):
            self._announce(key)
        return count

    def _handle_message(self, link: Link) -> bool:
        """Handle the next message of `link`, and return whether a message had arrived.

        Messages in an unexpected format are ignored.
        """
        try:
            arrived = link.poll()
        except LinkLost:
            self._lose(link)
            return False
        if arrived is None:
            return False
        # Messages in an unexpected format raise one of these errors.
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
        """Handle a child's request: on rank 0 answer it, on other ranks forward it to the parent.

        `arrived` is the message that `link` has delivered; the other arguments are its contents.
        """
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
        """Announce the counter `key` on this rank and on all ranks below it in the tree."""
        self.announced.add(key)
        for link in list(self._down.values()):
            self._send(link, _request("announce", key))

    def _send(self, link: Link, request: LinkMessage) -> None:
        try:
            link.send(request)
        except LinkLost:
            self._lose(link)

    def _lose(self, link: Link | None) -> None:
        """Close a lost link. If it led to the parent, answer all waiting requests with None."""
        if link is None:
            return
        link.close()
        if link is self._up:
            self._up = None
            while self._asking:
                self._answer(self._asking.popleft(), None)
        elif self._down.pop(link.peer, None) is not None:
            self._lost_child = True


def _request(kind: str, key: Any, value: Any = None) -> LinkMessage:
    text = json.dumps((kind, key, value))
    return message((), torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
