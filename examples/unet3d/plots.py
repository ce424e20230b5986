"""Slices of a volume with the truth and the prediction drawn over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distconv.data.durable import write_atomically
from examples.trainer.plots import AMBER, BLUE, GREEN, RED, Curve, network_style, plot_history
from examples.trainer.ranks import RankBox, draw_boxes

from .tomography import CLASSES

COLOURS = {"body": BLUE, "organ": GREEN, "lesion": RED}
"""The colours of the classes that are drawn over the image."""


def plot_loss(path: Path, history: list[dict[str, Any]]) -> None:
    """Draw the loss of every step and epoch, and the Dice coefficients, into `path`."""
    colours = {"background": AMBER, **COLOURS}
    curves = [Curve(f"dice_{name}", name, network_style(colours[name])) for name in CLASSES]
    loss = "cross entropy + Dice loss"
    plot_history(path, history, loss, "Dice coefficient", curves, (0, 1))


def plot_slices(
    path: Path,
    image: np.ndarray,
    truth: np.ndarray,
    predicted: np.ndarray,
    boxes: Sequence[RankBox],
    title: str,
) -> None:
    """Draw three slices of a volume, across depth, height and width, into `path`.

    They go through the place with most lesions. Beside the image are the truth and the prediction
    over it, the voxels in which they differ, and the boxes of the ranks that the slice meets.

    Args:
        image, truth, predicted: (D, H, W): intensities, and the true and predicted label of each
        voxel.
        boxes: the boxes of the ranks in a tensor (N, C, D, H, W).
    """
    figure = Figure(figsize=(16, 9.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(3, 5)
    for row, (dimension, name) in enumerate(enumerate(("depth", "height", "width"))):
        other = tuple(d for d in range(3) if d != dimension)
        plane = int(((truth == CLASSES.index("lesion")) + 1e-6 * (truth > 0)).sum(other).argmax())
        below, true, guess = (x.take(plane, axis=dimension) for x in (image, truth, predicted))
        for place in axes[row]:
            place.imshow(below, cmap="gray", vmin=-0.1, vmax=1.1)
            place.set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(f"{name} {plane}")
        _draw_labels(axes[row, 1], true)
        _draw_labels(axes[row, 2], guess)
        wrong = np.ma.masked_equal((true != guess).astype(float), 0)
        axes[row, 3].imshow(wrong, cmap=ListedColormap([AMBER]), interpolation="nearest")
        through = [
            b for b in boxes if b[1][2 + dimension].start <= plane < b[1][2 + dimension].stop
        ]
        draw_boxes(axes[row, 4], through, (2 + other[0], 2 + other[1]))
    names = ("image", "truth", "prediction", "differences", "ranks")
    for place, name in zip(axes[0], names, strict=True):
        place.set_title(name)
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=130))


def _draw_labels(axes: Axes, labels: np.ndarray) -> None:
    """Colour the classes of a slice over its image."""
    for name, colour in COLOURS.items():
        own = np.ma.masked_equal((labels == CLASSES.index(name)).astype(float), 0)
        opacity = 0.25 if name == "body" else 0.6
        axes.imshow(own, cmap=ListedColormap([colour]), alpha=opacity, interpolation="nearest")
