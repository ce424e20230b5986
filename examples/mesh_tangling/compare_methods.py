"""Methods of training with several workers, compared at equal numbers of samples.

    python -m examples.mesh_tangling.compare_methods

Each method is a job of its own, one after the other; finished jobs are not run again, so an
interrupted comparison continues. At the end the picture of docs/reference/methods.md is drawn from
all of them, and a table printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distconv.data.durable import write_atomically
from distconv.planning.table import markdown
from examples.trainer.arguments import command_line, positive
from examples.trainer.launch import generated, mpiexec, words

from . import generate

METHODS: dict[str, tuple[int, dict[str, str]]] = {
    "in step": (4, {}),
    "in step, batch 32": (4, {"batch-size": "32"}),
    "in step, batch 32, recipe": (
        4,
        {
            "batch-size": "32",
            "recipe": "cosine",
            "reference-batch-size": "8",
            "warmup-epochs": "2",
        },
    ),
    "LARS, batch 32": (
        4,
        {"batch-size": "32", "optimizer": "lars", "learning-rate": "8", "recipe": "polynomial"},
    ),
    "lag 1": (4, {"lag": "1"}),
    "halves": (4, {"wire": "bfloat16"}),
    "elastic": (4, {"method": "easgd"}),
    "Downpour": (5, {"method": "downpour"}),
    "hybrid": (5, {"method": "hybrid", "grid": "sample=4"}),
}
"""Ranks and options of each. All methods train on four ranks: two replicas of two ranks, or for the
hybrid method two groups of two replicas of one. Downpour and hybrid have a server as well."""


def main() -> None:
    """Run the jobs that are not finished, draw and print."""
    parser, add = command_line("mesh_tangling.compare_methods", __doc__ or "")
    add("--output", "folder of data and runs", type=Path, default="runs/methods")
    add("--picture", "file that is drawn", type=Path, default="docs/reference/training_methods.png")
    add("--epochs", "of each run", type=positive(int), default=8)
    add("--samples", "to train on", type=positive(int), default=192)
    add("--size", "zones a side of the mesh", type=positive(int), default=128)
    add("--width", "a part of the published network's", type=positive(float), default=0.125)
    add("--only", "methods to run, by name", nargs="*", choices=METHODS)
    args = parser.parse_args()
    samples = {"data": (args.samples, "0"), "validation": (max(4, args.samples // 6), "1")}
    files = generated(
        args.output,
        generate.main,
        {
            name: {"samples": str(count), "size": str(args.size), "seed": seed}
            for name, (count, seed) in samples.items()
        },
    )
    for name in args.only or METHODS:
        run(args, name, files)
    found = {name: read(folder_of(args, name)) for name in METHODS if done(args, name)}
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(args.picture, found)
    print(table(found))


def folder_of(args: argparse.Namespace, name: str) -> Path:
    """Return the folder of a method's run."""
    folder: Path = args.output / name.replace(",", "").replace(" ", "-").lower()
    return folder


def done(args: argparse.Namespace, name: str) -> bool:
    """Return whether a method's run is finished."""
    return (folder_of(args, name) / "metrics.json").exists()


def run(args: argparse.Namespace, name: str, files: dict[str, str]) -> None:
    """Run a method, or continue its run, unless it is finished."""
    if done(args, name):
        print(f"{name}: there already")
        return
    (ranks, own), folder = METHODS[name], folder_of(args, name)
    options = {
        "network": "2k",
        "width": str(args.width),
        "grid": "sample=2,height=2",
        "epochs": str(args.epochs),
        "batch-size": "8",
        "learning-rate": "0.003",
        "output": str(folder),
    }
    options |= files | own
    if options.get("method", "sync") == "sync" and list(folder.glob("checkpoint-*.pt")):
        options["resume"] = str(folder)
    else:
        for part in folder.glob("server-*/checkpoint-*.pt"):
            part.unlink()  # of a run that was interrupted, which begins again
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m"]
    command += ["examples.mesh_tangling.train", *words(options)]
    print(f"{name}: {' '.join(command)}", flush=True)
    shared = {
        "OMP_NUM_THREADS": "1",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    }
    subprocess.run(command, env=shared | os.environ, check=True)


def read(folder: Path) -> dict[str, Any]:
    """Return the course of a run: samples, seconds of training and score after each epoch, and the
    staleness of the updates that a server received.
    """
    metrics = json.loads((folder / "metrics.json").read_text())
    samples = seconds = 0.0
    course: dict[str, Any] = {"samples": [], "seconds": [], "iou": [], "loss": [], "staleness": {}}
    for record in metrics["history"]:
        count = len(record["step_losses"]) * metrics["batch_size"]
        samples += count
        seconds += count / record["samples_per_second"]
        course["samples"].append(samples)
        course["seconds"].append(seconds)
        for score in ("iou", "loss"):
            course[score].append(record[score])
    for report in folder.glob("server-*.json"):
        course["staleness"] = json.loads(report.read_text())["staleness"]
    return course


def draw(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Draw the score against samples and against time, and the staleness of updates."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    by_samples, by_time, stale = figure.subplots(1, 3)
    width = 0.8 / max(1, sum(bool(course["staleness"]) for course in found.values()))
    place = -0.4
    for number, (name, course) in enumerate(found.items()):
        colour = f"C{number}"
        by_samples.plot(course["samples"], course["iou"], "o-", ms=3, color=colour, label=name)
        by_time.plot(course["seconds"], course["iou"], "o-", ms=3, color=colour)
        updates = sum(course["staleness"].values())
        if updates:
            places = [int(n) + place + width / 2 for n in course["staleness"]]
            shares = [count / updates for count in course["staleness"].values()]
            stale.bar(places, shares, width, color=colour, label=name)
            place += width
    by_samples.set(xlabel="samples", ylabel="intersection over union", title="By samples")
    by_time.set(xlabel="seconds of training", ylabel="intersection over union", title="By time")
    stale.set(xlabel="updates in between", ylabel="share of updates", title="Staleness")
    for axes in (by_samples, by_time):
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    by_samples.legend(frameon=False, fontsize="small")
    if stale.patches:
        stale.legend(frameon=False, fontsize="small")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the results as a table of Markdown."""
    scores = ("loss", "intersection over union", "mean staleness")
    rows = [["method", "samples", "seconds", *scores]]
    for name, course in found.items():
        stale, last = course["staleness"], {n: course[n][-1] for n in ("samples", "seconds")}
        mean = sum(int(n) * k for n, k in stale.items()) / max(1, sum(stale.values()))
        numbers = (f"{course['loss'][-1]:.4f}", f"{course['iou'][-1]:.3f}")
        counts = (f"{number:.0f}" for number in last.values())
        rows.append([name, *counts, *numbers, f"{mean:.2f}" if stale else ""])
    return markdown(rows, right=range(1, 6))


if __name__ == "__main__":
    main()
