"""Timing of local operators as they run in a step, and what they allocate meanwhile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from torch.profiler import ProfilerActivity, profile

from distconv.planning.operator_calls import Operands, call_of
from distconv.planning.recording import LocalOperator

SECONDS = 0.02
"""About how long one operator is timed, beyond its first runs."""
FEWEST, MOST = 3, 12
"""The fewest and the most times that it runs, beyond the first."""

_HELD = 2**26
"""Bytes of results that are held, as a step holds activations, until others take their place."""


def times_of(
    operators: Sequence[LocalOperator], memory: Operands, meet: Callable[[], object]
) -> list[float]:
    """Return the median of the seconds of some runs of each operator.

    They take turns, as in a step: each finds its code and its operands outside the caches, which
    makes small ones take up to half as long again as when they are repeated.

    Parameters
    ----------
    meet: waits until all processes are about to begin a round.
    """
    clock = time.perf_counter
    held: deque[tuple[int, object]] = deque()
    holding = 0
    times: list[list[float]] = [[] for _ in operators]
    for turn in range(-1, MOST):
        meet()
        for operator, taken in zip(operators, times, strict=True):
            if len(taken) >= FEWEST and sum(taken) > SECONDS:
                continue
            run = call_of(operator, memory)
            start = clock()
            result = run()
            seconds = clock() - start
            if turn >= 0:  # the first run makes what the others find
                taken.append(seconds)
            size = sum(made.nbytes for made in operator.made)
            held.append((size, result))
            holding += size
            del run, result
            while holding > _HELD:
                holding -= held.popleft()[0]
    return [median(taken) for taken in times]


def workspace_of(run: Callable[[], object]) -> int:
    """Return the bytes that an operator holds at its most, beyond what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    del result
    changes = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        most = max(most, live)
    return max(most - max(live, 0), 0)
