"""The links of a rank, by whatever has started the ranks: MPI's messages, or TCP without MPI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distconv.transport.communicator import Communicator
from distconv.transport.link import Link
from distconv.transport.torch_communicator import TorchCommunicator


def open_links(
    comm: Communicator, called: Iterable[int], calling: Iterable[int], limit: float
) -> dict[int, Link]:
    """Return a link for each rank that this one is to talk to; all ranks of `comm` call it.

    No rank waits for one that calls it: such a link is usable at once, and lost where nobody has
    called in time.

    Parameters
    ----------
    comm: all ranks of the job, with a purpose of its own.
    called: the ranks that this one calls, such as servers.
    calling: the ranks that call this one, such as clients.
    limit: seconds that a connection may take to come about.

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

    from distconv.transport.socket_link import Listener, SocketLink

    me = comm.ranks[comm.rank]
    store: Any = comm.store and PrefixStore(comm.purpose, comm.store)
    listener = Listener(store, me) if calling else None
    links: dict[int, Link] = {
        peer: SocketLink(peer, limit, rank=me, listener=listener) for peer in calling
    }
    for peer in called:
        links[peer] = SocketLink(peer, limit, rank=me, store=store)
    return links
