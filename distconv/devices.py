"""On what each rank of a grid computes, and how messages travel: decided alike on all ranks.

Every rank tells what it can see and what it is asked for; the decision follows from what all have
told, and needs neither a GPU nor messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from distconv.transport import nccl

TRANSPORTS = ("mpi", "nccl")


class Offer(NamedTuple):
    """What a rank tells the others when it makes a grid."""

    device: str | None
    """What it is asked to compute on: "cpu", "cuda" or one GPU; None where that is open."""
    transport: str | None
    gpus: tuple[str, ...] = ()
    """The identities of the GPUs that it sees, unless it is asked not to look."""
    obstacle: str | None = None
    """Why it cannot use NCCL."""


class Choice(NamedTuple):
    """What the ranks of a grid compute on, and how their messages travel."""

    devices: tuple[str, ...]
    """Of each rank, by its own numbers."""
    transport: str
    notice: str | None = None
    """What somebody who looks for speed should know."""


def offer(
    device: str | torch.device | None, transport: str | None, kept: torch.device | None
) -> Offer:
    """What this rank tells; no communication.

    Parameters
    ----------
    device, transport: as the program gives them to the grid.
    kept: the GPU that this rank has had on another grid, which it keeps.
    """
    if transport not in (None, *TRANSPORTS):
        way_out = " or ".join(map(repr, TRANSPORTS))
        raise ValueError(f"ProcessGrid: transport={transport!r} is not known; choose {way_out}")
    wanted = None if device is None else str(device)
    if wanted == "cpu":
        return Offer(wanted, transport)
    if wanted is not None and wanted.split(":")[0] != "cuda":
        raise ValueError(f"ProcessGrid: device={wanted!r} is not supported; choose 'cpu' or 'cuda'")
    if kept is not None and wanted in (None, "cuda"):
        wanted = str(kept)
    gpus = _visible()
    return Offer(wanted, transport, gpus, nccl.obstacle() if gpus and transport != "mpi" else None)


def _visible() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    numbers = range(torch.cuda.device_count())
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in numbers)


def choose(offers: Sequence[Offer]) -> Choice:
    """What follows from the offers of all ranks.

    Ranks that see the same GPUs, those of a node, take them in turn. Messages travel by NCCL where
    every rank has a GPU of its own, and cupy; else by MPI.

    Raises
    ------
    ValueError
        When what ranks are asked for cannot be had, or differs.
    """
    transport = offers[0].transport
    kinds = [_kind(o) for o in offers]
    for what, each in (("transport", [o.transport for o in offers]), ("device", kinds)):
        odd = next((r for r, one in enumerate(each) if one != each[0]), None)
        if odd is not None:
            raise ValueError(
                f"ProcessGrid: {what} is {each[odd]!r} on rank {odd} and {each[0]!r} on rank 0; "
                f"pass {what}= with the same on every rank"
            )
    if kinds[0] == "cpu":
        if transport == "nccl":
            raise ValueError(
                "ProcessGrid: transport='nccl' is for GPUs, and the ranks compute on CPUs; choose "
                "'mpi'"
            )
        return Choice(("cpu",) * len(offers), "mpi")

    numbers = _numbers(offers)
    owner: dict[str, int] = {}
    shared = None
    for rank, (o, number) in enumerate(zip(offers, numbers, strict=True)):
        first = owner.setdefault(o.gpus[number], rank)
        shared = shared or (None if first == rank else (first, rank))
    obstacle = next((f"{o.obstacle} (rank {r})" for r, o in enumerate(offers) if o.obstacle), None)
    if shared is not None:
        obstacle = f"ranks {shared[0]} and {shared[1]} share a GPU; start one rank for each"
    if transport == "nccl" and obstacle:
        raise ValueError(f"ProcessGrid: transport='nccl': {obstacle}, or choose 'mpi'")
    notice = None
    if shared is not None:
        notice = f"{len(offers)} ranks share {len(owner)} GPU{'s' if len(owner) > 1 else ''}"
    chosen = transport or ("mpi" if obstacle else "nccl")
    return Choice(tuple(f"cuda:{number}" for number in numbers), chosen, notice)


def _kind(o: Offer) -> str:
    if o.device is None:
        return "cuda" if o.gpus else "cpu"
    return o.device.split(":")[0]


def _numbers(offers: Sequence[Offer]) -> list[int]:
    """The number of each rank's GPU among those that it sees."""
    before: Counter[tuple[str, ...]] = Counter()
    numbers = []
    for rank, o in enumerate(offers):
        _, _, given = (o.device or "").partition(":")
        if not o.gpus or (given and int(given) >= len(o.gpus)):
            raise ValueError(
                f"ProcessGrid: device={o.device!r}, and rank {rank} sees {len(o.gpus)} GPUs"
            )
        numbers.append(int(given) if given else before[o.gpus] % len(o.gpus))
        before[o.gpus] += 1
    return numbers
