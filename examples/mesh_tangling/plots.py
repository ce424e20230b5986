"""Two pictures of a training run: the loss, and a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from distconv.data.durable import write_atomically
from examples.trainer.plots import BLUE, GREEN, PALE, RED, Curve, plot_history, trivial_style
from examples.trainer.ranks import RankBox, draw_boxes, draw_halos

from .store import CHANNELS

CHANNELS_SHOWN = ("density", "pressure", "scaled Jacobian")
"""The inputs in the picture of a prediction: the flow, and the shear of the mesh."""


NEIGHBOURHOOD = 16
"""The zones along each side of the picture of halos."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold the samples of a picture.

    Attributes:
        density: the density of each sample, (S, S).
        blocks: the blocks of the ranks in a tensor (N, C, S, S) of these samples.
        needed: the same with the halo of the network's first convolution.
    """

    density: Sequence[np.ndarray]
    blocks: Sequence[RankBox]
    needed: Sequence[RankBox]

    def of(self, sample: int) -> tuple[list[RankBox], list[RankBox]]:
        """Return the blocks and the needed boxes of the ranks that hold a sample."""
        own = [rank for rank, box in self.blocks if box[0].start <= sample < box[0].stop]
        blocks, needed = ([b for b in boxes if b[0] in own] for boxes in (self.blocks, self.needed))
        return blocks, needed


def plot_loss(path: Path, history: list[dict[str, Any]], loss: str) -> None:
    """Draw the loss of every step and epoch, and the intersection over union, into `path`.

    `history` holds the metrics of every epoch: `step_losses`, and the fields of a `MeshScore`.
    `loss` is the title of the loss.
    """
    curves = [
        Curve("iou", "network"),
        Curve("trivial_iou", "best trivial predictor", trivial_style()),
    ]
    plot_history(path, history, loss, "intersection over union", curves, (0, 1))


def plot_prediction(
    path: Path,
    inputs: dict[str, np.ndarray],
    truth: np.ndarray,
    probability: np.ndarray,
    ranks: Ranks,
    apart: np.ndarray | None = None,
) -> None:
    """Draw one sample into `path`: three of its inputs, the truth, the prediction and the outcome.

    Beside it are the blocks of the ranks in the first two samples, with their halos, and the
    difference of the predictions from one rank's.

    Args:
        inputs: three channels of the state by name, (S, S) each, in the units of `store`.
        truth: 1 where the mesh tangles and 0 elsewhere, (S, S).
        probability: the prediction, (S, S) in [0, 1].
        ranks: the ranks, and all samples that they hold.
        apart: the absolute difference of all samples' predictions from those on one rank,
            (N, S, S), or None.
    """
    figure = Figure(figsize=(21, 8), layout="constrained")
    axes = figure.subplots(2, 5)
    for place, (name, values) in zip(axes[0][:3], inputs.items(), strict=True):
        unit = "" if CHANNELS[name] == "1" else f" ({CHANNELS[name]})"
        image = _map(place, f"{name}{unit}", values, "viridis", *_most(values))
        figure.colorbar(image, ax=place, extend="both")

    title = f"truth: {truth.mean():.1%} of the zones tangle"
    _map(axes[1, 0], title, truth, ListedColormap([PALE, BLUE]))
    image = _map(axes[1, 1], "predicted probability", probability, "magma")
    figure.colorbar(image, ax=axes[1, 1])
    _plot_outcome(axes[1, 2], truth > 0.5, probability > 0.5)
    for sample, place in enumerate(axes[0, 3:]):
        _plot_ranks(place, ranks, sample)
    if apart is None:
        axes[1, 3].axis("off")
    else:
        title = f"largest difference from one rank: {apart.max():.0e}"
        image = _map(axes[1, 3], title, apart[0], "cividis", high=max(apart.max(), 1e-9))
        figure.colorbar(image, ax=axes[1, 3])
    _plot_halo(axes[1, 4], ranks)
    for place in axes[:, 0]:
        place.set_ylabel("zone")
    for place in axes[1]:
        place.set_xlabel("zone")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _plot_ranks(axes: Axes, ranks: Ranks, sample: int) -> None:
    """Draw the blocks of the ranks that hold a sample; nothing for samples that no rank holds."""
    if sample >= len(ranks.density):
        axes.axis("off")
        return
    blocks, _ = ranks.of(sample)
    total = len(ranks.blocks)
    held = f"{len(blocks)} of the {total} ranks hold" if total > 1 else "one rank holds"
    _map_density(axes, f"{held} sample {sample}", ranks.density[sample])
    draw_boxes(axes, blocks, (2, 3))


def _plot_halo(axes: Axes, ranks: Ranks) -> None:
    """Draw the halos of the first convolution where the first rank's block of sample 0 ends."""
    blocks, needed = ranks.of(0)
    _, first = blocks[0]
    ends = [d for d in (2, 3) if first[d].stop < len(ranks.density[0])]
    if not ends:
        axes.axis("off")
        return
    _map_density(axes, "halos of the first convolution", ranks.density[0])
    draw_boxes(axes, blocks, (2, 3), names=False)
    draw_halos(axes, blocks, needed, (2, 3))
    middle = [first[d].stop if d in ends else (first[d].start + first[d].stop) / 2 for d in (2, 3)]
    reach = NEIGHBOURHOOD / 2
    axes.set_ylim(middle[0] - reach - 0.5, middle[0] + reach - 0.5)
    axes.set_xlim(middle[1] - reach - 0.5, middle[1] + reach - 0.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)


def _plot_outcome(axes: Axes, truth: np.ndarray, called: np.ndarray) -> None:
    """Colour every zone by whether the prediction is right, and which kind of error it is."""
    union = np.count_nonzero(truth | called)
    iou = np.count_nonzero(truth & called) / union if union else 1.0
    outcome = np.select([truth & called, truth, called], [1, 2, 3])
    title = f"outcome: intersection over union {iou:.2f}"
    _map(axes, title, outcome, ListedColormap([PALE, GREEN, BLUE, RED]), high=3)
    for name, colour in (("found", GREEN), ("missed", BLUE), ("false alarm", RED)):
        axes.plot([], [], "s", color=colour, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)


def _map_density(axes: Axes, title: str, density: np.ndarray) -> None:
    _map(axes, title, density, "Greys", *_most(density))


def _most(values: np.ndarray) -> tuple[float, float]:
    """Return limits for colours: extremes of a few zones would leave the rest one colour."""
    low, high = np.percentile(values, (1, 99))
    return low, high


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
