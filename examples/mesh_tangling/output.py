"""The output folder of a training run: whether it can be used, found out before the first step."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .durable import check_room, previous_of, remove_partial, set_aside_damaged

RESULTS_SIZE = 2**20
"""Bytes that are sure to be enough for metrics.json and the pictures."""


def restarted_from(args: argparse.Namespace) -> Path | None:
    """The checkpoint to continue from: what `--resume` says, or the last of a run that torchrun
    starts again after a rank has been lost."""
    checkpoint: Path = args.output / "checkpoint.pt"
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    there = checkpoint.exists() or previous_of(checkpoint).exists()
    return checkpoint if again and there else args.resume


def prepare_output(args: argparse.Namespace) -> None:
    """Make the output folder, and protect the checkpoints of another run that it may hold."""
    if args.output.exists() and not args.output.is_dir():
        raise NotADirectoryError(f"{args.output} is a file; choose a folder as --output")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{args.output} cannot be made: {error.strerror}; choose another --output"
        ) from error
    checkpoint = args.output / "checkpoint.pt"
    there = [path for path in (checkpoint, previous_of(checkpoint)) if path.exists()]
    if there and not args.resume:
        raise ValueError(
            f"{there[0]} exists; continue it with --resume {checkpoint}, remove it, or choose "
            "another --output"
        )


def make_room(args: argparse.Namespace, size: int, epochs_done: int) -> None:
    """Raise `OSError` unless the output folder takes the checkpoints and results of this run.

    What is left of a run that was killed while it wrote is removed, and a damaged checkpoint
    makes room for a whole one.

    Args:
        size: bytes of a checkpoint.
        epochs_done: the number of epochs that have been trained before.
    """
    checkpoint = args.output / "checkpoint.pt"
    remove_partial(checkpoint)
    set_aside_damaged(checkpoint)
    # There are the last, the one before it, and the next while it is written.
    there = sum(path.exists() for path in (checkpoint, previous_of(checkpoint)))
    checkpoints = min(args.epochs - epochs_done, 3 - there)
    check_room(checkpoint, max(0, checkpoints) * size + RESULTS_SIZE)
