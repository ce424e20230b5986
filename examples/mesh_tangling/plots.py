"""Two pictures of a training run: the loss, and a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from distconv.data.durable import write_atomically
from examples.trainer.plots import BLUE, GREEN, PALE, RED, Curve, plot_history, trivial_style
from examples.trainer.ranks import RankBox, draw_boxes

from .store import CHANNELS

CHANNELS_SHOWN = ("density", "pressure", "scaled Jacobian")
"""The inputs in the picture of a prediction: the flow, and the shear of the mesh."""


def plot_loss(path: Path, history: list[dict[str, Any]]) -> None:
    """Draw the loss of every step and epoch, and the intersection over union, into `path`.

    `history` holds the metrics of every epoch: `step_losses`, and the fields of a `MeshScore`.
    """
    curves = [
        Curve("iou", "network"),
        Curve("trivial_iou", "best trivial predictor", trivial_style()),
    ]
    plot_history(path, history, "mean squared error", "intersection over union", curves, (0, 1))


def plot_prediction(
    path: Path,
    inputs: dict[str, np.ndarray],
    truth: np.ndarray,
    probability: np.ndarray,
    boxes: Sequence[RankBox],
    serial: np.ndarray | None = None,
) -> None:
    """Draw one sample into `path`: three of its inputs, the truth, the prediction, the outcome, the
    ranks, and the difference from one rank.

    Args:
        inputs: three channels of the state by name, (S, S) each, in the units of `store`.
        truth: 1 where the mesh tangles and 0 elsewhere, (S, S).
        probability: the prediction, (S, S) in [0, 1].
        boxes: the boxes of the ranks in a tensor (N, C, S, S).
        serial: the prediction on one rank, or None.
    """
    figure = Figure(figsize=(17, 8), layout="constrained")
    axes = figure.subplots(2, 4, sharex=True, sharey=True)
    for place, (name, values) in zip(axes[0][:3], inputs.items(), strict=True):
        unit = "" if CHANNELS[name] == "1" else f" ({CHANNELS[name]})"
        # The extremes belong to a few zones; without them the rest would be one colour.
        low, high = np.percentile(values, (1, 99))
        image = _map(place, f"{name}{unit}", values, "viridis", low, high)
        figure.colorbar(image, ax=place, extend="both")

    title = f"truth: {truth.mean():.1%} of the zones tangle"
    _map(axes[1, 0], title, truth, ListedColormap([PALE, BLUE]))
    image = _map(axes[1, 1], "predicted probability", probability, "magma")
    figure.colorbar(image, ax=axes[1, 1])
    _plot_outcome(axes[1, 2], truth > 0.5, probability > 0.5)
    title = f"the boxes of {len(boxes)} ranks" if len(boxes) > 1 else "one rank holds the sample"
    _map(axes[0, 3], title, next(iter(inputs.values())), "Greys")
    axes[0, 3].images[0].autoscale()
    draw_boxes(axes[0, 3], boxes, (2, 3))
    if serial is None:
        axes[1, 3].axis("off")
    else:
        apart = np.abs(probability - serial)
        title = f"difference from one rank: at most {apart.max():.0e}"
        image = _map(axes[1, 3], title, apart, "cividis", high=max(apart.max(), 1e-9))
        figure.colorbar(image, ax=axes[1, 3])
    for place in axes[:, 0]:
        place.set_ylabel("zone")
    for place in axes[1]:
        place.set_xlabel("zone")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _plot_outcome(axes: Axes, truth: np.ndarray, called: np.ndarray) -> None:
    """Colour every zone by whether the prediction is right, and which kind of error it is."""
    union = np.count_nonzero(truth | called)
    iou = np.count_nonzero(truth & called) / union if union else 1.0
    outcome = np.select([truth & called, truth, called], [1, 2, 3])
    title = f"outcome: intersection over union {iou:.2f}"
    _map(axes, title, outcome, ListedColormap([PALE, GREEN, BLUE, RED]), high=3)
    for name, colour in (("found", GREEN), ("missed", BLUE), ("false alarm", RED)):
        axes.plot([], [], "s", color=colour, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)


def _map(
    axes: Axes,
    title: str,
    values: np.ndarray,
    colours: Colormap | str,
    low: float = 0.0,
    high: float = 1.0,
) -> AxesImage:
    """Return one value per zone as an image, with the first row of zones at the bottom."""
    axes.set_title(title)
    return axes.imshow(
        values, origin="lower", cmap=colours, vmin=low, vmax=high, interpolation="nearest"
    )
