"""The picture of the course of training, which all examples draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distconv.data.durable import write_atomically

BLUE, RED, GREEN, AMBER, PALE = "#1b6ca8", "#d1495b", "#3a7d44", "#e0a030", "#f2f2f2"


@dataclass(frozen=True)
class Curve:
    """A score by its name in the history, its label in the picture, and its style."""

    name: str
    label: str
    style: dict[str, Any] = field(default_factory=lambda: network_style())


def network_style(colour: str = RED) -> dict[str, Any]:
    """Return the style of the network's scores."""
    return {"linestyle": "-", "marker": "o", "ms": 3, "color": colour}


def trivial_style() -> dict[str, Any]:
    """Return the style of scores that need no network."""
    return {"linestyle": "--", "color": "0.4"}


def plot_history(
    path: Path,
    history: list[dict[str, Any]],
    loss: str,
    score: str,
    curves: Sequence[Curve],
    limits: tuple[float, float] | None = None,
) -> None:
    """Draw the loss of every step and epoch, and the scores of every epoch, into a PNG file.

    Args:
        history: the metrics of every epoch: `step_losses`, and the fields of a `Score`.
        loss, score: the labels of the axes.
        curves: the scores to draw.
        limits: the limits of the scores' axis.
    """
    epochs = np.arange(1, len(history) + 1)
    steps = [np.asarray(entry["step_losses"]) for entry in history]
    # A step stands at its fraction of the epoch, and the mean of an epoch in the middle of it.
    places = [epoch + (np.arange(len(s)) + 0.5) / len(s) for epoch, s in enumerate(steps)]
    means = [s.mean() for s in steps]

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(np.concatenate(places), np.concatenate(steps), color="0.75", lw=1, label="every step")
    left.plot(epochs - 0.5, means, "o-", ms=3, color=BLUE, label="training")
    validation = [entry["loss"] for entry in history]
    left.plot(epochs, validation, "o-", ms=3, color=RED, label="validation")
    left.set(yscale="log", ylabel=loss, title="Loss")
    for curve in curves:
        values = [entry[curve.name] for entry in history]
        right.plot(epochs, values, label=curve.label, **curve.style)
    right.set(ylabel=score, title="Validation")
    if limits is not None:
        right.set(ylim=limits)
    for axes in (left, right):
        axes.set(xlim=(0, len(history)), xlabel="epoch")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))
