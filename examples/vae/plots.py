"""A decoded image, and what ranks and tiles change in it."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from distconv.data.durable import write_atomically

from .measure import Half


def plot_seams(path: Path, half: Half) -> None:
    """Draw the last frame as one rank decodes it, and the errors of cut decoding and of tiles.

    Both errors have the same scale, on which the largest of the image is 1.
    """
    whole = half.ways[0]
    cut, tiles = half.ways[-2:]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    figure.suptitle(f"{half.autoencoder}, {'x'.join(map(str, half.pixels))}, random weights")
    left, *right = figure.subplots(1, 3)
    image = _frame(whole.result)
    low, high = image.aminmax()
    left.imshow(((image - low) / (high - low)).permute(1, 2, 0))
    left.set_title("decoded on one rank")
    largest = float(half.error(tiles))
    for axes, way in zip(right, (cut, tiles), strict=True):
        errors = _frame(way.result - whole.result).abs().amax(0) / whole.result.abs().max()
        drawn = axes.imshow(errors, cmap="magma", vmin=0, vmax=largest)
        axes.set_title(f"error of {way.name}: at most {half.error(way):.1e}")
    for axes in (left, *right):
        axes.set(xticks=[], yticks=[])
    figure.colorbar(drawn, ax=right, shrink=0.8)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))


def _frame(images: Tensor) -> Tensor:
    """Return the image (3, height, width); for a video its last frame."""
    return images[0] if images.dim() == 4 else images[0, :, -1]
