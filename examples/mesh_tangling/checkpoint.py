"""The state of a training run in one file, complete at any moment.

A checkpoint holds plain tensors under the names of the serial model, and nothing about the grid,
so a run can be continued on any other grid, or on one rank without distconv.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from mpi4py import MPI
from torch import nn

from .together import rank_zero


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    history: list[dict[str, Any]],
) -> None:
    """Write the state after `len(history)` epochs to `path`. Call it on one rank.

    Args:
        settings: the arguments that determine the numbers of the run.
        history: the metrics of every epoch so far.
    """
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "settings": settings,
        "history": history,
    }
    write_atomically(path, lambda file: torch.save(state, file))


def load_checkpoint(
    path: Path,
    comm: MPI.Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> list[dict[str, Any]]:
    """Put the state of `path` into `model` and `optimizer`, and return the history.

    Collective: rank 0 reads the file and sends it to all ranks.

    Raises:
        InvalidInput: on every rank, if the file is missing or damaged, or was written by a run
            with other `settings`.
    """
    content = rank_zero(comm, lambda: _checked_content(path, settings))
    state = torch.load(io.BytesIO(content), map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["history"]


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` by what `write` writes, or leave it as it is.

    Whoever opens `path` finds the old content or the new, whole, whenever the writing process
    or the machine stops.
    """
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    # The new name is part of the folder, which reaches the disk on its own.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _checked_content(path: Path, settings: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint that can be loaded and was written with these settings."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    content = path.read_bytes()
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu")
    except Exception as error:  # torch raises whatever its unpickler stumbles over
        raise ValueError(f"{path}: not a complete checkpoint: {error}") from error
    missing = {"settings", "model", "optimizer", "history"}.difference(state)
    if missing:
        raise ValueError(f"{path}: not a checkpoint of this program: it lacks {sorted(missing)}")
    saved = state["settings"]
    for name, value in settings.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise ValueError(
                f"{path} was written with --{option} {saved.get(name)}, this run has --{option} "
                f"{value}; continue with the former, or start anew without --resume"
            )
    return content
