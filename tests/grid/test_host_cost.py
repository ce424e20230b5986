"""The work of a rank's host does not grow with the grid, nor do collectives when one is made."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from mpi4py import MPI

import distconv as dc
from benchmarks.host_cost import RANKS, cases, chain, functions_called, square
from distconv.device.kinds import HOST
from distconv.geometry.halo import needs_halo
from distconv.geometry.index_maps import IndexMap, Same, TransposedWindow, Window
from distconv.geometry.plan import make_plan
from distconv.geometry.topology import Topology
from distconv.grid import communicators
from distconv.grid.ranks import world
from distconv.transport.launch import switched_on

COMPARING = pytest.mark.skipif(
    switched_on("DISTCONV_DEBUG"), reason="DISTCONV_DEBUG=1 compares what the ranks pass"
)
"""Marks tests of calls that send nothing otherwise."""


@COMPARING
@pytest.mark.parametrize("grid", [chain, square])
def test_the_benchmarks_work_is_the_same_on_16_and_65536_ranks(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks on many ranks send smaller messages, which would be packed by other functions.
    monkeypatch.setattr("distconv.comm.packing.SMALL_BYTES", 0)
    every = HOST._replace(most_indices=sys.maxsize)
    monkeypatch.setattr("distconv.comm.packing.thresholds", lambda kind: every)
    monkeypatch.setattr(
        "distconv.ops.conv.functions.FEWEST_IN_DOUBT", sys.maxsize
    )  # and larger ones
    small, large = (list(cases(grid(ranks))) for ranks in (RANKS[0], RANKS[-1]))
    for case, on_many in zip(small, large, strict=True):
        case.run(), on_many.run()  # what is made once a process, or a grid, is not counted
        assert functions_called(on_many.run) == functions_called(case.run), case.name


windows = st.builds(
    Window,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2).map(lambda p: (p, p)),
)
transposed = st.builds(
    TransposedWindow, kernel=st.integers(2, 5), stride=st.integers(1, 3), padding=st.integers(0, 1)
)


@given(windows | transposed, st.integers(8, 12), st.integers(-3, 3))
def test_the_work_for_any_window_follows_the_block(window: Any, block: int, more: int) -> None:
    few, many = (_work(window, ranks, block * ranks + more) for ranks in (64, 4096))
    # Positions are looked up by bisection, of which a longer dimension takes a few steps more.
    assert many <= few + 200


def _work(window: Any, ranks: int, size: int) -> int:
    assume(window.output_size(size) > 0)
    topology, cuts = Topology((1, 1, 1, 1, ranks, 1)), ((), (), ("height",), ())
    needs: tuple[IndexMap, ...] = (Same(), Same(), window, Same())
    shape = 1, 8, size, 4
    return max(
        functions_called(lambda: make_plan(topology, ranks // 2, shape, cuts, cuts, needs)),
        functions_called(lambda: needs_halo((window,), (size,), (ranks,))),
    )


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The collectives of communicators from here on, in a process that has made no grid yet."""
    counted: Counter[str] = Counter()
    kind = type(world())
    for name in ("allgather", "bcast", "compare", "subgroup"):
        monkeypatch.setattr(kind, name, _counting(counted, name, getattr(kind, name)))
    fresh = communicators._Store()
    monkeypatch.setattr(communicators, "_store", lambda: fresh)
    return counted


def _counting(counted: Counter[str], name: str, call: Any) -> Any:
    def counting(self: Any, *given: Any) -> Any:
        counted[name] += 1
        return call(self, *given)

    return counting


@pytest.mark.parallel([2, 3, 4])
def test_a_grid_takes_as_many_collectives_on_any_number_of_ranks(collectives: Counter[str]) -> None:
    grid = dc.ProcessGrid(height=-1)
    # Over MPI, the ranks tell each other once where torch's process groups meet.
    meeting = Counter(allgather=2, bcast=1) if grid.transport.name == "torch" else Counter[str]()
    assert collectives - meeting == {"subgroup": 3, "allgather": 3}
    collectives.clear()
    dc.ProcessGrid(sample=-1)
    assert collectives == {"allgather": 1}
    collectives.clear()
    for _ in range(2):
        grid.communicator(("height",))
    assert collectives == {"subgroup": 1, "compare": 1}


@COMPARING
@pytest.mark.parallel([2, 4])
def test_from_local_with_a_shape_sends_nothing(
    collectives: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = MPI.COMM_WORLD.size
    grid = dc.ProcessGrid(height=ranks)
    collectives.clear()
    monkeypatch.setattr(type(grid), "all_gather_object", None)
    monkeypatch.setattr(type(grid.transport), "exchange", None)
    monkeypatch.setattr(type(grid.transport), "all_reduce", None)
    x = dc.DistTensor.from_local(torch.zeros(1, 2, 3, 4), grid, shape=(1, 2, 3 * ranks, 4))
    assert x.shape == (1, 2, 3 * ranks, 4) and not collectives
