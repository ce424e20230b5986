"""The state of a training run in one file, complete at any moment, and the one before beside it.

A checkpoint holds plain tensors under the names of the serial model, and nothing about the grid,
so a run can be continued on any other grid, or on one rank without distconv.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distconv.transport.communicator import ObjectCommunicator

from .durable import DamagedFile, previous_of, read_checksummed, write_checksummed
from .together import rank_zero, together

_PARTS = {"model": dict, "optimizer": dict, "settings": dict, "history": list}
_OVERHEAD = 2**20
"""Bytes that are sure to be enough for names, settings and history."""

_SCORES = ("loss", "iou", "trivial_iou")
"""What the history has of every epoch beside its step_losses, as the pictures need it."""


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    history: list[dict[str, Any]],
) -> None:
    """Write the state after `len(history)` epochs to `path`. Call it on one rank.

    What was at `path` is kept beside it (see `durable.previous_of`).

    Args:
        settings: the arguments that determine the numbers of the run.
        history: the metrics of every epoch so far.

    Raises:
        ValueError: if a value is not finite; the file at `path` is left as it is.
    """
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "settings": settings,
        "history": history,
    }
    _check_finite(path, state)
    write_checksummed(path, lambda file: torch.save(state, file), previous_of(path))


def checkpoint_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a checkpoint, at most, before the optimizer has kept anything."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # torch's optimizers keep two tensors of its size for each parameter, or fewer.
    tensors = [*model.state_dict().values(), *2 * parameters]
    return sum(t.numel() * t.element_size() for t in tensors) + _OVERHEAD


def load_checkpoint(
    path: Path,
    comm: ObjectCommunicator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> list[dict[str, Any]]:
    """Put the state of `path` into `model` and `optimizer`, and return the history.

    Collective: rank 0 reads the file and sends it to all ranks. Where it is damaged or missing,
    rank 0 says so and takes the one that was there before.

    Raises:
        InvalidInput: on every rank, if there is no whole checkpoint, or it is not one of this
            model, or was written by a run with other `settings`.
    """
    content, path = rank_zero(comm, lambda: _newest(path))

    def load() -> list[dict[str, Any]]:
        state = _state(path, content)
        _check_settings(path, state["settings"], settings)
        _check_history(path, state["history"])
        _check_finite(path, state)
        _load(path, state, model, optimizer)
        return state["history"]

    return together(comm, load)


def _newest(path: Path) -> tuple[bytes, Path]:
    """Return the content of the file at `path` or of the one before it, and which of them it is."""
    try:
        return read_checksummed(path), path
    except (DamagedFile, FileNotFoundError) as error:
        complaint = error
    before = previous_of(path)
    try:
        content = read_checksummed(before)
    except FileNotFoundError:
        raise complaint from None
    except DamagedFile as error:
        raise DamagedFile(f"{complaint}; so is the one before: {error}") from None
    print(f"note: {complaint}; continuing from {before}", file=sys.stderr, flush=True)
    return content, before


def _state(path: Path, content: bytes) -> dict[str, Any]:
    """Return the dictionary that a checkpoint holds, of which the parts have the types they
    should.
    """
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler stumbles over
        raise ValueError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} is not a checkpoint of this program: it holds {type(state).__name__}, "
            f"expected a dict with {sorted(_PARTS)}"
        )
    for name, kind in _PARTS.items():
        if not isinstance(state.get(name), kind):
            found = type(state[name]).__name__ if name in state else "missing"
            raise ValueError(
                f"{path} is not a checkpoint of this program: {name!r} is {found}, expected "
                f"{kind.__name__}"
            )
    return state


def _check_settings(path: Path, saved: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise ValueError(
                f"{path} was written with --{option} {saved.get(name)}, this run has --{option} "
                f"{value}; continue with the former, or start anew without --resume"
            )


def _check_history(path: Path, history: list[Any]) -> None:
    for place, record in enumerate(history):
        try:
            numbers = [*record["step_losses"], *(record[name] for name in _SCORES)]
            whole = bool(record["step_losses"]) and all(map(math.isfinite, numbers))
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise ValueError(
                f"{path} is not a checkpoint of this program: epoch {place + 1} of its history "
                f"should have a list of step_losses and the numbers {', '.join(_SCORES)}"
            )


def _check_finite(path: Path, state: dict[str, Any]) -> None:
    for name, tensor in _tensors(state):
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} holds values that are not finite, with which {path} would be of no use; "
                "start anew from finite data, with a smaller --learning-rate or --precision float64"
            )


def _load(
    path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the states of model and optimizer; what torch would take amiss later is found here."""
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # torch trusts the types of what it is given
        raise ValueError(f"{path} is the checkpoint of another model: {error!r}") from error
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"{path} is the checkpoint of another model: the optimizer's {name} has shape "
                    f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
                )


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Return all tensors in nested dictionaries and lists, by names with dots."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
