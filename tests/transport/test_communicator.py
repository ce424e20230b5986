"""Small messages among the ranks of a communicator."""

from __future__ import annotations

import gc
from array import array

import pytest
from mpi4py import MPI

import distconv as dc
from distconv.geometry.topology import AXES
from distconv.transport.interface import tags, tags_behind


@pytest.mark.parallel(2)
def test_memory_of_a_comparison_that_nobody_waits_for_is_not_used_again() -> None:
    comm = dc.ProcessGrid(height=2).communicator(AXES, "checks")
    for _ in range(20):
        if MPI.COMM_WORLD.rank == 0:
            comm.compare([1, 2])  # and an exception, say
            gc.collect(0)
        others = [array("q", [7] * 4) for _ in range(1000)]
        MPI.COMM_WORLD.barrier()
        if MPI.COMM_WORLD.rank == 1:
            comm.compare([3, 4])
        comm.allgather(5)  # MPI goes on with what has been started
        MPI.COMM_WORLD.barrier()
        assert all(other.tolist() == [7] * 4 for other in others)


@pytest.mark.parallel(2)
def test_a_comparison_tells_which_numbers_are_equal() -> None:
    comm = dc.ProcessGrid(height=2).communicator(AXES, "checks")
    for i in range(100):
        comparison = comm.compare([i, -i, MPI.COMM_WORLD.rank, 2**62])
        assert comparison.wait() == [True, True, False, True]


@pytest.mark.parametrize("before", [0, 5, 32765, 3 * 32767 - 2])
def test_ranks_go_on_with_one_tag_also_where_some_have_begun_again(before: int) -> None:
    ranks = [tags() for _ in range(3)]
    for _ in range(before):
        for next_tag in ranks:
            next_tag()
    # The second rank has taken four more steps than the first, the third one more.
    reached = [
        [next_tag() for _ in range(more)][-1]
        for next_tag, more in zip(ranks, (1, 5, 2), strict=True)
    ]
    behind = [tags_behind(tag, reached) for tag in reached]
    assert behind == [4, 0, 3]
    for next_tag, by in zip(ranks, behind, strict=True):
        for _ in range(by):
            next_tag()
    assert len({next_tag() for next_tag in ranks}) == 1
