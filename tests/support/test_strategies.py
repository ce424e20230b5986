"""A property that does not hold is reported by all ranks alike, with the smallest example."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from tests.support import serial
from tests.support.strategies import Case, on_any_grid, sizes

WORLD = MPI.COMM_WORLD


def report_of(test) -> tuple[str, list[str]]:
    with pytest.raises(AssertionError) as caught:
        test()
    reports = WORLD.allgather((str(caught.value), caught.value.__notes__))
    assert reports == [reports[0]] * WORLD.size
    return reports[0]


@pytest.mark.parallel([1, 2, 3])
def test_what_one_rank_raises_all_raise_with_the_smallest_example() -> None:
    @on_any_grid(100)
    def at_most_six(case: Case) -> None:
        n = case.draw(sizes(1, 50), "n")
        assert WORLD.rank < WORLD.size - 1 or n <= 6

    text, notes = report_of(at_most_six)
    assert text.startswith(f"on ranks [{WORLD.size - 1}]: Traceback")
    assert "Draw 2 (n): 7" in "\n".join(notes).splitlines()


@pytest.mark.parallel([1, 2])
def test_a_wrong_function_is_found_and_its_example_shrunk() -> None:
    def wrong_beyond_four(x: Tensor) -> Tensor:
        return x + (isinstance(x, dc.DistTensor) and x.numel() > 4)

    @on_any_grid(100)
    def sums(case: Case) -> None:
        case.agrees(wrong_beyond_four, case.tensor([case.draw(sizes(1, 12), "n")]))

    text, notes = report_of(sums)
    everyone = list(range(WORLD.size))
    assert text.endswith(f"AssertionError: on ranks {everyone}: output\n")
    assert "Draw 2 (n): 5" in "\n".join(notes).splitlines()


@pytest.mark.parallel([1, 2])
def test_what_serial_torch_refuses_has_to_be_refused() -> None:
    def lenient(x: Tensor) -> Tensor:
        return x if isinstance(x, dc.DistTensor) else x.reshape(-1, 5)

    @on_any_grid(100)
    def reshapes(case: Case) -> None:
        case.agrees(lenient, case.tensor([case.draw(sizes(1, 12), "n")]))

    text, _ = report_of(reshapes)
    assert "serial torch raises, and this rank does not" in text


def refused_on_the_first(x: Tensor) -> Tensor:
    if not isinstance(x, dc.DistTensor) or WORLD.rank == 0:
        raise ValueError("not taken")
    return x


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("fault", ["output", "serial torch raises, and this rank does not"])
def test_a_rank_that_finds_a_fault_leaves_no_other_waiting(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "output":
        monkeypatch.setattr(serial, "deviation", lambda *_: float(WORLD.rank))

    @on_any_grid(1)
    def communicates_afterwards(case: Case) -> None:
        function = torch.neg if fault == "output" else refused_on_the_first
        case.agrees(function, case.tensor([5]), cut=[0])
        WORLD.barrier()

    assert fault in report_of(communicates_afterwards)[0]


@pytest.mark.parallel([2, 3])
def test_an_error_that_one_rank_misses_fails_on_all() -> None:
    def raises() -> None:
        if WORLD.rank:
            raise ValueError("too large")

    with pytest.raises(AssertionError, match=r"on ranks \[0\]: (.*\n)*.*DID NOT RAISE"):
        serial.raised_everywhere(ValueError, raises)
