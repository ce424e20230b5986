"""A process that times local operators, at the same time as others of its kind.

Started as `python -m distconv.planning.operator_worker FOLDER NUMBER PROCESSES THREADS` by
`operators.time_together`, which leaves the operators in the folder and reads the times from there.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import time
from pathlib import Path

import torch

from distconv.planning.local_operators import LocalOperator
from distconv.planning.operator_calls import Operands, call_of
from distconv.planning.operator_timing import times_of, workspace_of

_HEAP = 2**30
"""Bytes that a process has touched before anything is timed, or a quarter of its share."""


def main(folder: Path, number: int, processes: int, threads: int) -> None:
    """Time the operators in the folder."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    operators: list[LocalOperator] = pickle.loads((folder / "operators").read_bytes())
    # Memory that the process has from now on.
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    torch.empty(min(_HEAP, share // 4), dtype=torch.uint8).fill_(0)
    with open(folder / "counters", "r+b") as file, mmap.mmap(file.fileno(), 0) as counters:
        turns = memoryview(counters).cast("q")

        def meet() -> None:
            turns[number] += 1
            while min(turns) < turns[number]:
                time.sleep(0)

        memory = Operands(operators)
        times = times_of(operators, memory, meet)
        turns.release()
    spaces = [
        workspace_of(call_of(operator, memory)) if "convolution" in operator.name else 0
        for operator in operators
    ]
    (folder / f"times {number}").write_bytes(pickle.dumps((times, spaces)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
