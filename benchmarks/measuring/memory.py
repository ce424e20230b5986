"""The most memory that tensors take in a training step of one rank, against serial torch's share.

Counted by torch's profiler, which hears of every allocation and release of torch's CPU allocator,
those inside of operators too. So the number does not depend on what malloc keeps or on when the
system counts pages, and is the same in every run. It does not see what MPI and Python allocate.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measuring.network import Network, cut_sample, sample, sgd_step
from benchmarks.measuring.report import Row, of_bytes
from benchmarks.measuring.settings import Settings, by
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.scaling import sleep_until_all_are_here
from distconv.tools.explain import explain
from distconv.transport.interface import release_idle

OVER_SHARE = 1.05
"""The most that a rank should need, of the serial peak divided by the ranks, beside its halos."""
_STEP = "benchmarks.measuring.step"


class Peak(NamedTuple):
    """Bytes of tensors at their most in a step: in all, and beyond those that live all through it.

    Parameters live all through it; gradients do not.
    """

    whole: int
    step: int


def memory(settings: Settings, networks: Sequence[Network]) -> Iterator[Row]:
    """Yield two rows for each network; all ranks call it."""
    for network in networks:
        grid = settings.grid(len(network.shape))
        mine = peak_of(partial(_distributed, network, grid))
        ranks = Peak(*(max(grid.comm.allgather(bytes)) for bytes in mine))
        alone = peak_of(partial(_serial, network)) if grid.rank == 0 else None
        sleep_until_all_are_here(grid.comm)
        serial: Peak = grid.comm.bcast(alone)
        plan = explain(network.make(network.shape[2:]), network.shape, grid, show=False)
        halos = sum(layer.halo_bytes for layer in plan.layers)
        where = *network.remarks, by(network.shape)
        for measure, subject, whole in (
            ("peak over share of serial peak", ranks.whole, serial.whole),
            ("the same, without what lives all through the step", ranks.step, serial.step),
        ):
            share = whole / grid.size
            row = "memory", network.name, settings.configuration(grid, *where)
            yield of_bytes(row, measure, subject, share, OVER_SHARE + halos / share)


def _distributed(network: Network, grid: ProcessGrid) -> Callable[[], None]:
    module = parallelize(network.make(network.shape[2:]), grid)
    return sgd_step(network, module, *cut_sample(network, grid))


def _serial(network: Network) -> Callable[[], None]:
    return sgd_step(network, network.make(network.shape[2:]), *sample(network, network.shape))


def peak_of(make: Callable[[], Callable[[], object]]) -> Peak:
    """Return the peak memory of the second call of the step that `make` makes.

    Buffers of messages count, as idle ones of earlier steps are released first.
    """
    gc.collect()
    release_idle()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step = make()
        step()
        with record_function(_STEP):
            step()
        del step
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    (mark,) = (e for e in events if e["name"] == _STEP and e.get("ph") == "X")
    # They are numbered thread by thread, and within each in their order, also at the same time.
    changes = sorted(
        ((e["ts"], e["args"]) for e in events if e["name"] == "[memory]"),
        key=lambda change: (change[0], change[1]["Ev Idx"]),
    )
    live: dict[int, int] = {}
    total = least = most = 0
    for when, change in changes:
        # A release tells its size as a negative number; older memory is ignored.
        if change["Bytes"] > 0:
            live[change["Addr"]] = change["Bytes"]
            total += change["Bytes"]
        else:
            total -= live.pop(change["Addr"], 0)
        if when < mark["ts"]:
            least = most = total
        elif when <= mark["ts"] + mark["dur"]:
            least, most = min(least, total), max(most, total)
    return Peak(most, most - least)
