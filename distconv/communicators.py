"""MPI communicators, one for each set of ranks and purpose, made once and kept.

MPI has about two thousand to give; a program may build any number of grids.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from distconv.transport.mpi import MPITransport

Key = tuple[str, tuple[int, ...]]


class _Store:
    """What has been made so far; it hangs on MPI.COMM_WORLD, and so does not outlive MPI."""

    def __init__(self) -> None:
        self.communicators: dict[Key, MPI.Intracomm] = {}
        self.transports: dict[tuple[int, ...], MPITransport] = {}


_KEYVAL = MPI.Comm.Create_keyval()


def _store() -> _Store:
    store: Any = MPI.COMM_WORLD.Get_attr(_KEYVAL)
    if store is None:
        store = _Store()
        MPI.COMM_WORLD.Set_attr(_KEYVAL, store)
    return store  # type: ignore[no-any-return]


def world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """The ranks of `comm` as ranks of MPI.COMM_WORLD; no communication."""
    ranks = MPI.Group.Translate_ranks(comm.group, None, MPI.COMM_WORLD.group)
    if MPI.UNDEFINED in ranks:
        raise ValueError("ProcessGrid: every rank of comm has to be a rank of MPI.COMM_WORLD")
    return tuple(ranks)


def communicator(parent: MPI.Intracomm, ranks: tuple[int, ...], purpose: str) -> MPI.Intracomm:
    """A communicator of `ranks` (of MPI.COMM_WORLD) for one purpose.

    Collective over those ranks at the first call, and a look-up ever after.
    """
    made = _store().communicators
    key = (purpose, ranks)
    if key not in made:
        made[key] = parent.Create_group(MPI.COMM_WORLD.group.Incl(ranks))
    return made[key]


def transport(parent: MPI.Intracomm, ranks: tuple[int, ...]) -> MPITransport:
    """The transport among `ranks`; collective over them at the first call."""
    made = _store().transports
    if ranks not in made:
        made[ranks] = MPITransport(communicator(parent, ranks, "exchange"))
    return made[ranks]
