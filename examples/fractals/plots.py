"""Pictures of the course of training, and of a volume of fractals in three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distconv.data.durable import write_atomically
from distconv.tools.reports.figures import COLOURS
from examples.trainer.plots import BLUE, Curve, network_style, plot_history, trivial_style
from examples.trainer.ranks import RankBox

from .volumes import COLOUR

POINTS = 20_000
"""The most voxels of a volume that are drawn."""


def plot_loss(path: Path, history: list[dict[str, Any]], target: float) -> None:
    """Draw the loss of every step and epoch, and the Dice coefficients, into `path`."""
    aim = [record | {"target": target} for record in history]
    curves = [
        Curve("dice", "mean of classes"),
        Curve("dice_worst", "worst class", network_style(BLUE)),
        Curve("target", "target", trivial_style()),
    ]
    loss = "weighted cross entropy + Dice loss"
    plot_history(path, aim, loss, "Dice coefficient of fractals", curves, (0, 1))


def plot_volume(
    path: Path,
    truth: np.ndarray,
    predicted: np.ndarray,
    boxes: Sequence[RankBox],
    title: str,
) -> None:
    """Draw the voxels of fractals, true and predicted, into a PNG file.

    Args:
        truth, predicted: labels of the voxels, (D, H, W) each.
        boxes: the boxes of the ranks in a tensor (N, C, D, H, W).
    """
    owner = np.zeros(truth.shape, int)
    for rank, box in boxes:
        owner[box[2:]] = rank
    figure = Figure(figsize=(20, 5), layout="constrained")
    figure.suptitle(title)
    colour = np.array(COLOUR) / 255
    there = np.nonzero(truth)
    classes = {
        f"class {label}": COLOURS[label % len(COLOURS)] for label in _labels(truth, predicted)
    }
    ranks = {f"rank {rank}": COLOURS[rank % len(COLOURS)] for rank, _ in boxes}
    drawn: list[tuple[str, Any, Any]] = [
        ("volume", there, [colour] * len(there[0])),
        ("mask", there, _colours(truth[there])),
        ("prediction", np.nonzero(predicted), _colours(predicted[np.nonzero(predicted)])),
        ("other class than in the mask", np.nonzero(truth != predicted), "black"),
        ("ranks", there, _colours(owner[there])),
    ]
    for place, (name, points, colours) in enumerate(drawn, start=1):
        axes = figure.add_subplot(1, len(drawn), place, projection="3d")
        every = max(1, -(-len(points[0]) // POINTS))
        depth, height, width = (index[::every] for index in points)
        shown = colours if isinstance(colours, str) else colours[::every]
        size = (90 / truth.shape[0]) ** 2
        axes.scatter(width, height, depth, c=shown, s=size, marker="s", linewidths=0)
        sides = [(-0.5, n - 0.5) for n in truth.shape]
        axes.set(title=f"{name}: {len(points[0])} voxels")
        axes.set(xlim=sides[2], ylim=sides[1], zlim=sides[0])
        axes.set(xlabel="width", ylabel="height", zlabel="depth")
    patches = [Patch(color=colour, label=name) for name, colour in (classes | ranks).items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=12, frameon=False)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))


def _labels(*labels: np.ndarray) -> list[int]:
    found = np.unique(np.concatenate([np.unique(x) for x in labels]))
    return [int(label) for label in found if label]


def _colours(numbers: np.ndarray) -> list[str]:
    return [COLOURS[n % len(COLOURS)] for n in numbers.tolist()]
