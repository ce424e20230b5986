"""Links: messages between two ranks at any time, over TCP, for training with servers.

In an exchange of a `Transport` all ranks of a grid take part. A link sends requests and answers
between a server and a client, while other ranks compute. When a process ends, the other ends of its
links get an error at once; TCP's keepalive notices a lost machine.
"""

from __future__ import annotations

import secrets
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.transport.interface import ObjectCommunicator

_NUMBERS = 6
"""The number of integers before the bytes of each message."""
_HEAD = struct.Struct(f"<{_NUMBERS + 1}q")

_GREETING = struct.Struct("<32sq")
"""The first bytes on a connection: the secret token of the called rank, and the caller's rank."""
_GREETED = 5.0
"""The time limit of a greeting in seconds: a process that is no rank may never send a greeting."""

LOOPBACK = "127.0.0.1"
"""The address that only processes of the same host can reach."""

_QUIET, _PROBES = 60, 5
"""Seconds without a message after which TCP probes the other machine, and the number of probes
before it gives up."""


class LinkLost(ConnectionError):
    """Raised if the rank at the other end of a link has ended, or cannot be reached."""


class LinkSilent(LinkLost):
    """Raised if the rank at the other end of a link does not send or receive in the time limit."""


class LinkMessage(NamedTuple):
    """A message of a link: six integers, and a payload of bytes, a uint8 tensor on the CPU."""

    numbers: tuple[int, ...]
    payload: Tensor


def message(numbers: Sequence[int], payload: Tensor | None = None) -> LinkMessage:
    """Return a message of at most six integers and a `payload`, a uint8 tensor on the CPU."""
    filled = (*numbers, *(0,) * (_NUMBERS - len(numbers)))
    return LinkMessage(filled, torch.empty(0, dtype=torch.uint8) if payload is None else payload)


class Link:
    """This rank's end of a link to the rank `peer`. Messages arrive complete and in order."""

    def __init__(self, peer: int, connection: socket.socket):
        self.peer, self._connection = peer, connection
        self._leaving: deque[memoryview] = deque()
        self._head = bytearray(_HEAD.size)
        self._numbers: tuple[int, ...] | None = None
        self._payload = torch.empty(0, dtype=torch.uint8)
        self._missing = memoryview(self._head)
        connection.setblocking(False)

    def send(self, message: LinkMessage) -> None:
        """Start to send a message, whose payload must not change until sent. Raises LinkLost."""
        head = _HEAD.pack(*message.numbers, message.payload.numel())
        self._leaving.append(memoryview(head))
        if message.payload.numel():
            self._leaving.append(_memory(message.payload))
        self._push()

    def poll(self) -> LinkMessage | None:
        """Return the next message if it has arrived, else None. Raises LinkLost.

        Also sends queued bytes, without blocking. If the connection is broken, the messages that
        arrived before, such as a message with the reason, are returned first.
        """
        lost = None
        try:
            self._push()
        except LinkLost as error:
            lost = error
        while self._missing:
            try:
                count = self._connection.recv_into(self._missing)
            except (BlockingIOError, InterruptedError):
                if lost is not None:
                    raise lost from None
                return None
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise self._lost("it has closed the connection")
            self._missing = self._missing[count:]
            if not self._missing and self._numbers is None:
                *numbers, size = _HEAD.unpack(self._head)
                try:
                    self._payload = torch.empty(size, dtype=torch.uint8)
                except RuntimeError as error:
                    raise self._lost(f"it announces a message of {size} bytes") from error
                self._numbers, self._missing = tuple(numbers), _memory(self._payload)
        assert self._numbers is not None
        arrived = LinkMessage(self._numbers, self._payload)
        self._numbers, self._missing = None, memoryview(self._head)
        return arrived

    def receive(self, until: float) -> LinkMessage:
        """Wait for the next message and return it. Raises LinkLost.

        Raises LinkSilent if no message has arrived by `until`, a time of `time.monotonic` in
        seconds, or inf.
        """
        while (arrived := self.poll()) is None:
            if time.monotonic() > until:
                raise LinkSilent(f"rank {self.peer} has not answered")
            rest([self])
        return arrived

    def flush(self, until: float) -> None:
        """Wait until all messages are sent. Raises LinkLost, also if a message arrives meanwhile.

        Raises LinkSilent if the other rank has not received enough by `until`, a time of
        `time.monotonic` in seconds.
        """
        while self._leaving:
            if self.poll() is not None:
                raise LinkLost(f"rank {self.peer} has sent an unexpected message")
            if time.monotonic() > until:
                raise LinkSilent(f"rank {self.peer} has not received a message")
            rest([self])

    def close(self) -> None:
        """Close the link, also for forks of this process. Messages not yet sent are lost."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def register(self, waiting: select.poll) -> None:
        """Register this link with a poll object, for data to read and, if needed, room to send."""
        events = select.POLLIN | select.POLLOUT if self._leaving else select.POLLIN
        waiting.register(self._connection, events)

    def _push(self) -> None:
        """Send queued bytes until the connection would block. Raises LinkLost."""
        try:
            while self._leaving:
                count = self._connection.send(self._leaving[0])
                self._leaving[0] = self._leaving[0][count:]
                if not self._leaving[0]:
                    self._leaving.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, why: object) -> LinkLost:
        return LinkLost(f"rank {self.peer} is lost: {why}")


def rest(links: Iterable[Link]) -> None:
    """Wait until one of `links` can receive or send, at most a tenth of a second."""
    waiting = select.poll()
    for link in links:
        link.register(waiting)
    waiting.poll(100)


def _memory(payload: Tensor) -> memoryview:
    of_bytes: Any = payload.numpy()
    return memoryview(of_bytes)


def open_links(
    comm: ObjectCommunicator, called: Sequence[int], calling: Sequence[int], limit: float
) -> dict[int, Link]:
    """Return a link to each rank in `called` and `calling`, by rank. Collective over `comm`.

    This rank connects to the ranks `called`, and waits `limit` seconds for the ranks `calling` to
    connect. If a rank does not connect in time, every use of its link raises LinkLost. Raises
    LinkLost if a rank in `called` cannot be reached.
    """
    limit = min(limit, 1e7)  # sockets accept no infinite time limit
    token = secrets.token_hex(16)
    hosts = comm.allgather(socket.gethostname())
    here = hosts[comm.rank]
    from_here = all(hosts[peer] == here for peer in calling)
    own = LOOPBACK if from_here else ""
    listener = socket.create_server((own, 0), backlog=socket.SOMAXCONN) if calling else None
    port = None if listener is None else listener.getsockname()[1]
    places = comm.allgather((port, token))
    connections: dict[int, socket.socket] = {}
    for peer in called:
        there, theirs = places[peer]
        address = LOOPBACK if hosts[peer] == here else hosts[peer], there
        try:
            connections[peer] = socket.create_connection(address, limit)
            connections[peer].sendall(_GREETING.pack(theirs.encode(), comm.rank))
        except OSError as error:
            raise LinkLost(f"rank {peer} cannot be reached: {error}") from error
    if listener is not None:
        with listener:
            connections |= _accepted(listener, token, calling, limit)
    for connection in connections.values():
        _prepare(connection)
    unconnected = [peer for peer in calling if peer not in connections]
    connections |= {peer: socket.socket() for peer in unconnected}
    return {peer: Link(peer, connection) for peer, connection in connections.items()}


def _accepted(
    listener: socket.socket, token: str, calling: Sequence[int], limit: float
) -> dict[int, socket.socket]:
    """Return the connections of those ranks in `calling` that connect in `limit` seconds, by rank.

    Greetings of several callers are received at the same time. The connection of a caller without
    the right `token`, or without a complete greeting in 5 seconds, is closed.
    """
    found: dict[int, socket.socket] = {}
    greetings: dict[socket.socket, _Greeting] = {}
    until = time.monotonic() + limit
    listener.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        while len(found) < len(calling) and (now := time.monotonic()) < until:
            for key, _ in waiting.select(min(until - now, _GREETED / 5)):
                caller: Any = key.fileobj
                if caller is listener:
                    with suppress(OSError):  # the caller may have disconnected
                        caller, _ = listener.accept()
                        caller.setblocking(False)
                        greetings[caller] = _Greeting(time.monotonic() + _GREETED)
                        waiting.register(caller, selectors.EVENT_READ)
                elif greetings[caller].is_whole(caller):
                    waiting.unregister(caller)
                    said, rank = _GREETING.unpack(greetings.pop(caller).said)
                    if said == token.encode() and rank in calling:
                        found[rank] = caller
                    else:
                        caller.close()
            for caller in [c for c, g in greetings.items() if time.monotonic() > g.until]:
                waiting.unregister(caller)
                greetings.pop(caller)
                caller.close()
    for caller in greetings:
        caller.close()
    return found


class _Greeting:
    """The received part of a caller's greeting, which must be complete at the time `until`.

    `until` is a time of `time.monotonic` in seconds.
    """

    def __init__(self, until: float):
        self.until, self.said = until, b""

    def is_whole(self, caller: socket.socket) -> bool:
        """Receive further bytes, and return whether the greeting is complete.

        If the caller has disconnected, the time limit ends at once.
        """
        more = b""
        with suppress(OSError):
            more = caller.recv(_GREETING.size - len(self.said))
        self.said += more
        self.until = self.until if more else 0.0
        return len(self.said) == _GREETING.size


def _prepare(connection: socket.socket) -> None:
    """Configure a TCP connection to send without delay and to notice a lost machine."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUIET // _PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
