"""Links carry whole messages in order, and no wait at one end outlasts its limit."""

from __future__ import annotations

import socket
import time

import pytest
import torch
from mpi4py import MPI

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
    with pytest.raises(LinkSilent, match="rank 1 has not taken what was sent"):
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


class Alone:
    """The communicator of two ranks, of which the other calls only if it has to."""

    rank, size = 0, 2

    def allgather(self, place: tuple[str, int, str]) -> list[object]:
        """Let a stranger call in place of the other rank, and leave."""
        with socket.create_connection(("localhost", place[1])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1" + bytes(40))
        return [place, None]


def test_a_link_to_a_rank_that_does_not_call_is_lost_and_a_stranger_is_none() -> None:
    link = open_links(Alone(), [], [1], 0.2)[1]  # type: ignore[arg-type]
    with pytest.raises(LinkLost, match="rank 1 is lost"):
        link.poll()


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
