"""Whether predictions know what all ranks together compute, where there are more ranks than cores.

`mpiexec -n 8 python -m benchmarks.total_compute FOLDER` writes `total-compute.md` into the folder,
for the machine that `benchmarks.predictions` has measured there, with a rank a core. Ranks that
share a core wait for it, so that the time of a step says nothing. Compared is how long their
processes have had the cores in a step, outside of messages and of waiting, added up over all ranks,
with the predicted kernels and Python of all ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from benchmarks.measuring.network import Network
from benchmarks.measuring.settings import by
from benchmarks.predictions import (
    CASES,
    MACHINE,
    MEDIAN_ERROR,
    WORST_ERROR,
    Errors,
    Make,
    loss_of,
    on_grid,
    table_of,
)
from benchmarks.record import machine as describe_machine
from distconv.grid.communicators import carried_by
from distconv.planning import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.prediction import in_words
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, HostWork
from distconv.planning.table import table
from distconv.planning.timeline import host_seconds
from distconv.planning.timing import sleep_until_all_are_here
from distconv.transport.interface import Message, Request
from distconv.transport.watched import WrappedTransport

STEPS = 7
"""How many steps of a case are timed; the median counts."""

GRIDS: dict[str, tuple[dict[str, int], ...]] = {
    "mesh 1K, 256^2": ({"height": 4}, {"sample": 2, "height": 2, "width": 2}),
    "mesh 2K, 512^2": ({"height": 2, "width": 2}, {"sample": 2, "height": 4}),
    "CosmoFlow, average pooling, 64^3": ({"depth": 4}, {"height": 2, "width": 2, "depth": 2}),
    "CosmoFlow, maximum pooling, 32^3": ({"sample": 4}, {"sample": 4, "depth": 2}),
    "3-D U-Net, 32^3": ({"sample": 2, "depth": 2}, {"height": 2, "width": 2, "depth": 2}),
    "ResNet-50 / 2, 128^2": ({"sample": 4}, {"sample": 2, "height": 2, "width": 2}),
    "ResNet-50 / 4, 224^2": ({"height": 2, "width": 2}, {"sample": 2, "height": 2, "width": 2}),
}
"""By network, the grids of four and of eight ranks on which it is trained."""


class _Metered(WrappedTransport):
    """A carrier that notes how long this process has had a core within it; see `Transport`."""

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start messages."""
        with _counted():
            return _MeteredRequest(self.carrier.exchange(arriving, leaving, tag))

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start adding up."""
        with _counted():
            return _MeteredRequest(self.carrier.all_reduce(tensor, group))

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`."""
        with _counted():
            return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        with _counted():
            self.carrier.broadcast(tensor, group)


class _MeteredRequest:
    def __init__(self, request: Request):
        self._request = request

    def wait(self) -> None:
        """Wait for the carrier's request."""
        with _counted():
            self._request.wait()


_within = 0.0
"""The seconds that this process has had a core within carriers."""


@contextmanager
def _counted() -> Iterator[None]:
    global _within
    begun = time.thread_time()
    try:
        yield
    finally:
        _within += time.thread_time() - begun


class Total(NamedTuple):
    """One case on one grid; seconds of a core, of all ranks together."""

    network: Network
    grid: dict[str, int]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Return by how much too much is predicted, as a share of the measured seconds."""
        return self.predicted / self.measured - 1


def measured(make: Make, comm: MPI.Intracomm) -> float:
    """Return the seconds of a core in a step of all ranks outside of messages."""
    taken = []
    with carried_by(lambda transport: _Metered(transport.carrier)):
        step = make()
        for number in range(2 + STEPS):
            comm.Barrier()
            begun, within = time.thread_time(), _within
            step()
            mine = time.thread_time() - begun - (_within - within)
            if number >= 2:
                taken.append(comm.allreduce(mine))
    return median(taken)


def predicted(network: Network, extents: dict[str, int], machine: Machine) -> float:
    """Return the predicted seconds of kernels and Python of all ranks."""
    loss = loss_of(network)
    module = network.make(network.shape[2:])
    recordings = [
        record_step(module, [network.shape], extents, rank=rank, loss=loss)
        for rank in range(prod(extents.values()))
    ]
    times = OperatorTimes(machine, machine.at_once(len(recordings)))
    times.prepare(operator for r in recordings for operator in r.operators)
    total = 0.0
    for event in (event for r in recordings for event in r.events):
        if isinstance(event, Compute):
            total += times[event.operator]
        elif isinstance(event, HostWork):
            total += host_seconds(event, machine)
    return total


def run(folder: Path) -> None:
    """Measure and predict all cases, and write the page; all ranks call it."""
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    assert GRIDS.keys() <= {network.name for network, _ in CASES}
    machine = Machine.load(folder / MACHINE)
    totals = []
    for network, _ in CASES:
        for extents in GRIDS.get(network.name, ()):
            seconds = on_grid(network, extents, measured)
            if world.rank == 0:
                assert seconds is not None
                totals.append(
                    Total(network, extents, seconds, predicted(network, extents, machine))
                )
                print(
                    f"{network.name} {in_words(extents)}: {totals[-1].error:+.1%}", file=sys.stderr
                )
            sleep_until_all_are_here(world)
    if world.rank == 0:
        (folder / "total-compute.md").write_text(page(totals))


def page(totals: Sequence[Total]) -> str:
    """Return the page of results."""
    errors = Errors("computation", [t.error for t in totals], MEDIAN_ERROR, WORST_ERROR)
    rows: list[tuple[str, ...]] = [("network", "shape", "grid", "measured", "predicted", "error")]
    for t in totals:
        name, shape = t.network.name, by(t.network.shape)
        ms = (f"{x * 1e3:.0f}" for x in (t.measured, t.predicted))
        rows.append((name, shape, in_words(t.grid), *ms, f"{t.error:+.1%}"))
    return "\n".join(
        (
            "# Predicted and measured computation on four and eight ranks\n",
            "Written by `python -m benchmarks.total_compute`; times in ms of a core, of all ranks "
            "of a step together, without messages and waiting.\n",
            f"```\n{describe_machine()}\n```\n",
            f"```\n{table_of([errors])}\n```\n",
            f"```\n{table(rows, right=(3, 4, 5))}\n```\n",
        )
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]))
