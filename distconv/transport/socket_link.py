"""The links of a rank: by MPI's messages, or by TCP for ranks that meet over a store of torch.

The end of a process closes its links, so that the other end knows at once. A lost machine is
noticed by TCP's keepalive.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from distconv.transport.interface import Communicator
from distconv.transport.link import NUMBERS, Link, LinkLost, Message
from distconv.transport.torch_groups import TorchCommunicator

_HEAD = struct.Struct(f"<{NUMBERS + 1}q")
_GREETING = struct.Struct("<32sq")
"""The first bytes from a caller: the token of the listener, and the caller's rank."""

_QUIET, _PROBES = 60, 5
"""Seconds without a message after which TCP probes the other machine, and the number of probes
before it gives up."""


class Listener:
    """Accepts connections of other ranks, which find it by a note in a store."""

    def __init__(self, store: Any, rank: int):
        self._socket = socket.create_server(("", 0))
        self._socket.setblocking(False)
        self._token = secrets.token_hex(16)
        self._greeting: list[tuple[socket.socket, bytearray]] = []
        self._callers: dict[int, socket.socket] = {}
        where = socket.gethostname(), self._socket.getsockname()[1], self._token
        store.set(_note(rank), json.dumps(where))

    def caller(self, rank: int) -> socket.socket | None:
        """Return the connection of a rank that has called, once; None before."""
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._greeting.append((connection, bytearray()))
        waiting = []
        for connection, said in self._greeting:
            try:
                more = connection.recv(_GREETING.size - len(said))
            except BlockingIOError:
                waiting.append((connection, said))
                continue
            except OSError:
                more = b""
            said += more
            if more and len(said) < _GREETING.size:
                waiting.append((connection, said))
            elif more and (greeting := _GREETING.unpack(said))[0] == self._token.encode():
                self._callers[greeting[1]] = connection
            else:
                connection.close()  # a stranger, or already gone
        self._greeting = waiting
        return self._callers.pop(rank, None)


class SocketLink:
    """A link over one connection of TCP; see `Link`.

    Parameters
    ----------
    peer: the rank at the other end.
    limit: seconds allowed for connecting.
    listener: the listener of this rank, where the other one calls.
    store: the store with the other rank's listener, where this one calls.
    rank: the rank of this end.
    """

    def __init__(
        self,
        peer: int,
        limit: float,
        *,
        rank: int,
        listener: Listener | None = None,
        store: Any = None,
    ):
        self.peer = peer
        self._limit, self._until = limit, time.monotonic() + limit
        self._listener = listener
        self._leaving: deque[memoryview] = deque()
        self._head = bytearray(_HEAD.size)
        self._numbers: tuple[int, ...] | None = None
        self._payload = torch.empty(0, dtype=torch.uint8)
        self._missing = memoryview(self._head)
        self._connection = None if listener else _call(store, peer, rank, limit)
        if self._connection is not None:
            _prepare(self._connection)

    def send(self, message: Message) -> None:
        head = _HEAD.pack(*message.numbers, message.payload.numel())
        self._leaving.append(memoryview(head))
        if message.payload.numel():
            self._leaving.append(_memory(message.payload))
        self._push()

    def poll(self) -> Message | None:
        if not self._is_connected():
            return None
        self._push()
        while self._missing:
            try:
                count = self._socket.recv_into(self._missing)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise self._lost("it has closed the connection")
            self._missing = self._missing[count:]
            if not self._missing and self._numbers is None:
                *numbers, size = _HEAD.unpack(self._head)
                self._numbers = tuple(numbers)
                self._payload = torch.empty(size, dtype=torch.uint8)
                self._missing = _memory(self._payload)
        assert self._numbers is not None
        message = Message(self._numbers, self._payload)
        self._numbers, self._missing = None, memoryview(self._head)
        return message

    @property
    def idle(self) -> bool:
        return not self._leaving

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def _socket(self) -> socket.socket:
        assert self._connection is not None
        return self._connection

    def _is_connected(self) -> bool:
        if self._connection is None and self._listener is not None:
            self._connection = self._listener.caller(self.peer)
            if self._connection is not None:
                _prepare(self._connection)
            elif time.monotonic() > self._until:
                raise self._lost(f"it has not come within {self._limit:g} seconds")
        return self._connection is not None

    def _push(self) -> None:
        """Send as many bytes as the connection accepts now."""
        if not self._leaving or not self._is_connected():
            return
        try:
            while self._leaving:
                count = self._socket.send(self._leaving[0])
                self._leaving[0] = self._leaving[0][count:]
                if not self._leaving[0]:
                    self._leaving.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, why: object) -> LinkLost:
        return LinkLost(f"rank {self.peer} is lost: {why}")


def open_links(
    comm: Communicator, called: Iterable[int], calling: Iterable[int], limit: float
) -> dict[int, Link]:
    """Return a link for each rank that this one talks to. All ranks of `comm` call it.

    No rank waits for one that calls it: such a link is usable at once, and lost if nobody has
    called in time.

    Parameters
    ----------
    comm: all ranks of the job, with a purpose of its own.
    called: the ranks that this one calls, such as servers.
    calling: the ranks that call this one, such as clients.
    limit: seconds allowed for connecting.

    Raises
    ------
    LinkLost
        Where a rank that this one calls cannot be reached.
    """
    called, calling = list(called), list(calling)
    if not isinstance(comm, TorchCommunicator):
        from distconv.transport.mpi_link import MPILink  # which imports MPI

        of_mpi: Any = comm
        return {
            peer: MPILink(of_mpi.mpi, comm.ranks.index(peer), peer) for peer in (*called, *calling)
        }
    from torch.distributed import PrefixStore

    me = comm.ranks[comm.rank]
    store: Any = comm.store and PrefixStore(comm.purpose, comm.store)
    listener = Listener(store, me) if calling else None
    links: dict[int, Link] = {
        peer: SocketLink(peer, limit, rank=me, listener=listener) for peer in calling
    }
    for peer in called:
        links[peer] = SocketLink(peer, limit, rank=me, store=store)
    return links


def _memory(payload: Tensor) -> memoryview:
    of_bytes: Any = payload.numpy()
    return memoryview(of_bytes)


def _note(rank: int) -> str:
    return f"links of rank {rank}"


def _call(store: Any, peer: int, rank: int, limit: float) -> socket.socket:
    """Return a connection to the listener of a rank."""
    from datetime import timedelta

    try:
        # A store takes no infinite time.
        store.wait([_note(peer)], timedelta(seconds=min(limit, 1e7)))
        host, port, token = json.loads(store.get(_note(peer)))
        there = "localhost" if host == socket.gethostname() else host
        connection = socket.create_connection((there, port), min(limit, 1e7))
        connection.sendall(_GREETING.pack(token.encode(), rank))
    except (OSError, RuntimeError) as error:
        raise LinkLost(f"rank {peer} cannot be reached: {error}") from error
    return connection


def _prepare(connection: socket.socket) -> None:
    """Configure a connection: send at once, do not block, and notice a lost machine."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUIET // _PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
