r"""The figure of merit of the benchmark: seconds and epochs to a validation Dice, over several
seeds.

    mpiexec -n 4 python -m examples.fractals.merit \
        --seeds 3 --data train.h5 --validation validation.h5 --grid depth=-1 --output runs/merit

For every seed, of initial weights and shuffling, `examples.fractals.train` runs with the other
options, in a folder of its own. merit.json and merit.md have a line for each run and their median;
a run that does not reach the target within its epochs counts as never.
Stopped at any moment, the same command continues: complete runs are kept, and others resumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from distconv.data.checkpoint import checkpoints_in
from distconv.data.durable import write_atomically
from distconv.grid.ranks import world
from distconv.planning.table import markdown
from distconv.transport.interface import ObjectCommunicator
from examples.trainer.arguments import command_line, positive
from examples.trainer.logs import write_json

from . import train


def run(
    output: Path, seeds: int, options: Sequence[str], comm: ObjectCommunicator
) -> list[dict[str, Any]]:
    """Train with each seed, and return a row for each: seconds, epochs, loss and Dice. Collective.

    Args:
        output: the folder for the results, and for a folder of each seed.
        options: options of `train`, except `--output`, `--seed` and `--resume`.
    """
    rows = []
    for seed in range(seeds):
        folder = output / f"seed-{seed}"
        if not comm.bcast((folder / "metrics.json").exists()):
            own = ["--output", str(folder), "--seed", str(seed)]
            if comm.bcast(bool(checkpoints_in(folder))):
                own += ["--resume", str(folder)]
            train.main([*options, *own], comm)
        metrics = json.loads((folder / "metrics.json").read_text())
        rows.append({"seed": seed} | merit_of(metrics))
    if comm.rank == 0:
        write_json(output / "merit.json", rows)
        page = table(rows)
        write_atomically(output / "merit.md", lambda file: file.write(page.encode()))
        print(page, flush=True)
    comm.bcast(None)  # the files are there when any rank returns
    return rows


def merit_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run from its metrics.json; `seconds` are None without the target."""
    history = metrics["history"]
    last = history[-1]
    reached = last["dice"] >= metrics["target"]
    return {
        "seconds": sum(record["seconds"] for record in history) if reached else None,
        "epochs": len(history),
        "steps": sum(len(record["step_losses"]) for record in history),
        "loss": last["loss"],
        "dice": last["dice"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the runs and their median as a table in Markdown."""
    middle = {
        name: median(float("inf") if row[name] is None else row[name] for row in rows)
        for name in ("seconds", "epochs", "steps", "loss", "dice")
    }
    lines = [["seed", "seconds to the target", "epochs", "steps", "loss", "Dice"]]
    for row in (*rows, {"seed": "median"} | middle):
        never = row["seconds"] in (None, float("inf"))
        seconds = "never" if never else f"{row['seconds']:.0f}"
        counts = (f"{row[name]:g}" for name in ("epochs", "steps"))
        scores = f"{row['loss']:.3f}", f"{row['dice']:.4f}"
        lines.append([str(row["seed"]), seconds, *counts, *scores])
    return markdown(lines) + "\n"


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Run the command line; unknown options are passed to `examples.fractals.train`."""
    if comm is None:
        comm = world().for_program()
    parser, add = command_line("fractals.merit", __doc__ or "", comm)
    add("--output", "folder for runs and results", type=Path, required=True)
    add("--seeds", "number of runs", type=positive(int), default=3)
    args, options = parser.parse_known_args(arguments)
    run(args.output, args.seeds, options, comm)


if __name__ == "__main__":
    main()
