"""A test of the carrier between accelerators, by messages with known values.

On one vendor's machines batches of messages corrupted halos silently. One exchange and one
reduction of every kind find such a carrier before a program trusts it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from distconv.device.kinds import is_accelerator, library_of, version_of_library
from distconv.transport.interface import Communicator, Transport

_VARIABLE = "DISTCONV_SELFTEST"

_ELEMENTS = 2**15
"""Elements of a message: enough that libraries send it in several steps."""

_SUMMED = torch.float32, torch.bfloat16


def found_wrong(carrier: Transport, comm: Communicator, device: torch.device) -> list[str]:
    """Test a carrier, and return a text for each wrong result. All ranks of `comm` call it.

    The texts are the same on all ranks. Nothing is tested if DISTCONV_SELFTEST=0 on a rank.
    """
    if not all(comm.allgather(os.environ.get(_VARIABLE) != "0")):
        return []
    mine = [f"{what} on rank {comm.rank}" for what in _wrong_here(carrier, comm, device)]
    return sum(comm.allgather(mine), [])


def check_carrier(carrier: Transport, comm: Communicator, device: torch.device) -> None:
    """Test a carrier; raise RuntimeError on all ranks if any rank gets wrong values. Collective."""
    wrong = found_wrong(carrier, comm, device)
    if not wrong:
        return
    library = f"torch {torch.__version__}"
    if is_accelerator(device) and carrier.name != "mpi":
        library += f", {library_of(device.type)} {version_of_library(device.type)}"
    raise RuntimeError(
        f"ProcessGrid: transport {carrier.name!r} ({library}) brings other values than were sent: "
        f"{', '.join(wrong)}. Choose another transport=, or another version of the library; "
        f"{_VARIABLE}=0 leaves the test out"
    )


def _wrong_here(carrier: Transport, comm: Communicator, device: torch.device) -> list[str]:
    me, ranks = comm.rank, comm.size

    def numbers(rank: int) -> Tensor:
        return torch.arange(_ELEMENTS, dtype=torch.float32, device=device) + rank

    own, peers = numbers(me), sorted({(me - 1) % ranks, (me + 1) % ranks})
    arriving = [(peer, carrier.empty((_ELEMENTS,), own)) for peer in peers]
    carrier.exchange(arriving, [(peer, own) for peer in peers], carrier.next_tag()).wait()
    wrong = [f"a message of rank {r}" for r, got in arriving if not torch.equal(got, numbers(r))]
    for dtype in _SUMMED:
        total = torch.full((7,), me % 2, dtype=dtype, device=device)
        carrier.all_reduce(total, comm).wait()
        if not torch.equal(total, torch.full_like(total, ranks // 2)):
            wrong.append(f"a sum in {str(dtype).removeprefix('torch.')}")
    gathered = carrier.all_gather(torch.full((3,), me, device=device), comm)
    if gathered[:, 2].tolist() != list(range(ranks)):
        wrong.append("an all-gather")
    value = torch.full((3,), me, device=device)
    carrier.broadcast(value, comm)
    if value.any():
        wrong.append("a broadcast")
    return wrong
