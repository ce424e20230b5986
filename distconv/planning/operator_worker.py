"""A process that times local operators, at the same time as others of its kind.

Started as `python -m distconv.planning.operator_worker FOLDER NUMBER PROCESSES THREADS MEMORY` by
`operators.time_together`, which leaves the operators in the folder and reads the times from there.
"""

from __future__ import annotations

import mmap
import pickle
import sys
import time
from pathlib import Path

import torch

from distconv.planning.operator_calls import Operands, call_of
from distconv.planning.operator_timing import times_of, workspace_of
from distconv.planning.recording import LocalOperator

_HEAP = 2**30
"""Bytes that a process touches before anything is timed; at most a quarter of its memory."""


def main(folder: Path, number: int, processes: int, threads: int, memory: int) -> None:
    """Time the operators in the folder."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    operators: list[LocalOperator] = pickle.loads((folder / "operators").read_bytes())
    # Memory that the process has from now on.
    torch.empty(min(_HEAP, memory // 4), dtype=torch.uint8).fill_(0)
    operands = Operands(operators)
    with open(folder / "counters", "r+b") as file, mmap.mmap(file.fileno(), 0) as counters:
        turns = memoryview(counters).cast("q")

        def meet() -> None:
            turns[number] += 1
            while min(turns) < turns[number]:
                time.sleep(0)

        times = times_of(operators, operands, meet)
        turns.release()
    spaces = [
        workspace_of(call_of(operator, operands)) if "convolution" in operator.name else 0
        for operator in operators
    ]
    (folder / f"times {number}").write_bytes(pickle.dumps((times, spaces)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
