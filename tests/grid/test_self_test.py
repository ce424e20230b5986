"""A carrier that brings other values than were sent is found before it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.grid.communicators import check_carrier, found_wrong
from distconv.transport.mpi import MPICommunicator, MPITransport

WORLD = MPI.COMM_WORLD
CPU = torch.device("cpu")


def spoiled(name: str, spoil: Callable[..., None]) -> Any:
    """Return a carrier whose method `name` spoils what it brings, on the last rank alone."""
    carrier = MPITransport(MPICommunicator(WORLD.Dup()))
    right: Any = getattr(carrier, name)

    def wrong(*given: Any) -> Any:
        result = right(*given)
        if hasattr(result, "wait"):
            result.wait()
        if WORLD.rank == WORLD.size - 1:
            spoil(result, *given)
        return result

    setattr(carrier, name, wrong)
    return carrier


FAULTS: dict[str, tuple[Callable[..., None], str]] = {
    "exchange": (lambda _, arriving, *__: arriving[0][1][-1].zero_(), "a message of rank"),
    "all_reduce": (lambda _, total, *__: total[3].add_(1), "a sum in float32"),
    "all_gather": (lambda gathered, *_: gathered[0].fill_(9), "an all-gather"),
    "broadcast": (lambda _, value, *__: value.fill_(9), "a broadcast"),
}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_what_a_carrier_brings_wrong_on_one_rank_is_said_on_all(name: str) -> None:
    spoil, words = FAULTS[name]
    with pytest.raises(RuntimeError, match=f"'mpi'.*{words}.* on rank {WORLD.size - 1}") as error:
        check_carrier(spoiled(name, spoil), MPICommunicator(WORLD), CPU)
    assert len(set(WORLD.allgather(str(error.value)))) == 1


@pytest.mark.parallel([2, 3])
def test_a_right_carrier_passes_and_a_rank_may_leave_the_test_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = MPICommunicator(WORLD)
    assert found_wrong(MPITransport(MPICommunicator(WORLD.Dup())), comm, CPU) == []
    if WORLD.rank == 0:
        monkeypatch.setenv("DISTCONV_SELFTEST", "0")
    assert found_wrong(spoiled(*("broadcast", FAULTS["broadcast"][0])), comm, CPU) == []
