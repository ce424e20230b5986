"""The cases of a scaling study run in turns, in one job of the largest size, and predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.alternation import SHORTEST, Contender, timed, warm_up
from distconv.planning.machine import Machine
from distconv.planning.prediction import predict
from distconv.planning.recorded_step import LOSSES, OPTIMIZERS
from distconv.planning.scaling import Case, Study
from distconv.tensor.dist_tensor import DistTensor, local_box
from distconv.tensor.redistribution import cuts_of_layout
from distconv.tensor.sample_format import in_sample_format
from distconv.transport.communicator import ObjectCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

Make = Callable[[], nn.Module]


def measure(
    study: Study,
    make: Make,
    comm: MPI.Intracomm | ObjectCommunicator,
    rounds: int,
    *,
    threads: int = 1,
    step: Mapping[str, Any] | None = None,
    finished: Callable[[int], object] = lambda rounds: None,
) -> None:
    """Run the measured cases until each has so many rounds; all ranks of `comm` call it.

    `comm` has all ranks of the job. A case runs on its first ranks, on a communicator of their own,
    while the others sleep. In each round every case is timed once, every second round in reverse;
    a case that takes less than 10 ms is repeated. A step is forward, loss, backward and optimizer,
    on random numbers. All cases are in memory at once: parameters and inputs, that is.

    Parameters
    ----------
    study: the same on all ranks, which gets the times on all of them.
    make: makes the module, the same on every rank and each time.
    threads: of every rank.
    step: options of `predict` that say what the step is: dtype, layout, layouts, loss, optimizer.
    finished: is called on every rank after each round, with the number of all complete ones.

    Raises
    ------
    ValueError
        On every rank, where a case has more ranks than `comm`.
    """
    cases = study.measured
    most = max((case.ranks for case in cases), default=1)
    if most > comm.size:
        raise ValueError(
            f"the largest case has {most} ranks, and {comm.size} have been started; start "
            f"mpiexec -n {most} python -m distconv scale ..."
        )
    if study.rounds >= rounds or not cases:
        return
    sides = []
    for case in cases:
        mine = comm.rank < case.ranks
        run = step_of(case, make, **(step or {})) if mine else _sleep
        sides.append(Contender(run, threads, ranks=case.ranks))
    once = warm_up(comm, sides)
    repeats = [ceil(SHORTEST / seconds) for seconds in once]
    for number in range(study.rounds, rounds):
        order = range(len(cases)) if number % 2 == 0 else reversed(range(len(cases)))
        took = {i: timed(comm, sides[i], repeats[i]) for i in order}
        for i, case in enumerate(cases):
            case.seconds.append(took[i])
        finished(study.rounds)


def step_of(
    case: Case,
    make: Make,
    *,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
    layouts: Mapping[str, Layout] | None = None,
    loss: str = "mse",
    optimizer: str = "sgd",
) -> Callable[[], None]:
    """Return a training step of a case, as `predict` has it; its ranks, the first ones, call it."""
    extents: dict[str, Any] = dict(case.grid)
    grid = ProcessGrid(tuple(range(case.ranks)), **extents)
    module = make()
    if dtype is None:
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    module = parallelize(module, grid, layouts=layouts)
    parameters = list(module.parameters())
    taken = OPTIMIZERS[optimizer](parameters) if parameters else None
    inputs = []
    for shape in case.shapes:
        # The same numbers in every block, as ranks may hold copies of one.
        numbers = torch.Generator().manual_seed(0)
        box = local_box(shape, grid, layout).shape
        cuts = cuts_of_layout(layout, grid, len(shape))
        mine = torch.randn(box, dtype=dtype, generator=numbers)
        mine = in_sample_format(mine, shape, cuts, grid)
        inputs.append(DistTensor.from_local(mine, grid, layout, shape=shape))

    def step() -> None:
        value = LOSSES[loss](module(*inputs))
        if taken is not None:
            value.backward()
            taken.step()
            taken.zero_grad()
        if grid.device.type == "cuda":
            torch.cuda.synchronize(grid.device)

    return step


def _sleep() -> None:
    """Stand for a rank that is not in a case."""


def predict_all(
    study: Study,
    make: Make,
    machine: Machine,
    *,
    step: Mapping[str, Any] | None = None,
    predicted: Callable[[Case], object] = lambda case: None,
) -> None:
    """Predict the cases that have no prediction yet; one process calls it, while others sleep.

    On a measured machine, that times the local operators which it has no times for, so nothing else
    may run.

    Raises
    ------
    ValueError, RuntimeError
        As `predict` does, for the first case that cannot be predicted.
    """
    for case in study.cases:
        if case.predicted is None:
            guess = predict(make(), case.shapes, case.grid, machine, **(step or {}))
            case.predicted = guess.seconds
            predicted(case)
