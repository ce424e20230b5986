"""The effect of the size of a sample: the same universes as whole volumes and as their parts.

    python -m examples.cosmoflow.study --output runs/study

One network is trained on universes of W^3 cells, one on their eighths of (W/2)^3, and one on their
64ths of (W/4)^3, with the same voxels in the training set, in a mini-batch and in all epochs. The
number of blocks follows from the size of the sample. study.png and study.md compare their errors on
new universes, for one sample, and for the mean over all samples of a universe.

Stopped at any moment, the same command continues after the last whole epoch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distconv.data.checkpoint import checkpoints_in
from distconv.data.durable import write_atomically
from distconv.grid.ranks import world
from distconv.planning.table import markdown
from examples.trainer.arguments import command_line, natural, positive
from examples.trainer.launch import become_ranks, generated, words
from examples.trainer.logs import write_json
from examples.trainer.plots import BLUE, RED

from . import generate, train
from .cosmology import RANGES

LEAST_SIDE = 8
"""The smallest side of samples, in cells, that the networks accept."""


def run(args: argparse.Namespace) -> None:
    """Generate, train on samples of each size with each seed, and compare. Collective."""
    comm = world().for_program()
    output: Path = args.output
    universes = {"size": str(args.size), "cell": str(args.cell), "grid": "sample=-1"}
    drawn = {
        "data": universes | {"samples": str(args.universes), "seed": "0"},
        "validation": universes | {"samples": str(args.validation), "seed": "1"},
    }
    files = generated(output, generate.main, drawn)
    for seed in range(args.seeds):
        for parts in parts_of(args.size):
            folder = run_folder(output, args.size // parts, seed)
            if comm.bcast((folder / "metrics.json").exists()):
                continue
            options = files | {
                "output": str(folder),
                "grid": "sample=-1",
                "network": args.network,
                "width": str(args.width),
                "parts": str(parts),
                "epochs": str(args.epochs),
                "batch-size": str(args.batch_size * parts**3),
                "learning-rate": str(args.learning_rate),
                "seed": str(seed),
            }
            if comm.bcast(bool(checkpoints_in(folder))):
                options["resume"] = str(folder)
            if comm.rank == 0:
                print(f"samples of {args.size // parts}^3 cells, seed {seed}", flush=True)
            train.main(["--augment", *words(options)], comm)
    if comm.rank == 0:
        compare(args)
    comm.bcast(None)


def parts_of(size: int) -> list[int]:
    """Return numbers of parts along a side: from 1, the whole universe, to the smallest parts."""
    return [parts for parts in (1, 2, 4) if size // parts >= LEAST_SIDE]


def run_folder(output: Path, side: int, seed: int) -> Path:
    """Return the folder of the run on samples of this side with this seed."""
    return output / f"side-{side}-seed-{seed}"


def compare(args: argparse.Namespace) -> None:
    """Write study.json, study.md and study.png from the metrics of all runs. Rank 0 alone."""
    rows = []
    for parts in parts_of(args.size):
        side = args.size // parts
        runs = [
            json.loads((run_folder(args.output, side, seed) / "metrics.json").read_text())
            for seed in range(args.seeds)
        ]
        # The epoch with the lowest validation loss, which a program would keep.
        best = [min(found["history"], key=lambda record: record["loss"]) for found in runs]
        names = ["loss", "universe_loss", "trivial_loss", *(f"error_{name}" for name in RANGES)]
        rows.append(
            {"side": side, "samples": args.universes * parts**3}
            | {name: [record[name] for record in best] for name in names}
        )
    facts = {
        name: getattr(args, name)
        for name in ("size", "cell", "universes", "validation", "epochs", "batch_size", "network")
    }
    write_json(args.output / "study.json", facts | {"rows": rows})
    page = table(rows)
    write_atomically(args.output / "study.md", lambda file: file.write(page.encode()))
    plot(args.output / "study.png", rows)
    print(page)
    print(f"look at {args.output / 'study.png'}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the comparison as a table in Markdown, of means over seeds."""
    heads = ["cells of a sample", "samples", "error of a sample", "of a universe", "trivial"]
    heads += [f"error of {name}" for name in RANGES]
    lines = [heads]
    for row in rows:
        numbers = [np.mean(row[name]) for name in ("loss", "universe_loss", "trivial_loss")]
        errors = [np.mean(row[f"error_{name}"]) for name in RANGES]
        texts = [f"{row['side']}^3", str(row["samples"]), *(f"{n:.4f}" for n in numbers)]
        lines.append(texts + [f"{error:.3g}" for error in errors])
    return markdown(lines) + "\n"


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw the error against the size of a sample, all seeds and their mean."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    sides = [row["side"] for row in rows]
    for name, label, colour in (
        ("loss", "one sample", RED),
        ("universe_loss", "all samples of a universe averaged", BLUE),
    ):
        axes.plot(sides, [np.mean(row[name]) for row in rows], "o-", color=colour, label=label)
        for row in rows:
            axes.plot(len(row[name]) * [row["side"]], row[name], ".", color=colour, alpha=0.5)
    trivial = [np.mean(row["trivial_loss"]) for row in rows]
    axes.plot(sides, trivial, "--", color="0.4", label="mean of the truth")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sides, [f"{side}$^3$" for side in sides])
    axes.set(xlabel="cells of a sample, of equal numbers in all", ylabel="mean squared error")
    axes.set_title("Error of the parameters against the size of a sample")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def main() -> None:
    """Run the command line: a process that is started alone becomes ranks."""
    parser, add = command_line("cosmoflow.study", __doc__ or "")
    add("--output", "folder for data, runs and the comparison", type=Path, default="runs/study")
    add("--size", "cells along a side of a universe", type=int, default=32)
    add("--cell", "the side of a cell, in Mpc/h", type=positive(float), default=8.0)
    add("--universes", "to train on", type=positive(int), default=384)
    add("--validation", "universes to validate on", type=positive(int), default=96)
    add("--epochs", "how often to go through the data", type=positive(int), default=20)
    add("--batch-size", "universes of a mini-batch, or their parts", type=positive(int), default=8)
    add("--learning-rate", "how far to step", type=positive(float), default=1e-3)
    add("--network", "form of the network", default="average")
    add("--width", "multiplies the channels of the network", type=positive(float), default=0.5)
    add("--seeds", "runs for each size, with other initial weights", type=positive(int), default=2)
    add("--ranks", "to start; 0 on ranks that a launcher has started", type=natural, default=2)
    args = parser.parse_args()
    if not args.ranks:
        run(args)
        return
    options = {name.replace("_", "-"): str(value) for name, value in vars(args).items()}
    become_ranks(args.ranks, "examples.cosmoflow.study", words(options | {"ranks": "0"}))


if __name__ == "__main__":
    main()
