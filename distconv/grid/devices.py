"""The choice of each rank's device, and of the transport of messages, which all ranks share.

Every rank makes an offer: the devices that the rank sees, and the device that the program requests.
The choice depends on the offers of all ranks only, so it can be tested without GPUs and messages.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from distconv.device import kinds
from distconv.device.kinds import KINDS, accelerator, identities
from distconv.transport import torch as torch_transport
from distconv.transport.launch import switched_on

_ON_HOSTS = "mpi", "torch"
"""The transports between CPUs, in order of preference."""

_ON_ACCELERATORS = "torch", "mpi", "nccl"
"""The transports between accelerators, in order of preference."""

_VARIABLE = "DISTCONV_TRANSPORT"

_SHARE = "DISTCONV_SHARE_GPUS"
"""The variable to set to 1 so that NCCL, RCCL or oneCCL runs several ranks on one GPU, which many
versions do not support."""


class Offer(NamedTuple):
    """The devices and transports that one rank requests and can use; gathered from all ranks."""

    device: str | None
    """The requested device, such as "cuda" or "cuda:1"; None for any."""
    transport: str | None
    """The name of the requested transport; None for any."""
    gpus: tuple[str, ...] = ()
    """The identities of the GPUs that this rank sees; empty if the program requests a CPU."""
    missing: Mapping[str, str] = {}
    """For each transport that this rank cannot use, by name, the reason."""
    may_share: bool = False
    """Whether NCCL may run several ranks on one GPU."""
    kind: str = "cpu"
    """The device type of `gpus`, such as "cuda"; "cpu" if this rank sees no accelerator."""


class Choice(NamedTuple):
    """The devices of all ranks of a grid, and the transport; equal on all ranks."""

    devices: tuple[str, ...]
    """The device of each rank, such as "cuda:0", as the rank itself numbers its devices."""
    transport: str
    """The name of the transport."""
    notice: str | None = None
    """A warning about speed, or None."""


def make_offer(
    device: str | torch.device | None,
    transport: str | None,
    kept: torch.device | None,
    by_mpi: bool = True,
) -> Offer:
    """Return this rank's offer for the arguments of `ProcessGrid`. No communication.

    `kept` is the GPU that this rank has on earlier grids, which it keeps, or None. `by_mpi` is
    whether MPI has started the ranks. Raises ValueError for an unknown device or transport.
    """
    given, transport = transport, transport or os.environ.get(_VARIABLE) or None
    if transport not in (None, *_ON_ACCELERATORS):
        name = "transport" if given else _VARIABLE
        way_out = " or ".join(map(repr, _ON_ACCELERATORS))
        raise ValueError(f"ProcessGrid: {name}={transport!r} is unknown; choose {way_out}")
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
    """Return, for each transport that this rank cannot use on devices of type `kind`, the reason.

    `by_mpi` is whether MPI has started the ranks.
    """
    reasons = {
        "mpi": None if by_mpi else "MPI has not started the ranks; start them with mpiexec",
        "torch": torch_transport.why_no_process_groups(kind),
        "nccl": None if kind == "cpu" else kinds.why_no_cupy(kind),
    }
    return {name: why for name, why in reasons.items() if why is not None}


def choose(offers: Sequence[Offer]) -> Choice:
    """Return the devices and the transport that follow from the offers of all ranks.

    In rank order, each rank without a requested GPU gets the GPU that it sees and the fewest ranks
    have, so the ranks of a node get the node's GPUs in turn. By default messages between GPUs are
    sent by torch's NCCL if every rank has its own GPU, and by MPI if ranks share GPUs. Messages
    between CPUs are sent by MPI, or by torch's gloo if MPI has not started the ranks.

    Raises ValueError if a requested device or transport is not available, or ranks request
    different ones.
    """
    transport = offers[0].transport
    kinds = [o.device.split(":")[0] if o.device else o.kind for o in offers]
    for what, each in (("transport", [o.transport for o in offers]), ("device", kinds)):
        odd = next((r for r, one in enumerate(each) if one != each[0]), None)
        if odd is not None:
            raise ValueError(
                f"ProcessGrid: {what} is {each[odd]!r} on rank {odd} and {each[0]!r} on rank 0; "
                f"pass {what}= with the same value on every rank"
            )
    if kinds[0] == "cpu":
        return Choice(("cpu",) * len(offers), _transport(transport, _ON_HOSTS, offers))
    numbers = _device_numbers(offers)
    gpus = [o.gpus[number] for o, number in zip(offers, numbers, strict=True)]
    devices = tuple(f"{kinds[0]}:{number}" for number in numbers)
    sharing = None if all(o.may_share for o in offers) else _sharing(gpus)
    chosen = _transport(transport, _ON_ACCELERATORS, offers, sharing)
    if transport is None and chosen == "mpi" and sharing is None:
        why = _obstacle([o.missing.get("torch") for o in offers])
        notice = f"messages between GPUs use MPI, mostly staged through the host: {why}"
        return Choice(devices, chosen, notice)
    return Choice(devices, chosen, _notice(offers, gpus))


def _transport(
    asked: str | None, names: Sequence[str], offers: Sequence[Offer], sharing: str | None = None
) -> str:
    """Return the requested transport `asked`, or by default the first of `names` that all can use.

    `sharing` is the text of an error if ranks share a GPU, which only MPI supports, else None.
    Raises ValueError if some rank cannot use the requested transport, or if no transport of `names`
    is possible on all ranks.
    """
    obstacles = {
        name: _obstacle([o.missing.get(name) for o in offers])
        or (sharing if name != "mpi" else None)
        for name in names
    }
    if "nccl" not in names:
        obstacles["nccl"] = "it requires GPUs, but the ranks compute on CPUs; use GPUs"
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
    """Return a warning with a remedy if ranks share GPUs, else None.

    `gpus` has the identity of each rank's GPU.
    """
    used, seen = len(set(gpus)), len({gpu for o in offers for gpu in o.gpus})
    if used == len(gpus):
        return None
    kept = "create the grid of all ranks before grids of fewer ranks, or pass device="
    way_out = "start one rank for each GPU" if used == seen else kept
    return f"{len(gpus)} ranks share {used} of {seen} GPUs; {way_out}"


def _obstacle(each: Sequence[str | None]) -> str | None:
    """Return why a transport cannot be used, with the first rank that cannot use it, or None.

    `each` has for every rank the reason why the rank cannot use the transport, or None.
    """
    return next((f"{one} (rank {rank})" for rank, one in enumerate(each) if one), None)


def _sharing(gpus: Sequence[str]) -> str | None:
    """Return the text of an error that names two ranks that share a GPU; None if no ranks do.

    `gpus` has the identity of each rank's GPU.
    """
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first < rank:
            return (
                f"ranks {first} and {rank} share a GPU; start one rank for each GPU, or set "
                f"{_SHARE}=1 if this NCCL supports it"
            )
    return None


def _device_numbers(offers: Sequence[Offer]) -> list[int]:
    """Return the number of each rank's GPU among the GPUs that the rank itself sees.

    Raises ValueError if a rank does not see the requested GPU, or sees no GPU.
    """
    given = [(o.device or "").partition(":")[2] for o in offers]
    for rank, (o, number) in enumerate(zip(offers, given, strict=True)):
        if len(o.gpus) <= int(number or 0):
            raise ValueError(
                f"ProcessGrid: device={o.device!r}, and rank {rank} sees {len(o.gpus)} GPUs; "
                "choose a visible GPU, or 'cpu' on every rank"
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
