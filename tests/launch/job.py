"""The job that `one_node_slurm.sh` runs: two ranks compare themselves with serial torch."""

from __future__ import annotations

import os
import sys

import torch

import distconv as dc


def main() -> None:
    """Check environment and binding on every rank, and a convolution with halos."""
    assert os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
    assert os.environ["DISTCONV_TRANSPORT"] == "mpi" and "MALLOC_TRIM_THRESHOLD_" in os.environ
    grid = dc.ProcessGrid(height=2)
    bound = grid.all_gather_object(sorted(os.sched_getaffinity(0)))
    assert [len(cores) for cores in bound] == [1, 1] and bound[0] != bound[1], bound
    if "--fail" in sys.argv and grid.rank == 1:
        raise RuntimeError("rank 1 fails, as asked")
    torch.manual_seed(0)
    layer, x = torch.nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 16, 16)
    expected = layer(x)
    found = dc.parallelize(layer, grid)(dc.distribute_tensor(x, grid)).full_tensor()
    torch.testing.assert_close(found, expected)
    if grid.rank == 0:
        print("2 ranks on 2 different cores agree with serial torch", flush=True)


if __name__ == "__main__":
    main()
