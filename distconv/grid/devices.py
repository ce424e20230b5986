"""The device of each rank of a grid, and how messages travel: decided alike on all ranks.

Every rank offers the devices that it can see, and says what it is asked for. The decision follows
from the offers of all ranks, and needs neither a GPU nor messages.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from distconv.device import cupy_nccl
from distconv.device.kinds import KINDS, accelerator, identities
from distconv.transport import torch_groups
from distconv.transport.launch import switched_on

_ON_HOSTS = "mpi", "torch"
"""The transports between hosts, by preference."""

_ON_ACCELERATORS = "torch", "mpi", "nccl"
"""The transports between accelerators, by preference."""

_VARIABLE = "DISTCONV_TRANSPORT"

_SHARE = "DISTCONV_SHARE_GPUS"
"""Set to 1 where NCCL, or its like, is to take several ranks on one GPU, which many refuse."""


class Offer(NamedTuple):
    """The wishes and possibilities that a rank tells the others when it makes a grid."""

    device: str | None
    """The device that this rank is asked for, a kind or one of it; None where that is open."""
    transport: str | None
    gpus: tuple[str, ...] = ()
    """The identities of the GPUs that this rank sees, unless it is asked not to look."""
    missing: Mapping[str, str] = {}
    """Why this rank cannot use a transport, by its name."""
    may_share: bool = False
    """Whether NCCL is to take several ranks on one GPU."""
    kind: str = "cpu"
    """The kind of these GPUs, as torch calls it."""


class Choice(NamedTuple):
    """The devices that the ranks of a grid compute on, and the transport of their messages."""

    devices: tuple[str, ...]
    """The device of each rank, by the rank's own numbering."""
    transport: str
    notice: str | None = None
    """A warning for whoever looks for speed, if there is a reason."""


def make_offer(
    device: str | torch.device | None,
    transport: str | None,
    kept: torch.device | None,
    by_mpi: bool = True,
) -> Offer:
    """Return the offer of this rank, for the others; no communication.

    Parameters
    ----------
    device, transport: as the program gives them to the grid.
    kept: the GPU that this rank has had on another grid, which it keeps.
    by_mpi: whether MPI has started the ranks.
    """
    given, transport = transport, transport or os.environ.get(_VARIABLE) or None
    if transport not in (None, *_ON_ACCELERATORS):
        name = "transport" if given else _VARIABLE
        way_out = " or ".join(map(repr, _ON_ACCELERATORS))
        raise ValueError(f"ProcessGrid: {name}={transport!r} is not known; choose {way_out}")
    wanted = None if device is None else str(device)
    if wanted == "cpu":
        return Offer(wanted, transport, (), _missing("cpu", by_mpi))
    here = accelerator()
    kinds = KINDS if here is None or here in KINDS else (here, *KINDS)
    if wanted is not None and not re.fullmatch(rf"({'|'.join(kinds)})(:\d+)?", wanted):
        names = ", ".join(map(repr, kinds))
        raise ValueError(
            f"ProcessGrid: device={wanted!r} is not supported; choose 'cpu', {names}, or one of "
            f"these, '{kinds[0]}:1'"
        )
    if kept is not None and wanted in (None, kept.type):
        wanted = str(kept)
    kind = here or "cpu"
    shared = switched_on(_SHARE)
    return Offer(wanted, transport, identities(), _missing(kind, by_mpi), shared, kind)


def _missing(kind: str, by_mpi: bool) -> dict[str, str]:
    """Return why this rank cannot use transports between devices of a kind, by their names."""
    reasons = {
        "mpi": None if by_mpi else "MPI has not started the ranks; start them with mpiexec",
        "torch": torch_groups.why_unavailable(kind),
        "nccl": None if kind == "cpu" else cupy_nccl.why_unavailable(kind),
    }
    return {name: why for name, why in reasons.items() if why is not None}


def choose(offers: Sequence[Offer]) -> Choice:
    """Return the decision that follows from the offers of all ranks.

    A rank that is asked for no certain GPU takes, in rank order, of the GPUs that it sees the one
    that the fewest ranks have; so the ranks of a node take its GPUs in turn. Messages between GPUs
    travel by torch's NCCL where every rank has one of its own, and by MPI where ranks share GPUs;
    those between CPUs by MPI, or torch's gloo where MPI has not started the ranks.

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
        return Choice(("cpu",) * len(offers), _transport(transport, _ON_HOSTS, offers))
    numbers = _numbers(offers)
    gpus = [o.gpus[number] for o, number in zip(offers, numbers, strict=True)]
    devices = tuple(f"{kinds[0]}:{number}" for number in numbers)
    sharing = None if all(o.may_share for o in offers) else _sharing(gpus)
    chosen = _transport(transport, _ON_ACCELERATORS, offers, sharing)
    staged = transport is None and chosen == "mpi" and sharing is None
    notice = _staging(offers) if staged else _notice(offers, gpus)
    return Choice(devices, chosen, notice)


def _staging(offers: Sequence[Offer]) -> str:
    """Return why messages between GPUs go by MPI, in words."""
    why = _obstacle([o.missing.get("torch") for o in offers])
    return f"messages between GPUs go by MPI, mostly through the host: {why}"


def _transport(
    asked: str | None, names: Sequence[str], offers: Sequence[Offer], sharing: str | None = None
) -> str:
    """Return the transport that is asked for, or the first that all ranks can use.

    Parameters
    ----------
    names: the transports between such devices, by preference.
    sharing: which ranks share a GPU, in words, as none do with NCCL.
    """
    obstacles = {
        name: _obstacle([o.missing.get(name) for o in offers])
        or (sharing if name != "mpi" else None)
        for name in names
    }
    if "nccl" not in names:
        obstacles["nccl"] = "that is for GPUs, and the ranks compute on CPUs"
    possible = [name for name in names if not obstacles[name]]
    if asked in possible:
        return asked
    if asked is None and possible:
        return possible[0]
    refused = [asked] if asked else names
    why = "; ".join(f"transport={name!r}: {obstacles[name]}" for name in refused)
    way_out = f", or choose {' or '.join(map(repr, possible))}" if possible else ""
    raise ValueError(f"ProcessGrid: {why}{way_out}")


def _notice(offers: Sequence[Offer], gpus: Sequence[str]) -> str | None:
    """Return whether ranks share GPUs, and what to do about it, in words."""
    used, seen = len(set(gpus)), len({gpu for o in offers for gpu in o.gpus})
    if used == len(gpus):
        return None
    kept = "make the grid of all ranks before those of some, or pass device="
    way_out = "start one rank for each" if used == seen else kept
    return f"{len(gpus)} ranks share {used} of {seen} GPUs; {way_out}"


def _obstacle(each: Sequence[str | None]) -> str | None:
    """Return the first obstacle that a rank reports, and which rank's it is."""
    return next((f"{one} (rank {rank})" for rank, one in enumerate(each) if one), None)


def _sharing(gpus: Sequence[str]) -> str | None:
    """Return which ranks have the same GPU, in words; None where none do."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first < rank:
            return (
                f"ranks {first} and {rank} share a GPU; start one rank for each, or set {_SHARE}=1 "
                "where NCCL allows it"
            )
    return None


def _kind(o: Offer) -> str:
    if o.device is None:
        return o.kind
    return o.device.split(":")[0]


def _numbers(offers: Sequence[Offer]) -> list[int]:
    """Return the number of each rank's GPU among the GPUs that it sees."""
    given = [(o.device or "").partition(":")[2] for o in offers]
    for rank, (o, number) in enumerate(zip(offers, given, strict=True)):
        if len(o.gpus) <= int(number or 0):
            raise ValueError(
                f"ProcessGrid: device={o.device!r}, and rank {rank} sees {len(o.gpus)} GPUs; "
                "choose one that it sees, or 'cpu' on every rank"
            )
    ranks_of = Counter(o.gpus[int(n)] for o, n in zip(offers, given, strict=True) if n)
    numbers = []
    for o, number in zip(offers, given, strict=True):
        if number:
            numbers.append(int(number))
        else:
            numbers.append(min(range(len(o.gpus)), key=lambda i: ranks_of[o.gpus[i]]))
            ranks_of[o.gpus[numbers[-1]]] += 1
    return numbers
