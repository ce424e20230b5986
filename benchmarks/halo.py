"""The exchange of halos alone, with packing, against MPI's own Sendrecv of as many bytes.

Bytes that have just been written, as halos are, lie in the cache of the core that wrote them, and
have to be fetched from there. Bytes that were sent before and have not changed lie in the
receiver's cache already. There is a bound for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from benchmarks.measuring.report import Row, over
from benchmarks.measuring.settings import Settings, by, chain
from benchmarks.measuring.turns import alternate
from distconv.comm.transfer import Transfer
from distconv.geometry.index_maps import Same, Window
from distconv.geometry.plan import Plan, make_plan
from distconv.grid.process_grid import ProcessGrid
from distconv.planning.scaling import Contender
from distconv.planning.table import byte_size
from distconv.tensor.dist_tensor import DistTensor

if TYPE_CHECKING:
    from mpi4py import MPI

ROW = 16 * 2**10
"""Elements of a message, 64 KiB, from which on the target holds."""

CASES = tuple(
    (axis, channels, extent)
    for axis in ("height", "width")
    for channels, extent in ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (512, 2048))
)
"""The axis along which the plane is cut, its channels, and its extent along the other."""

THICKNESS = 8
"""Rows or columns of every rank's block."""


def halos(settings: Settings, cases: Sequence[tuple[str, int, int]] = CASES) -> Iterator[Row]:
    """Yield two rows for each case, on chains of ranks whatever the settings; all ranks call it."""
    for axis, channels, extent in cases:
        grid = chain(axis)
        block, plane = (
            (1, channels, *((n, extent) if axis == "height" else (extent, n)))
            for n in (THICKNESS, THICKNESS * grid.size)
        )
        x = DistTensor.from_local(torch.randn(block), grid)
        plan = plan_of(x)
        runs = exchange(x, plan), sendrecv(plan, grid), sendrecv(plan, grid, written=False)
        sides = [Contender(run, settings.threads) for run in runs]
        times = alternate(grid.comm, sides, settings.seconds)
        elements = channels * extent
        case = f"{byte_size(4 * elements)} each way, {axis} cut"
        configuration = settings.configuration(grid, f"{by(plane)}, 3x3")
        target = 1.3 if elements >= ROW else None
        row = "halo", case, configuration
        yield over(row, "over Sendrecv of bytes just written", times[0], times[1], target)
        yield over(row, "over Sendrecv of the same bytes again", times[0], times[2], None)


def plan_of(x: DistTensor) -> Plan:
    """Return the plan by which a 3x3 convolution of `x` with padding 1 exchanges its halos."""
    window = Window(3, padding=(1, 1))
    needs = tuple(window if axes else Same() for axes in x.cuts)
    return make_plan(x.grid.topology, x.grid.rank, tuple(x.shape), x.cuts, x.cuts, needs)


def exchange(x: DistTensor, plan: Plan) -> Callable[[], None]:
    """Pack, send, receive and wait, as an overlapped convolution does."""

    def run() -> None:
        Transfer(plan, x.grid).start_forward(x.shard).wait()

    return run


def sendrecv(plan: Plan, grid: ProcessGrid, *, written: bool = True) -> Callable[[], None]:
    """Return a function that moves as many bytes between the same ranks, always in the same memory.

    On a chain of ranks, pairs whose lower rank is even go first, so that nobody waits in line.

    Parameters
    ----------
    written: whether to write the bytes anew before each call, as packing does.
    """
    sends = {r.peer: r.size for r in plan.sends}
    receives = {r.peer: r.size for r in plan.receives}
    pairs = sorted(sends.keys() | receives.keys(), key=lambda peer: min(peer, grid.rank) % 2)
    messages = [
        (peer, torch.ones(sends[peer]).numpy(), torch.ones(receives[peer]).numpy())
        for peer in pairs
    ]
    sources = [leaving.copy() for _, leaving, _ in messages]
    comm: MPI.Intracomm = grid.comm

    def run() -> None:
        for source, (peer, leaving, arriving) in zip(sources, messages, strict=True):
            if written:
                leaving[:] = source
            comm.Sendrecv(leaving, peer, 0, arriving, peer, 0)

    return run
