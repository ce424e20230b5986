"""Links carry whole messages in order, and no wait at one end outlasts its limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.transport import link as transport_link
from distconv.transport.link import Link, LinkLost, LinkSilent, message, open_links

WORLD = MPI.COMM_WORLD
LARGE = torch.arange(64 * 2**20, dtype=torch.uint8)
"""More bytes than a connection takes before somebody receives them."""


def soon() -> float:
    return time.monotonic() + 0.2


def later() -> float:
    return time.monotonic() + 60


def test_waits_end() -> None:
    server, client = (
        Link(peer, end) for peer, end in zip((1, 0), socket.socketpair(), strict=True)
    )
    with pytest.raises(LinkSilent, match="rank 0 has not answered"):
        client.receive(soon())
    server.send(message((1, 2)))
    server.send(message((3,), LARGE))
    with pytest.raises(LinkSilent, match="rank 1 has not received a message"):
        server.flush(soon())
    assert client.receive(later()).numbers == (1, 2, 0, 0, 0, 0)
    arrived = None
    while arrived is None:
        server.poll()  # which continues to send
        arrived = client.poll()
    assert arrived.numbers[0] == 3 and torch.equal(arrived.payload, LARGE)
    server.flush(later())
    server.close()
    with pytest.raises(LinkLost, match="rank 0 is lost: it has closed the connection"):
        client.poll()


def test_the_last_message_of_a_rank_that_has_ended_can_be_read() -> None:
    server, client = (
        Link(peer, end) for peer, end in zip((1, 0), socket.socketpair(), strict=True)
    )
    server.send(message((7,)))
    server.close()
    with pytest.raises(LinkLost, match="rank 0 is lost"):
        client.send(message((1,)))
    assert client.receive(later()).numbers[0] == 7
    with pytest.raises(LinkLost, match="rank 0 is lost"):
        client.poll()
    client.close()


class Alone:
    """The communicator of two ranks, of which the other calls last, or not at all.

    `call(port, token)` stands for everybody who calls this rank.
    """

    rank, size = 0, 2

    def __init__(self, call: Callable[[int, str], object]):
        self.call = call

    def allgather(self, value: Any) -> list[Any]:
        if isinstance(value, tuple):
            self.call(*value)
        return [value, value]


def test_a_link_to_a_rank_that_does_not_call_is_lost_and_a_stranger_is_none() -> None:
    def call(port: int, _: str) -> None:
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1" + bytes(40))

    link = open_links(Alone(call), [], [1], 0.2)[1]
    with pytest.raises(LinkLost, match="rank 1 is lost"):
        link.poll()


def test_silent_strangers_do_not_keep_a_rank_from_calling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_link, "_GREETED", inf)
    callers = []

    def call(port: int, token: str) -> None:
        callers.extend(socket.create_connection(("localhost", port)) for _ in range(6))
        callers[2].sendall(b"half a greeting")
        callers.append(socket.create_connection(("localhost", port)))
        callers[-1].sendall(transport_link._GREETING.pack(token.encode(), 1))

    link = open_links(Alone(call), [], [1], 60)[1]
    assert link.poll() is None
    for caller in callers:
        caller.close()
    link.close()


def test_on_one_host_nobody_outside_can_call() -> None:
    def call(port: int, _: str) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port)).close()

    open_links(Alone(call), [], [1], 0.1)[1].close()


@pytest.mark.parametrize("size", [-5, 2**62])
def test_a_message_of_an_impossible_size_loses_the_link(size: int) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(transport_link._HEAD.pack(*range(6), size))
    with pytest.raises(LinkLost, match=f"rank 1 is lost: it announces a message of {size} bytes"):
        Link(1, ours).poll()
    ours.close()
    theirs.close()


@pytest.mark.parallel([3])
def test_each_rank_has_a_link_to_those_that_it_calls_and_that_call_it() -> None:
    above = [0] if WORLD.rank else []
    below = [] if WORLD.rank else [1, 2]
    links = open_links(WORLD, above, below, 60)
    for peer, link in links.items():
        link.send(message((WORLD.rank,)))
        assert link.receive(later()).numbers[0] == peer == link.peer
    WORLD.barrier()
    for link in links.values():
        link.close()
