"""A process that times local operators, at the same time as others of its kind.

Started as `python -m distconv.planning.operator_worker FOLDER NUMBER PROCESSES THREADS` by
`operators.time_together`, which leaves the operators in the folder and reads the times from there.
"""

from __future__ import annotations

import mmap
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distconv.planning.local_operators import LocalOperator, TensorSpec
from distconv.planning.roofline import bytes_of, packet_of

SECONDS = 0.02
"""About how long one operator is timed, beyond its first runs."""
FEWEST, MOST = 3, 40
"""The fewest and the most times that it runs."""

COLD = 2**26
"""Bytes of other operands between two uses of the same: what a step computes on has left the caches
meanwhile."""


def main(folder: Path, number: int, processes: int, threads: int) -> None:
    """Time the operators in the folder."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    operators: list[LocalOperator] = pickle.loads((folder / "operators").read_bytes())
    # Memory that the process has from now on.
    torch.empty(2**28, dtype=torch.uint8).fill_(0)
    with open(folder / "counters", "r+b") as file, mmap.mmap(file.fileno(), 0) as counters:
        turns = memoryview(counters).cast("q")
        times, spaces = [], []
        for i, operator in enumerate(operators):
            run = runner(operator)
            turns[number] = i + 1
            while min(turns) < i + 1:
                time.sleep(0)
            times.append(seconds_of(run))
            spaces.append(workspace_of(run) if "convolution" in operator.name else 0)
        turns.release()
    (folder / f"times {number}").write_bytes(pickle.dumps((times, spaces)))


def runner(operator: LocalOperator) -> Callable[[], object]:
    """Return a function that runs the operator on tensors with elements, others each time.

    It has run until results take the place of earlier ones: before, its memory is fresh.
    """
    packet: Any = packet_of(operator)
    function = getattr(packet, operator.name.rsplit(".", 1)[1])
    size = max(bytes_of(operator), 1)
    sets = [_operands(operator) for _ in range(min(max(1, COLD // size), 8))]
    results: deque[Any] = deque(maxlen=min(max(1, COLD // size), 16))
    turn = 0

    def run() -> None:
        nonlocal turn
        arguments, keywords = sets[turn % len(sets)]
        turn += 1
        results.append(function(*arguments, **keywords))

    for _ in range(1 + (results.maxlen or 0)):
        run()
    return run


def seconds_of(run: Callable[[], object]) -> float:
    """Return the median of the seconds of some runs."""
    clock = time.perf_counter
    start = clock()
    run()
    once = clock() - start
    count = min(max(int(SECONDS / max(once, 1e-7)), FEWEST), MOST)
    times = []
    for _ in range(count):
        start = clock()
        run()
        times.append(clock() - start)
    return sorted(times)[len(times) // 2]


def workspace_of(run: Callable[[], object]) -> int:
    """Return the bytes that an operator holds at its most, beyond what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    changes = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        most = max(most, live)
    return max(most - max(live, 0), 0)


def _operands(operator: LocalOperator) -> tuple[list[Any], dict[str, Any]]:
    places_of_maxima = "max_pool" in operator.name and "backward" in operator.name
    plane = prod(operator.arguments[1].shape[2:]) if places_of_maxima else 0

    def made(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return _tensor(value, plane)
        if isinstance(value, tuple):
            return [made(part) for part in value]
        return value

    keywords = {name: made(value) for name, value in operator.keywords}
    if "device" in keywords:
        keywords["device"] = "cpu"
    return [made(a) for a in operator.arguments], keywords


def _tensor(spec: TensorSpec, places: int) -> Tensor:
    """Return a tensor of numbers from 0.5 to 1.5; whole numbers are 0, or places in a plane."""
    elements = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    if not prod(spec.shape):
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        memory = torch.rand(elements, dtype=torch.float32).add_(0.5).to(spec.dtype)
    elif places:
        per_plane = max(prod(spec.shape[2:]), 1)
        memory = torch.arange(elements, dtype=spec.dtype).remainder_(per_plane)
        memory = memory.mul_(places).div_(per_plane, rounding_mode="floor")
    else:
        memory = torch.zeros(elements, dtype=spec.dtype)
    return memory.as_strided(spec.shape, spec.stride)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
