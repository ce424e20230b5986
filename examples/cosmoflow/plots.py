"""Pictures of estimated against true parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distconv.data.durable import write_atomically
from examples.trainer.plots import BLUE, Curve, plot_history, trivial_style

from .cosmology import RANGES
from .data import from_range

TITLES = {
    "omega_m": r"$\Omega_m$",
    "sigma_8": r"$\sigma_8$",
    "n_s": r"$n_s$",
    "h_0": r"$H_0$ (km/s/Mpc)",
}


def plot_loss(path: Path, history: list[dict[str, Any]]) -> None:
    """Draw the loss of every step and epoch, and the validation loss beside trivial ones."""
    curves = [Curve("loss", "network"), Curve("trivial_loss", "mean of the truth", trivial_style())]
    if any(entry["universe_loss"] != entry["loss"] for entry in history):
        style = {"linestyle": ":", "color": BLUE}
        curves.insert(1, Curve("universe_loss", "averaged over a universe", style))
    plot_history(path, history, "mean squared error", "mean squared error, of -1 to 1", curves)


def plot_estimates(
    path: Path, estimated: np.ndarray, true: np.ndarray, samples_a_universe: int
) -> None:
    """Draw estimated against true parameters into `path`, a panel each.

    Args:
        estimated, true: (samples, 4) in -1 to 1 over their ranges.
        samples_a_universe: the parts of a universe; for several, their mean is drawn, too.
    """
    estimated, true = from_range(estimated), from_range(true)
    figure = Figure(figsize=(10, 9.5), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    for place, (axes, (name, ends)) in enumerate(zip(panels, RANGES.items(), strict=True)):
        x, y = true[:, place], estimated[:, place]
        error = np.sqrt(np.mean((y - x) ** 2))
        explained = 1.0 - np.mean((y - x) ** 2) / x.var() if x.var() else 0.0
        axes.plot(ends, ends, color="0.4", lw=1)
        if samples_a_universe > 1:
            axes.plot(x, y, ".", ms=3, color="0.75", label="parts")
            x, y = (values.reshape(-1, samples_a_universe).mean(1) for values in (x, y))
            axes.plot(x, y, "o", ms=4, color=BLUE, label="mean of a universe")
            axes.legend(frameon=False)
        else:
            axes.plot(x, y, "o", ms=4, color=BLUE)
        margin = 0.1 * (ends[1] - ends[0])
        limits = (ends[0] - margin, ends[1] + margin)
        axes.set(xlim=limits, ylim=limits, xlabel=f"true {TITLES[name]}", ylabel="estimated")
        axes.set_title(f"{TITLES[name]}: error {error:.3g}, $R^2$ = {explained:.2f}")
        axes.set_aspect("equal")
        axes.grid(alpha=0.3)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=130))
