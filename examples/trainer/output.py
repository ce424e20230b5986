"""The output folder of a training run, checked before the first step."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from distconv.data.checkpoint import checkpoints_in
from distconv.data.durable import remove_partial
from examples.generating.room import check_room

KEPT = 2
"""The number of checkpoints that are kept."""

RESULTS_SIZE = 2**20
"""An upper bound for the bytes of metrics.json and the pictures."""


def is_restart() -> bool:
    """Return whether torchrun has restarted the run, after a rank was lost."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def restarted_from(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint or folder to resume from: that of `--resume`, or the output of a run
    that torchrun restarts.
    """
    output: Path = args.output
    resume: Path | None = args.resume
    return output if is_restart() and checkpoints_in(output) else resume


def prepare_output(args: argparse.Namespace, saved: Path) -> None:
    """Make the output folder, and refuse to mix its checkpoints with those of another run.

    Args:
        saved: the folder in the output for the checkpoints of this rank.
    """
    if args.output.exists() and not args.output.is_dir():
        raise NotADirectoryError(f"{args.output} is a file; choose a folder as --output")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{args.output} cannot be made: {error.strerror}; choose another --output"
        ) from error
    there = checkpoints_in(saved)
    if there and not args.resume:
        raise ValueError(
            f"{there[0]} exists; continue it with --resume {args.output}, remove it, or choose "
            "another --output"
        )


def make_room(args: argparse.Namespace, size: int, epochs_done: int) -> None:
    """Raise `OSError` unless the output folder has room for the checkpoints and results of this
    run.

    Unfinished files of a killed run are removed.

    Args:
        size: the bytes of a checkpoint.
        epochs_done: the number of epochs that were trained before.
    """
    remove_partial(args.output, r"checkpoint-\d+\.pt")
    # The last, the one before it, and the next one while it is written.
    checkpoints = min(args.epochs - epochs_done, KEPT + 1 - len(checkpoints_in(args.output)))
    check_room(args.output / "checkpoint", max(0, checkpoints) * size + RESULTS_SIZE)
