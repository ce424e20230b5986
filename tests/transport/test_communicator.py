"""Small messages among the ranks of a communicator."""

from __future__ import annotations

import gc
from array import array

import pytest
from mpi4py import MPI

import distconv as dc
from distconv.geometry.topology import AXES


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
