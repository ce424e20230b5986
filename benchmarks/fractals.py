"""The network of examples/fractals at the benchmark's scales, as planning predicts it on MI300A.

`python -m benchmarks.fractals benchmarks/results` writes fractals-mi300a.md in a few minutes, in
one process: memory and time of a step at scales 7 to 11 on 1 to 4,096 ranks of
the machine `el-capitan`, with and without activations that are computed again, beside what is
published, and by how much each assumed number changes it. No step is run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.assumptions import assumptions, efficiency
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.prediction import Prediction, predicted, record_ranks
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, Recording
from distconv.planning.table import markdown
from examples.fractals.network import UNet

MACHINE = "el-capitan"

CLASSES = 6
"""Five categories and the background."""

SCALES = range(7, 12)
WAYS = (1, 2, 4, 8, 16)
"""Parts of each side of a volume: cubes, of 1 to 4,096 ranks."""

PUBLISHED = (
    ((64, 64), (128, 128, 128), (1.93, 3.48, 3.37)),
    ((128, 64), (128, 128, 128), (4.38, 3.99, 5.86)),
    ((64, 64), (128, 256, 256), (6.98, 12.71, 12.96)),
    ((64, 64), (64, 256, 256), (3.78, 6.54, 6.05)),
    ((128, 64), (64, 256, 256), (8.27, 8.13, 12.29)),
    ((128, 128), (64, 128, 128), (2.53, 4.28, 3.54)),
    ((128, 128), (32, 128, 128), (1.40, 2.19, 1.88)),
    ((256, 128), (64, 128, 128), (6.27, 6.34, 7.41)),
    ((256, 128), (32, 128, 128), (3.72, 3.87, 3.79)),
    ((512, 256), (32, 64, 64), (3.77, 4.00, 3.45)),
    ((256, 256), (32, 64, 64), (1.34, 2.38, 1.71)),
)
"""Channels in and out, a rank's block, and milliseconds forward and of the gradients of input and
weight: LLNL's ScaFFold benchmark (2026); bfloat16, channels last, 3^3, padding 1."""

PUBLISHED_STEP = 101.0
"""Milliseconds of a step at scale 7 on one MI300A with a compiled group norm, published there. With
the ordinary one it takes 185, of which 87 are in its reductions: 8 work groups on 228 units."""

ASSUMPTIONS = assumptions(
    efficiency("convolutions, forward", "aten.convolution", 0.2, 0.32),
    efficiency("their gradients", "aten.convolution_backward", 0.16, 0.26),
    efficiency("other kernels", "", 0.4, 0.95),
    within=(50e9, 128e9),
    between=(11e9, 25e9),
)

SHARDED = 3
"""The number of levels, the deepest, of which weights are sharded where that is said."""


class Run(NamedTuple):
    """A predicted step of one sample of (2^scale)^3 voxels on ways^3 ranks."""

    scale: int
    ways: int
    recompute: bool
    sharded: bool
    recordings: list[Recording]
    prediction: Prediction


def run_of(machine: Machine, scale: int, ways: int, recompute: bool, sharded: bool = False) -> Run:
    """Return a step of one sample, 64 channels, in bfloat16 with Adam, as it is predicted."""
    with torch.device("meta"):
        module = UNet(CLASSES, scale, recompute=recompute)
    grid = dict.fromkeys(("depth", "height", "width"), ways)
    recordings = record_ranks(
        module,
        [(1, 3, *3 * (2**scale,))],
        grid,
        gpu=machine.asynchronous,
        loss="cross-entropy",
        optimizer="adam",
        autocast=torch.bfloat16,
        layouts=module.channel_layouts(SHARDED) if sharded else None,
        shard_parameters=sharded,
    )
    return Run(scale, ways, recompute, sharded, recordings, play(machine, scale, ways, recordings))


def play(machine: Machine, scale: int, ways: int, recordings: list[Recording]) -> Prediction:
    """Return the prediction of recorded ranks on a machine."""
    times = OperatorTimes(machine, machine.ranks_per_node)
    grid = dict.fromkeys(("depth", "height", "width"), ways)
    return predicted(f"scale {scale}", 1, grid, recordings, machine, times)


def convolution_times(
    machine: Machine, channels: tuple[int, int], block: tuple[int, ...]
) -> tuple[float, float]:
    """Return the predicted milliseconds of a convolution: forward, and of both gradients."""
    convolution = nn.Conv3d(*channels, 3, padding=1, bias=False, dtype=torch.bfloat16)
    step = record_step(convolution, [(1, channels[0], *block)], {}, gpu=True, input_gradients=True)
    times = OperatorTimes(machine, 1)
    forward, backward = (
        times[event.operator] * 1e3
        for event in step.events
        if isinstance(event, Compute) and event.operator.convolves
    )
    return forward, backward


def page(machine: Machine, runs: Sequence[Run], bands: Sequence[tuple[str, ...]]) -> str:
    """Return the page: checks, a table of weak scaling, one of each scale, and the bands."""
    whole = [run for run in runs if not run.sharded]
    by_place = {(run.scale, run.ways, run.recompute): run for run in whole}
    lines = [
        f"# The fractal benchmark's network, predicted on {machine.name}\n",
        "Written by `python -m benchmarks.fractals benchmarks/results`. All steps are",
        "predicted, from the file of the machine `el-capitan`, which gives the source of each",
        "number: local operators by a roofline, and messages by latency and bandwidth. The",
        "network has one sample of three channels, 64 channels at full resolution, `scale - 3`",
        "levels, bfloat16 by autocast, and Adam in float32. A cube of ranks shares the sample.",
        "*Recomputed* saves only the inputs of double convolutions (`--recompute`). A rank has",
        "128 GiB, which include weights, gradients and Adam's state. Every rank holds these as",
        "a whole, except under *sharded weights*. At scale 10 the network has 5.8 billion",
        "weights. At scale 11 it has 23 billion weights, which do not fit on any single rank.\n",
        "## Compared with published times\n",
        "LLNL, ScaFFold (2026), on one MI300A. The efficiency in the machine's file is derived",
        "from the first, third, ... of these convolutions. Times are in milliseconds.\n",
        *_convolutions(machine),
        "",
    ]
    if (one := by_place.get((7, 1, False))) is not None:
        seconds = 1e3 * one.prediction.seconds
        lines.append(
            f"A step at scale 7 on one rank: {PUBLISHED_STEP:.0f} ms published, {seconds:.0f} ms "
            f"predicted, a ratio of {seconds / PUBLISHED_STEP:.2f}. The published step has a "
            "compiled group norm; with torch's own it takes 185 ms, which a roofline cannot "
            "explain. It also has a Dice loss in addition to the cross entropy.\n"
        )
    weak = [r for r in whole if 2**r.scale // r.ways == 128]
    lines += ["## Weak scaling: 128^3 voxels a rank\n", _table(machine, weak, "scale")]
    for scale in sorted({run.scale for run in runs}):
        own = [run for run in whole if run.scale == scale]
        lines += [f"\n## Scale {scale}: {2**scale}^3 voxels\n", _table(machine, own, "")]
    lines += [
        "\n## Sharded weights\n",
        f"The deepest {SHARDED} levels are cut by channels, height and width in place of depth, "
        "height and width, and every rank keeps its channels of their weights: "
        f"`parallelize(model, grid, layouts=model.channel_layouts({SHARDED}), "
        "shard_parameters=True)`.\n",
        _table(machine, [run for run in runs if run.sharded], "scale"),
    ]
    lines += [
        "\n## By assumed number\n",
        "Milliseconds of a step in weak scaling without recomputation, with each assumed number "
        "at its least and its most:\n",
        markdown(bands),
    ]
    return "\n".join(lines) + "\n"


def _convolutions(machine: Machine) -> Iterator[str]:
    sides = ("published", "predicted")
    rows = [["channels", "block", *(f"{n}: {s}" for n in ("forward", "gradients") for s in sides)]]
    errors = []
    for channels, block, (forward, *gradients) in PUBLISHED:
        expected = convolution_times(machine, channels, block)
        published = forward, sum(gradients)
        errors += [abs(e / p - 1) for e, p in zip(expected, published, strict=True)]
        numbers = (x for pair in zip(published, expected, strict=True) for x in pair)
        rows.append(
            [
                f"{channels[0]} to {channels[1]}",
                " x ".join(map(str, block)),
                *(f"{x:.2f}" for x in numbers),
            ]
        )
    yield markdown(rows)
    yield f"\nMedian error {median(errors):.0%}, largest {max(errors):.0%}."


def _table(machine: Machine, runs: Sequence[Run], first: str) -> str:
    heads = ["ranks", "step", "compute", "exposed messages", "memory a rank", "fits"]
    heads += ["recomputed: step", "memory a rank", "fits"]
    rows = [[first, *heads] if first else heads]
    for run in runs:
        if run.recompute:
            continue
        again = next(r for r in runs if r[:4] == (run.scale, run.ways, True, run.sharded))
        p, q = run.prediction, again.prediction
        cells = [f"{run.ways**3:,}"]
        cells += [f"{1e3 * s:.1f} ms" for s in (p.seconds, p.compute, p.exposed)]
        cells += [*_memory(machine, p), f"{1e3 * q.seconds:.1f} ms", *_memory(machine, q)]
        rows.append([str(run.scale), *cells] if first else cells)
    return markdown(rows)


def _memory(machine: Machine, prediction: Prediction) -> tuple[str, str]:
    assert machine.memory is not None
    fits = "yes" if prediction.peak <= machine.memory else "no"
    return f"{prediction.peak / 2**30:.1f} GiB", fits


def bands_of(machine: Machine, runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a table: milliseconds of each run with each assumed number at its least and most."""
    ranks = [f"scale {run.scale}, {run.ways**3:,}" for run in runs]
    rows: list[tuple[str, ...]] = [("assumed", "from", "to", *ranks)]
    for number in ASSUMPTIONS:
        cells = []
        for run in runs:
            low, high = (
                1e3 * play(changed, run.scale, run.ways, run.recordings).seconds
                for changed in (number.changed(machine, v) for v in (number.low, number.high))
            )
            cells.append(f"{low:.0f} to {high:.0f}")
        ends = (f"{value:.3g} {number.unit}" for value in (number.low, number.high))
        rows.append((number.name, *ends, *cells))
    return rows


def main(folder: Path, scales: Sequence[int] = SCALES, ways: Sequence[int] = WAYS) -> None:
    """Write the page into a folder."""
    machine = Machine.load(MACHINE)
    runs = []
    for scale, n, sharded, recompute in product(scales, ways, (False, True), (False, True)):
        if sharded and n == 1:
            continue
        runs.append(run_of(machine, scale, n, recompute, sharded))
        done = runs[-1].prediction
        print(f"scale {scale}, {n}^3 ranks: {done.seconds:.3f} s", file=sys.stderr, flush=True)
    weak = [r for r in runs if 2**r.scale // r.ways == 128 and not r.recompute and not r.sharded]
    text = page(machine, runs, bands_of(machine, weak))
    (folder / "fractals-mi300a.md").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
