"""Time and memory on the device: by events and the allocator of a GPU, or what a CPU has for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch

from benchmarks.measuring.memory import peak_of as peak_on_cpu
from benchmarks.measuring.turns import in_turns

Run = Callable[[], object]

SHORTEST = 0.005
"""Seconds that one measurement takes at least; shorter calls are repeated."""
ROUNDS = 5, 50
"""The fewest and the most measurements of each call."""


class Times(NamedTuple):
    """Seconds of a call, round by round: on the device, and on the host until it returns."""

    device: list[float]
    host: list[float]


def alternate(device: torch.device, runs: Sequence[Run], seconds: float) -> list[Times]:
    """Time calls that take turns, every second round in reverse, for about `seconds` in all."""
    for run in runs:
        timed(device, run, 3)
    once = [max(timed(device, run, 1)[0], 1e-6) for run in runs]
    repeated = [ceil(SHORTEST / elapsed) for elapsed in once]
    fewest, most = ROUNDS
    round_takes = sum(max(elapsed, SHORTEST) for elapsed in once)
    rounds = min(max(int(seconds / round_takes), fewest), most)
    times = [Times([], []) for _ in runs]
    for run, repeats, of_run in in_turns(list(zip(runs, repeated, times, strict=True)), rounds):
        for series, elapsed in zip(of_run, timed(device, run, repeats), strict=True):
            series.append(elapsed)
    return times


def timed(device: torch.device, run: Run, repeats: int) -> tuple[float, float]:
    """Return the mean seconds of `repeats` calls, on the device and on the host."""
    if device.type == "cpu":
        elapsed = _on_host(run, repeats)
        return elapsed, elapsed
    start, stop = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    start.record()
    host = _on_host(run, repeats)
    stop.record()
    torch.accelerator.synchronize(device)
    return start.elapsed_time(stop) * 1e-3 / repeats, host


def _on_host(run: Run, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def peak_of(device: torch.device, make: Callable[[], Run]) -> int:
    """Return the peak bytes in the second call of the step that `make` makes, parameters too."""
    if device.type == "cpu":
        return peak_on_cpu(make).whole
    gc.collect()
    memory: Any = torch.get_device_module(device)
    before = memory.memory_allocated(device)
    step = make()
    step()
    memory.reset_peak_memory_stats(device)
    step()
    peak: int = memory.max_memory_allocated(device)
    return peak - before
