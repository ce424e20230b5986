"""The published experiments on Lassen as the planner predicts them, beside what was published.

`python -m benchmarks.scale benchmarks/results` writes a page and a picture for each experiment, in
a few minutes, in one process; names of experiments behind choose some. Every step is recorded once
in a dry run and played on the machine `lassen`, then on others in which one
assumed number is smaller or larger: that is the band of this number. docs/reference/scaling.md says
in words why curves differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.assumptions import Assumption, assumptions, efficiency
from benchmarks.networks import cosmoflow
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.prediction import Prediction, predicted, record_ranks
from distconv.planning.recording import Recording
from distconv.planning.table import markdown
from examples.mesh_tangling.network import mesh_tangling_1k, mesh_tangling_2k

MACHINE = "lassen"

STYLE: Any = {
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "savefig.dpi": 130,
}

BLUE, VERMILION = "#0072B2", "#D55E00"
"""Told apart by all readers: Okabe and Ito, "Color Universal Design" (2008)."""


@dataclass(frozen=True)
class Experiment:
    """A network on several grids, the first of which is the base of all ratios."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the samples of one replica; a grid has as many replicas as `sample` says."""
    grids: tuple[Mapping[str, int], ...]
    per: str
    """What is counted along the horizontal axis: `GPUs a sample`, or `GPUs`."""
    measure: str
    """What is drawn: `speed-up`, or `time over that of the first`."""
    published: Mapping[int, float]
    source: str

    def place(self, grid: Mapping[str, int]) -> int:
        """Return where a grid stands along the horizontal axis."""
        ranks = prod(grid.values())
        return ranks // grid.get("sample", 1) if self.per == "GPUs a sample" else ranks

    def value(self, base: float, seconds: float) -> float:
        """Return the measure of a step, given the seconds of that on the first grid."""
        return base / seconds if self.measure == "speed-up" else seconds / base


def _weak(spatial: Mapping[str, int]) -> tuple[Mapping[str, int], ...]:
    """Return grids of up to 2,048 GPUs, with more and more samples."""
    ways = prod(spatial.values())
    return tuple({"sample": gpus // ways, **spatial} for gpus in (8, 32, 128, 512, 1024, 2048))


IPDPS = "Dryden et al., IPDPS 2019"
EXPERIMENTS = (
    Experiment(
        "mesh-2k-strong",
        "mesh tangling 2K, strong scaling, 4 samples",
        mesh_tangling_2k,
        (1, 18, 2048, 2048),
        (
            {"sample": 4, "height": 2},
            {"sample": 4, "height": 2, "width": 2},
            {"sample": 4, "height": 4, "width": 2},
            {"sample": 4, "height": 4, "width": 4},
        ),
        "GPUs a sample",
        "speed-up",
        {2: 1.0, 16: 4.0},
        f'{IPDPS}: "close to 4x" with 16 GPUs over 2',
    ),
    Experiment(
        "mesh-1k-weak",
        "mesh tangling 1K, weak scaling, 1 GPU a sample",
        mesh_tangling_1k,
        (1, 18, 1024, 1024),
        _weak({}),
        "GPUs",
        "time over that of the first",
        {8: 1.0, 2048: 1.0},
        f'{IPDPS}: "nearly flat", "a small increase at 2,048 GPUs"; drawn at 1',
    ),
    Experiment(
        "mesh-2k-weak",
        "mesh tangling 2K, weak scaling, 2 GPUs a sample",
        mesh_tangling_2k,
        (1, 18, 2048, 2048),
        _weak({"height": 2}),
        "GPUs",
        "time over that of the first",
        {8: 1.0, 2048: 1.0},
        f'{IPDPS}: "nearly flat", "a small increase at 2,048 GPUs"; drawn at 1',
    ),
    Experiment(
        "cosmoflow-512-strong",
        "CosmoFlow 512^3, strong scaling, 4 samples",
        partial(cosmoflow, (512, 512, 512), width=1.0),
        (1, 4, 512, 512, 512),
        (
            {"sample": 4, "depth": 2, "height": 2, "width": 2},
            {"sample": 4, "depth": 4, "height": 2, "width": 2},
            {"sample": 4, "depth": 4, "height": 4, "width": 2},
            {"sample": 4, "depth": 4, "height": 4, "width": 4},
        ),
        "GPUs a sample",
        "speed-up",
        {},
        "Oyama et al., TPDS 2021, whose numbers are not at hand: no points are drawn",
    ),
)


ASSUMPTIONS = assumptions(
    efficiency("convolutions", "aten.convolution", 0.4, 0.8),
    efficiency("other kernels", "", 0.6, 0.95),
    within=(20e9, 75e9),
    between=(2e9, 12.5e9),
)


class Outcome(NamedTuple):
    """An experiment as predicted, and with each assumed number at its least and most."""

    experiment: Experiment
    predictions: list[Prediction]
    bands: dict[str, tuple[list[float], list[float]]]
    """The measure on each grid, by the name of the assumption: smaller and larger numbers."""

    @property
    def places(self) -> list[int]:
        """Return where the grids stand along the horizontal axis."""
        return [self.experiment.place(grid) for grid in self.experiment.grids]

    @property
    def values(self) -> list[float]:
        """Return the measure on each grid."""
        return _measures(self.experiment, [p.seconds for p in self.predictions])


def outcome(experiment: Experiment, machine: Machine) -> Outcome:
    """Return an experiment as it is predicted on a described machine."""
    with torch.device("meta"):
        module = experiment.make()
    recorded = []
    for grid in experiment.grids:
        samples = experiment.shape[0] * grid.get("sample", 1)
        shapes = [(samples, *experiment.shape[1:])]
        recorded.append(record_ranks(module, shapes, grid, gpu=machine.asynchronous))
    predictions = _played(experiment, recorded, machine)
    bands = {}
    for number in ASSUMPTIONS:
        low, high = (
            _measures(experiment, [p.seconds for p in _played(experiment, recorded, changed)])
            for changed in (number.changed(machine, v) for v in (number.low, number.high))
        )
        bands[number.name] = low, high
    return Outcome(experiment, predictions, bands)


def _played(
    experiment: Experiment, recorded: Sequence[list[Recording]], machine: Machine
) -> list[Prediction]:
    times = OperatorTimes(machine, machine.ranks_per_node)
    return [
        predicted(experiment.name, grid.get("sample", 1), grid, recordings, machine, times)
        for grid, recordings in zip(experiment.grids, recorded, strict=True)
    ]


def _measures(experiment: Experiment, seconds: Sequence[float]) -> list[float]:
    return [experiment.value(seconds[0], s) for s in seconds]


def page(machine: Machine, found: Outcome) -> str:
    """Return the tables of an experiment as a page."""
    e = found.experiment
    lines = [
        f"# {e.title[:1].upper()}{e.title[1:]}, predicted on {machine.name}\n",
        "Written by `python -m benchmarks.scale benchmarks/results`. All numbers are predicted,",
        "from the file of the machine `lassen`, which gives the source of each number: local",
        "operators by a roofline, and messages by latency and bandwidth.",
        "docs/reference/scaling.md explains why predictions and publications differ.\n",
    ]
    lines += [f"![{e.measure}](scale-{e.name}.png)\n", f"Published: {e.source}.\n"]
    heads = ("step", "compute", "exposed messages", "memory a GPU")
    rows = [[e.per, "all GPUs", *heads, e.measure, "published"]]
    for grid, place, p, value in zip(
        e.grids, found.places, found.predictions, found.values, strict=True
    ):
        said = e.published.get(place)
        times = (f"{1e3 * s:.1f} ms" for s in (p.seconds, p.compute, p.exposed))
        sizes = f"{place:,}", f"{prod(grid.values()):,}"
        last = f"{value:.2f}", "" if said is None else f"{said:.1f}"
        rows.append([*sizes, *times, f"{p.peak / 2**30:.1f} GiB", *last])
    bands = [["assumed", "from", "to", "predicted"]]
    for number in ASSUMPTIONS:
        low, high = (band[-1] for band in found.bands[number.name])
        ends = (f"{end:.3g} {number.unit}" for end in (number.low, number.high))
        bands.append([number.name, *ends, f"{low:.2f} to {high:.2f}"])
    by_number = f"{e.measure.capitalize()} at {found.places[-1]:,} {e.per} by assumed number:"
    return "\n".join([*lines, markdown(rows), "", by_number, "", markdown(bands)]) + "\n"


def picture(found: Outcome, path: Path) -> None:
    """Draw an experiment: a panel for each assumed number with its band, and what was published."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = 4
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.9 * ceil(len(ASSUMPTIONS) / columns)), layout="constrained")
        axes = figure.subplots(-(-len(ASSUMPTIONS) // columns), columns, sharex=True, sharey=True)
        for ax, number in zip(axes.flat, ASSUMPTIONS, strict=False):
            _panel(ax, found, number)
        figure.suptitle(found.experiment.title, fontsize=8)
        figure.supylabel(found.experiment.measure, fontsize=7)
        axes.flat[0].legend(fontsize=5)
        figure.savefig(path)


def _panel(ax: Any, found: Outcome, number: Assumption) -> None:
    e, places = found.experiment, found.places
    low, high = found.bands[number.name]
    ideal = [n / places[0] if e.measure == "speed-up" else 1.0 for n in places]
    ax.plot(places, ideal, color="0.6", linestyle=":", label="ideal")
    ax.fill_between(places, low, high, color=BLUE, alpha=0.25, linewidth=0, label="band")
    ax.plot(places, found.values, color=BLUE, label="predicted")
    if e.published:
        points = list(zip(*e.published.items(), strict=True))
        ax.plot(*points, "o", color=VERMILION, label="published")
    ax.set_xscale("log", base=2)
    ax.set_xticks(places, [f"{n:,}" for n in places])
    ax.set_xlabel(e.per)
    if e.measure == "speed-up":
        ax.set_yscale("log", base=2)
        ax.set_yticks(ideal, [f"{value:g}" for value in ideal])
    else:
        ax.set_ylim(bottom=0)
    ax.minorticks_off()
    ax.set_title(f"{number.name}\n{number.low:.3g} to {number.high:.3g} {number.unit}", fontsize=6)


def main(folder: Path, names: Sequence[str]) -> None:
    """Write the pages and the pictures of experiments, all by default, into a folder."""
    machine = Machine.load(MACHINE)
    for experiment in EXPERIMENTS:
        if not names or experiment.name in names:
            found = outcome(experiment, machine)
            picture(found, folder / f"scale-{experiment.name}.png")
            (folder / f"scale-{experiment.name}.md").write_text(page(machine, found))
            print(f"{experiment.name}: {found.values}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
