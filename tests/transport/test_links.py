"""Links carry whole messages in order, and no wait at one end outlasts its limit."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from torch.distributed import HashStore

from distconv.transport.link import Link, LinkSilent, flush, message, receive
from distconv.transport.mpi_link import MPILink
from distconv.transport.socket_link import Listener, SocketLink

WORLD = MPI.COMM_WORLD
LARGE = torch.arange(64 * 2**20, dtype=torch.uint8)
"""More bytes than a carrier takes before somebody receives them."""


def soon() -> float:
    return time.monotonic() + 0.2


def later() -> float:
    return time.monotonic() + 60


def over_tcp() -> tuple[Link, Link]:
    store = HashStore()
    server = SocketLink(1, 60, rank=0, listener=Listener(store, 0))
    return server, SocketLink(0, 60, rank=1, store=store)


def check(one: Link, other: Link, at: Callable[[int], bool], meet: Callable[[], object]) -> None:
    """Send from one end to the other; a rank does what is done `at` its end."""
    if at(1):
        with pytest.raises(LinkSilent, match="rank 0 has not answered"):
            receive(other, soon())
    meet()
    if at(0):
        one.send(message((1, 2)))
        one.send(message((3,), LARGE))
        with pytest.raises(LinkSilent, match="rank 1 has not taken what was sent"):
            flush(one, soon())
    meet()
    if at(1):
        assert receive(other, later()).numbers == (1, 2, 0, 0, 0, 0)


def test_waits_over_tcp_end() -> None:
    server, client = over_tcp()
    check(server, client, lambda _: True, lambda: None)
    arrived = None
    while arrived is None:
        server.poll()  # which goes on sending
        arrived = client.poll()
    assert arrived.numbers[0] == 3 and torch.equal(arrived.payload, LARGE)
    flush(server, later())
    server.close()
    client.close()


@pytest.mark.parallel([2])
def test_waits_over_mpi_end() -> None:
    comm = WORLD.Dup()
    link = MPILink(comm, 1 - comm.rank, 1 - comm.rank)
    check(link, link, lambda rank: rank == comm.rank, comm.barrier)
    if comm.rank:
        arrived = receive(link, later())
        assert arrived.numbers[0] == 3 and torch.equal(arrived.payload, LARGE)
    else:
        flush(link, later())
    comm.barrier()
    link.close()
    link.close()
    comm.Free()
