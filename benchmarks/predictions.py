"""How right predictions are: the time and memory of training steps, predicted and measured.

`mpiexec -n 2 python -m benchmarks.predictions FOLDER` measures the machine, then case by case
measures a network on a grid and predicts it, and writes `predictions.md` into the folder. What has
been done is kept in `predictions.jsonl` there, and is not done again: remove it, and the machine
beside it, to begin anew. Words behind the folder choose networks whose names begin with them.

Networks of MONAI and pytorchcv, for which nothing in distconv was tuned, take steps with options,
such as autocast. They are left out where these packages are not installed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from benchmarks.measuring.memory import peak_of
from benchmarks.measuring.network import (
    Network,
    cut_sample,
    result_on_meta,
    target_cuts,
)
from benchmarks.measuring.settings import by
from benchmarks.measuring.turns import alternate
from benchmarks.networks import COSMOFLOW, MESH, UNET3D, cosmoflow, resnet50
from benchmarks.record import machine as describe_machine
from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import no_sync, parallelize
from distconv.planning import Machine, calibrate, predict
from distconv.planning.prediction import in_words
from distconv.planning.recorded_step import OPTIMIZERS, with_checkpoints
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
    """A network, the grids on which it is trained, and the steps taken on each of them."""

    network: Network
    grids: tuple[dict[str, int], ...]
    steps: tuple[dict[str, Any], ...] = ({},)
    """Options of the step, as `predict` takes them; types by their names."""


def sized(network: Network, name: str, samples: int, extent: int) -> Network:
    """Return a network for so many samples of other sides, under a name that tells these."""
    _, channels, *sides = network.shape
    shape = (samples, channels, *len(sides) * (extent,))
    return network._replace(name=f"{name}, {extent}^{len(sides)}", shape=shape)


def of_package(path: str, shape: tuple[int, ...], **options: Any) -> Network:
    """Return a network of another package, made by the object at the dotted `path`."""
    package, name = path.rsplit(".", 1)

    def make(spatial: Sequence[int]) -> nn.Module:
        torch.manual_seed(0)
        return getattr(import_module(package), name)(**options)

    return Network(f"{name} of {path.split('.')[0]}, {by(shape[2:])}", make, shape)


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

_NETS = "monai.networks.nets"
_CV = "pytorchcv.models"
_RESIDUAL = of_package(
    f"{_NETS}.SegResNet", (2, 1, 32, 32, 32), init_filters=8, in_channels=1, out_channels=3
)
_UNET = of_package(
    f"{_NETS}.BasicUNet", (2, 1, 32, 48, 32), in_channels=1, features=(8, 8, 16, 32, 64, 8)
)
_MOBILENET = of_package(f"{_CV}.mobilenet.mobilenet_wd4", (8, 3, 224, 224), num_classes=10)
_SERESNET = of_package(f"{_CV}.seresnet.seresnet10", (2, 3, 224, 224), num_classes=10)
_ANYWHERE: tuple[dict[str, Any], ...] = (
    {},
    {"autocast": "bfloat16"},
    {"optimizer": "adam"},
    {"accumulate": 2},
    {"checkpoint": "blocks"},
    {"wire": "bfloat16"},
)
_OVER_SAMPLES: tuple[dict[str, Any], ...] = (
    {},
    {"shard": "zero2", "optimizer": "adamw"},
    {"shard": "zero3", "optimizer": "adamw"},
    {"shard": "zero3", "checkpoint": "blocks", "optimizer": "momentum"},
)

_UNTUNED = [
    network
    for package, networks in (("monai", (_RESIDUAL, _UNET)), ("pytorchcv", (_MOBILENET, _SERESNET)))
    if find_spec(package)
    for network in networks
]

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
    *(Case(network, ({"height": 2},), _ANYWHERE) for network in _UNTUNED),
    *(Case(network, ({"sample": 2},), _OVER_SAMPLES) for network in _UNTUNED),
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
    step: dict[str, Any]

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
    network: Network,
    extents: dict[str, int],
    step: Mapping[str, Any],
    measure: Callable[[Make, MPI.Intracomm], T],
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
            return step_on(network, grid, **step)

        result = measure(make, comm)
    sleep_until_all_are_here(world)
    comm.Free()
    return result


def step_on(
    network: Network,
    grid: ProcessGrid,
    *,
    checkpoint: str | Sequence[str] = (),
    optimizer: str = "sgd",
    autocast: str | None = None,
    accumulate: int = 1,
    **options: Any,
) -> Callable[[], None]:
    """Return a training step of a network on a grid, with the options of `record_step`."""
    module = with_checkpoints(network.make(network.shape[2:]), checkpoint)
    module = parallelize(module, grid, **options)
    taken = OPTIMIZERS[optimizer](module.parameters())
    x, y = cut_sample(network, grid)

    def backward() -> None:
        with nullcontext() if autocast is None else torch.autocast("cpu", type_of(autocast)):
            loss = network.loss(module(x), y)
        loss.backward()

    def step() -> None:
        taken.zero_grad()
        for _ in range(accumulate - 1):
            with no_sync(module):
                backward()
        backward()
        taken.step()

    return step


def type_of(name: str) -> torch.dtype:
    """Return torch's type of a name, such as "bfloat16"."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def options_of(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a step as `predict` takes them."""
    return {k: type_of(v) if k == "autocast" else v for k, v in step.items()}


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
    for network, grids, steps in cases:
        for extents, step in product(grids, steps):
            if any((r.network, r.grid, r.step) == (network.name, extents, step) for r in done):
                continue
            start = time.perf_counter()
            bytes_of_step = on_grid(network, extents, step, peak)
            before = on_grid(network, extents, step, times)
            if world.rank == 0:
                module, loss = network.make(network.shape[2:]), loss_of(network)
                options = options_of(step)
                p = predict(module, network.shape, extents, machine, loss=loss, **options)
            sleep_until_all_are_here(world)
            after = on_grid(network, extents, step, times)
            if world.rank == 0:
                assert bytes_of_step and before and after
                middle, low, high = spread(before + after)
                done.append(
                    Result(
                        *(network.name, list(network.shape), extents, middle, low, high),
                        *(p.seconds, bytes_of_step, p.peak, step),
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
    case = " ".join(filter(None, (r.network, in_words(r.grid), step_in_words(r.step))))
    return (
        f"{case}: {r.measured * 1e3:.1f} ms, predicted "
        f"{r.predicted * 1e3:.1f} ({r.error:+.1%}); {byte_size(r.peak_measured)}, predicted "
        f"{byte_size(r.peak_predicted)} ({r.memory_error:+.1%})"
    )


def step_in_words(step: Mapping[str, Any]) -> str:
    """Return the options of a step as a command line has them."""
    return " ".join(f"--{k}" if v is True else f"--{k} {v}" for k, v in step.items())


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
    heading = ("network", "shape", "grid", "step", "measured", "quartiles", "predicted", "error")
    rows = [(*heading, "memory", "predicted", "error")]
    for r in results:
        ms = [f"{x * 1e3:.1f}" for x in (r.measured, r.low, r.high, r.predicted)]
        rows.append(
            (
                *(r.network, by(r.shape), in_words(r.grid), step_in_words(r.step)),
                *(ms[0], f"{ms[1]} to {ms[2]}", ms[3]),
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
            f"```\n{table(rows, right=(4, 5, 6, 7, 8, 9, 10))}\n```\n",
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
        of_network = (r for r in results if r.network == name and tuple(r.shape) == shape)
        several = [r for r in of_network if r.grid and not r.step]
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
    chosen = tuple(sys.argv[2:] or [""])
    run(Path(sys.argv[1]), [c for c in CASES if c.network.name.startswith(chosen)])
