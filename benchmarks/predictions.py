"""How right predictions are: the time and memory of training steps, predicted and measured.

`mpiexec -n 2 python -m benchmarks.predictions FOLDER` measures the machine, then case by case
measures a network on a grid and predicts it, and writes `predictions.md` into the folder. What has
been done is kept in `predictions.jsonl` there, and is not done again: remove it, and the machine
beside it, to begin anew. Words behind the folder choose networks whose names begin with them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from benchmarks.measuring.memory import peak_of
from benchmarks.measuring.network import (
    Network,
    cut_sample,
    result_on_meta,
    sgd_step,
    target_cuts,
)
from benchmarks.measuring.settings import by
from benchmarks.measuring.turns import alternate
from benchmarks.networks import COSMOFLOW, MESH, UNET3D, cosmoflow, resnet50
from benchmarks.record import machine as describe_machine
from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning import Machine, calibrate, predict
from distconv.planning.prediction import in_words
from distconv.planning.scaling import Contender, sleep_until_all_are_here, spread
from distconv.planning.table import byte_size, table
from examples.mesh_tangling.network import mesh_tangling_2k

MACHINE = "predictions-machine.json"
"""The file of the machine on which all is measured."""

SECONDS = 1.0
"""About how long the steps of one case are timed before it is predicted, and again afterwards."""

MEDIAN_ERROR, WORST_ERROR, MEMORY_ERROR, CHOICE = 0.10, 0.25, 0.05, 1.05
"""What the errors should be at most; and the time on the planner's grid over that on the best."""


class Case(NamedTuple):
    """A network, and the grids on which it is trained."""

    network: Network
    grids: tuple[dict[str, int], ...]


def sized(network: Network, name: str, samples: int, extent: int) -> Network:
    """Return a network for so many samples of other sides, under a name that tells these."""
    _, channels, *sides = network.shape
    shape = (samples, channels, *len(sides) * (extent,))
    return network._replace(name=f"{name}, {extent}^{len(sides)}", shape=shape)


def resnet(divisor: int) -> Network:
    """Return ResNet-50, whose channels are divided by `divisor`."""
    return Network(
        "ResNet-50",
        lambda spatial: resnet50(100, divisor),
        (1, 3, 224, 224),
        lambda made: torch.randint(100, (made[0],)),
        F.cross_entropy,
    )


MESH_2K = MESH._replace(make=lambda spatial: mesh_tangling_2k(0.25, max(spatial)))
MAXIMUM = COSMOFLOW._replace(make=partial(cosmoflow, form="maximum"))

ONE: dict[str, int] = {}
_PLANE = ({"sample": 2}, {"height": 2}, {"width": 2})
_VOLUME = (*_PLANE, {"depth": 2})

CASES = (
    Case(sized(MESH, "mesh 1K", 2, 256), (ONE, *_PLANE)),
    Case(sized(MESH, "mesh 1K", 1, 512), (ONE, {"height": 2})),
    Case(sized(MESH_2K, "mesh 2K", 2, 512), (ONE, *_PLANE)),
    Case(sized(COSMOFLOW, "CosmoFlow, average pooling", 2, 64), (ONE, *_VOLUME)),
    Case(sized(MAXIMUM, "CosmoFlow, maximum pooling", 4, 32), (ONE, {"sample": 2}, {"depth": 2})),
    Case(sized(UNET3D, "3-D U-Net", 4, 32), (ONE, *_VOLUME)),
    Case(sized(UNET3D, "3-D U-Net", 1, 64), (ONE, {"depth": 2})),
    Case(sized(resnet(2), "ResNet-50 / 2", 8, 128), (ONE, *_PLANE)),
    Case(sized(resnet(4), "ResNet-50 / 4", 2, 224), (ONE, {"sample": 2}, {"height": 2})),
)


class Result(NamedTuple):
    """One case on one grid; seconds, and bytes."""

    network: str
    shape: list[int]
    grid: dict[str, int]
    measured: float
    low: float
    high: float
    predicted: float
    peak_measured: int
    peak_predicted: int

    @property
    def error(self) -> float:
        """Return by how much the predicted time is too long, as a share of the measured one."""
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        """Return by how much the predicted memory is too large, as a share of the measured one."""
        return self.peak_predicted / self.peak_measured - 1


T = TypeVar("T")
Make = Callable[[], Callable[[], None]]
"""Makes a network with its sample, and returns its step."""


def on_grid(
    network: Network, extents: dict[str, int], measure: Callable[[Make, MPI.Intracomm], T]
) -> T | None:
    """Return `measure(make, comm)` on the ranks of a grid, the first ones of MPI.

    All ranks call it; those that are not on the grid sleep, and get None.
    """
    world = MPI.COMM_WORLD
    ranks = prod(extents.values())
    comm: Any = world.Split(0 if world.rank < ranks else 1)
    result = None
    if world.rank < ranks:
        axes: dict[str, Any] = dict(extents)
        grid = ProcessGrid(comm, **axes, device="cpu")

        def make() -> Callable[[], None]:
            torch.manual_seed(0)
            module = parallelize(network.make(network.shape[2:]), grid)
            return sgd_step(network, module, *cut_sample(network, grid))

        result = measure(make, comm)
    sleep_until_all_are_here(world)
    comm.Free()
    return result


def peak(make: Make, comm: MPI.Intracomm) -> int:
    """Return the peak bytes of the fullest rank."""
    return comm.allreduce(peak_of(make).whole, MPI.MAX)


def times(make: Make, comm: MPI.Intracomm) -> list[float]:
    """Return the seconds of steps on the slowest rank."""
    return alternate(comm, [Contender(make())], SECONDS)[0]


def loss_of(network: Network) -> Callable[[Any], Tensor]:
    """Return the loss of a network for `predict`, with a target without elements."""
    target = network.target(tuple(result_on_meta(network, network.shape).shape))

    def loss(output: Any) -> Tensor:
        grid = output.grid
        layout = Layout.of(target_cuts(target.dim(), output.dim(), grid))
        return network.loss(output, grid.tensor(tuple(target.shape), layout, target.dtype))

    return loss


def run(folder: Path, cases: Sequence[Case] = CASES) -> None:
    """Measure and predict what has not been done, and write the page; all ranks call it."""
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    path, file = folder / "predictions.jsonl", folder / MACHINE
    lines = path.read_text().splitlines() if path.exists() else []
    done = world.bcast([Result(**json.loads(line)) for line in lines])
    if not file.exists():
        machine = calibrate()
        if world.rank == 0:
            machine.save(file)
    world.Barrier()
    machine = Machine.load(file)
    for network, grids in cases:
        for extents in grids:
            if any((r.network, r.grid) == (network.name, extents) for r in done):
                continue
            start = time.perf_counter()
            bytes_of_step = on_grid(network, extents, peak)
            before = on_grid(network, extents, times)
            if world.rank == 0:
                p = predict(
                    network.make(network.shape[2:]),
                    network.shape,
                    extents,
                    machine,
                    loss=loss_of(network),
                )
            sleep_until_all_are_here(world)
            after = on_grid(network, extents, times)
            if world.rank == 0:
                assert bytes_of_step and before and after
                middle, low, high = spread(before + after)
                done.append(
                    Result(
                        *(network.name, list(network.shape), extents, middle, low, high),
                        *(p.seconds, bytes_of_step, p.peak),
                    )
                )
                with path.open("a") as kept:
                    print(json.dumps(done[-1]._asdict()), file=kept)
                machine.save(file)
                took = time.perf_counter() - start
                print(f"{told(done[-1])}  ({took:.1f} s)", file=sys.stderr, flush=True)
            sleep_until_all_are_here(world)
    if world.rank == 0:
        (folder / "predictions.md").write_text(page(done))


def told(r: Result) -> str:
    """Return a result in a line."""
    return (
        f"{r.network} {in_words(r.grid)}: {r.measured * 1e3:.1f} ms, predicted "
        f"{r.predicted * 1e3:.1f} ({r.error:+.1%}); {byte_size(r.peak_measured)}, predicted "
        f"{byte_size(r.peak_predicted)} ({r.memory_error:+.1%})"
    )


def errors(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the quartiles of errors as rows, with their targets and verdicts."""
    rows: list[tuple[str, ...]] = [
        ("", "lower quartile", "median", "upper quartile", "worst", "target", "verdict")
    ]
    for kind, values, middle, most in (
        ("time", [abs(r.error) for r in results], MEDIAN_ERROR, WORST_ERROR),
        ("memory", [abs(r.memory_error) for r in results], MEMORY_ERROR, MEMORY_ERROR),
    ):
        s, worst = spread(values), max(values)
        quartiles = [f"{x:.1%}" for x in (s.low, s.median, s.high, worst)]
        verdict = "met" if s.median <= middle and worst <= most else "missed"
        rows.append((kind, *quartiles, f"median {middle:.0%}, worst {most:.0%}", verdict))
    return rows


def page(results: Sequence[Result]) -> str:
    """Return the page of results: every case, quartiles of the errors, and what was chosen."""
    heading = ("network", "shape", "grid", "measured", "quartiles", "predicted", "error")
    rows = [(*heading, "memory", "predicted", "error")]
    for r in results:
        ms = [f"{x * 1e3:.1f}" for x in (r.measured, r.low, r.high, r.predicted)]
        rows.append(
            (
                *(r.network, by(r.shape), in_words(r.grid), ms[0], f"{ms[1]} to {ms[2]}", ms[3]),
                *(f"{r.error:+.1%}", byte_size(r.peak_measured), byte_size(r.peak_predicted)),
                f"{r.memory_error:+.2%}",
            )
        )
    return "\n".join(
        (
            "# Predicted and measured training steps\n",
            "Written by `python -m benchmarks.predictions`; times in ms of a step on the slowest "
            "rank, with one core for each rank, and memory of the rank that needs most.\n",
            f"```\n{describe_machine()}\n```\n",
            f"```\n{table(errors(results), right=(1, 2, 3, 4))}\n```\n",
            f"```\n{table(rows, right=(3, 4, 5, 6, 7, 8, 9))}\n```\n",
            "## The planner's choice on 2 ranks\n",
            f"```\n{table(choices(results), right=(2, 4, 5))}\n```\n",
        )
    )


def choices(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return for each network the grid predicted to be the best, beside the best one measured."""
    rows: list[tuple[str, ...]] = [
        ("network", "chosen", "measured", "best", "measured", "over the best", "verdict")
    ]
    for name, shape in dict.fromkeys((r.network, tuple(r.shape)) for r in results):
        several = [r for r in results if r.network == name and tuple(r.shape) == shape and r.grid]
        if len(several) < 2:
            continue
        chosen = min(several, key=lambda r: r.predicted)
        best = min(several, key=lambda r: r.measured)
        over = chosen.measured / best.measured
        rows.append(
            (
                *(name, in_words(chosen.grid), f"{chosen.measured * 1e3:.1f}"),
                *(in_words(best.grid), f"{best.measured * 1e3:.1f}", f"{over:.3f}"),
                "met" if over <= CHOICE else "missed",
            )
        )
    return rows


if __name__ == "__main__":
    run(
        Path(sys.argv[1]),
        [c for c in CASES if c.network.name.startswith(tuple(sys.argv[2:] or [""]))],
    )
