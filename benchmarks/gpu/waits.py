"""The calls of a step at which the host waits for the GPU, as torch's profiler hears of them.

It hears of the runtimes of Nvidia, by CUPTI, and of AMD, whose calls are named alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from distconv.device.kinds import profiler_activities

_STEP = "distconv.benchmarks.gpu.step"
_CALL = re.compile(r"(cu|cuda|hip)[A-Z]")
_WAITS = re.compile(
    r"(?:cu|cuda|hip)(\w*Synchronize|(Mem(cpy|(Host)?Alloc|Free)|Malloc|HostAlloc|Free)(?!\w*Async))"
)


def calls_of(step: Callable[[], object]) -> Counter[str]:
    """Count the calls of the GPU's runtime and driver within a step, by any thread."""
    with profile(activities=profiler_activities()) as record:
        with record_function(_STEP):
            step()
    # An annotation is shown on the GPU as well.
    events = [e for e in record.events() if e.device_type == DeviceType.CPU]
    (mark,) = (e.time_range for e in events if e.name == _STEP)
    within = (e for e in events if mark.start <= e.time_range.start <= mark.end)
    return Counter(e.name for e in within if _CALL.match(e.name))


def waits_in(calls: Counter[str]) -> dict[str, int]:
    """Select the calls at which the host waits, or may, as allocations do while kernels run."""
    return {name: n for name, n in sorted(calls.items()) if _WAITS.match(name)}


def launches_in(calls: Counter[str]) -> int:
    """Return the number of kernels, copies and fillings that calls give to the GPU."""
    return sum(n for name, n in calls.items() if re.search("Launch|Memcpy|Memset", name))


def waits(name: str, step: Callable[[], object]) -> str:
    """Say where the host waits in a step, and how much it launches.

    A few steps come before, for what is made only once.

    Raises
    ------
    RuntimeError
        When the profiler hears of no calls at all, and so proves nothing.
    """
    for _ in range(3):
        step()
    calls = calls_of(step)
    if not calls:
        raise RuntimeError(
            "torch's profiler hears of no calls of CUDA or HIP; CUPTI is missing or in use"
        )
    found = waits_in(calls)
    told = ", ".join(f"{n} {call}" for call, n in found.items()) or "nowhere"
    launched = f"{launches_in(calls)} launches and copies of {calls.total()} calls"
    return f"{name}: the host waits {'at ' if found else ''}{told}; {launched}"
