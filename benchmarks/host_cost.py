"""What a rank's host does before a layer runs, on grids of 16 to 65,536 ranks that are not there.

`python -m benchmarks.host_cost benchmarks/results/host.md` writes the table, in under a minute, in
one process. Everything is timed with empty caches, as in the first step. Beside the time stands the
number of Python functions that were called, which is the same in every run, on any machine.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import isqrt
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distconv.geometry.halo import make_boundary, needs_halo
from distconv.geometry.index_maps import Same, TransposedWindow, Window
from distconv.geometry.layout import default_cuts
from distconv.geometry.plan import make_plan
from distconv.geometry.topology import AXES, Topology
from distconv.grid.devices import choose, make_offer
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.table import markdown
from distconv.tensor.dist_tensor import DistTensor, local_box

RANKS = 16, 256, 4096, 65536
SIZE = 1 << 19
"""Rows, and columns, of the plane that is cut, on all grids; eight each on the largest."""


class Case(NamedTuple):
    """A call that a rank in the middle of a grid makes, which is timed."""

    name: str
    run: Callable[[], object]


class Cost(NamedTuple):
    """What one call takes with empty caches."""

    seconds: float
    functions: int
    """Calls of Python functions."""


def chain(ranks: int) -> dict[str, int]:
    """Return a grid of all ranks along one axis."""
    return {"height": ranks}


def square(ranks: int) -> dict[str, int]:
    """Return a grid with as many ranks in height as in width."""
    return {"height": isqrt(ranks), "width": isqrt(ranks)}


def geometry(extents: dict[str, int]) -> Iterator[Case]:
    """Yield the plans and decisions of windowed layers on a grid."""
    topology = Topology(tuple(extents.get(axis, 1) for axis in AXES))
    rank = topology.rank({axis: topology.extent(axis) // 2 for axis in AXES})
    cuts = default_cuts(4, topology)
    parts = tuple(map(topology.parts, cuts[2:]))
    shape = 1, 8, SIZE, SIZE
    same, strided = Window(3, padding=(1, 1)), Window(5, 2, padding=(2, 2))
    spread = TransposedWindow(4, 2, 1, 1)

    def of(window: Any) -> tuple[int, ...]:
        return (1, 8, *(window.output_size(SIZE),) * 2)

    for name, window in (("3x3", same), ("5x5, stride 2", strided)):
        two = window, window
        made = of(window)
        needs = (Same(), Same(), *two)
        yield Case(f"plan of {name}", partial(make_plan, topology, rank, shape, cuts, cuts, needs))
        yield Case(f"whether {name} needs halos", partial(needs_halo, two, (SIZE, SIZE), parts))
        boundary = partial(make_boundary, topology, rank, shape, made, cuts, two)
        yield Case(f"boundary of {name}", boundary)
    yield Case(
        "whether transposed 4x4 needs halos",
        lambda: needs_halo((spread, spread), (SIZE, SIZE), parts),
    )
    yield Case(
        "boundary of transposed 4x4",
        lambda: make_boundary(topology, rank, shape, of(spread), cuts, (spread, spread)),
    )


def tensors(extents: dict[str, int]) -> Iterator[Case]:
    """Yield a program's calls that make and convolve tensors without elements on a grid."""
    grid: Any = DryRunGrid(extents)
    shape = 1, 8, SIZE, SIZE
    box = local_box(shape, grid)
    mine = torch.empty(box.shape, device="meta")
    weight = torch.empty(8, 8, 3, 3, device="meta")
    x = DistTensor.from_local(mine, grid, shape=shape)
    yield Case("local_box", lambda: local_box(shape, grid))
    yield Case("from_local(..., shape=...)", lambda: DistTensor.from_local(mine, grid, shape=shape))
    yield Case("conv2d, 3x3, forward", lambda: F.conv2d(x, weight, padding=1))


def cases(extents: dict[str, int]) -> Iterator[Case]:
    """Yield all calls that are measured on a grid."""
    yield from geometry(extents)
    yield from tensors(extents)


def empty_caches() -> None:
    """Forget every plan and decision that has been made."""
    for name, module in list(sys.modules.items()):
        if name.startswith("distconv."):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name and hasattr(value, "cache_clear"):
                    value.cache_clear()


def functions_called(run: Callable[[], object]) -> int:
    """Return how many Python functions a call runs, with empty caches."""
    count = 0

    def hear(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    empty_caches()
    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def cost(run: Callable[[], object], rounds: int = 15) -> Cost:
    """Return the median time of a call with empty caches, and its work."""
    times = []
    run()
    gc.disable()
    try:
        for _ in range(rounds):
            empty_caches()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return Cost(median(times), functions_called(run))


def agreement(ranks: int) -> float:
    """Return the seconds in which a rank chooses devices from the gathered offers of all ranks."""
    offers = [make_offer("cpu", "mpi", None, True)] * ranks
    start = time.perf_counter()
    choose(offers)
    return time.perf_counter() - start


HEADING = f"""# What the host of a rank does, by the size of the grid

Written by `python -m benchmarks.host_cost benchmarks/results/host.md`, on dry grids, with empty
caches, for planes of {SIZE}^2. Microseconds are medians on one core. The number after the comma is
the number of called Python functions, which does not depend on the machine.
"""

MAKING = """
## Making a grid

The first grid on a set of ranks creates three communicators, gathers small objects twice and
broadcasts one. Every further grid on these ranks gathers once (`tests/grid/test_host_cost.py`
counts the calls). Gathered lists have an entry for each rank, so this work grows with the ranks; it
occurs once a program. Choosing the devices then takes
"""


def page() -> str:
    """Return the results as a page."""
    heading = ["", *(f"{ranks:,} ranks" for ranks in RANKS)]
    parts = [HEADING]
    for title, grid in (("Along one axis", chain), ("As many in height as in width", square)):
        rows = [heading]
        for row in zip(*(cases(grid(ranks)) for ranks in RANKS), strict=True):
            costs = [cost(case.run) for case in row]
            times = (f"{c.seconds * 1e6:.0f} us, {c.functions}" for c in costs)
            rows.append([row[0].name, *times])
        parts.append(f"## {title}\n\n{markdown(rows)}\n")
    made = ["once a grid", *(f"{agreement(ranks) * 1e3:.2f} ms" for ranks in RANKS)]
    return "\n".join([*parts, MAKING.lstrip(), markdown([heading, made]), ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
