"""The errors of the estimated parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from distconv.data import Loader
from examples.trainer.example import Score

from .cosmology import RANGES


@dataclass(frozen=True)
class ParameterScore(Score):
    """The errors of estimates. Ranges run from -1 to 1.

    Attributes:
        loss: mean squared error over samples and parameters.
        universe_loss: the same for the mean of the estimates for all parts of a universe.
        trivial_loss: the same for the mean of the true parameters, the best estimate without data.
        error_omega_m, error_sigma_8, error_n_s, error_h_0: root mean squared errors, in the units
            of the parameters.
    """

    universe_loss: float
    trivial_loss: float
    error_omega_m: float
    error_sigma_8: float
    error_n_s: float
    error_h_0: float

    def __str__(self) -> str:
        errors = (f"{name} {getattr(self, f'error_{name}'):.3g}" for name in RANGES)
        return (
            f"loss {self.loss:.4g} (trivial {self.trivial_loss:.4g}), errors of {', '.join(errors)}"
        )


def estimates(model: nn.Module, batches: Loader) -> tuple[np.ndarray, np.ndarray]:
    """Return the estimated and the true parameters of all samples in order, (samples, 4) each.

    Computed in evaluation mode; -1 to 1 over their ranges, the same on all ranks. Collective.
    """
    model.eval()
    estimated, true = [], []
    with torch.no_grad():
        for density, parameters in batches:
            estimated.append(model(density).full_tensor().cpu().double().numpy())
            true.append(parameters.full_tensor().cpu().double().numpy())
    return np.concatenate(estimated), np.concatenate(true)


def score(estimated: np.ndarray, true: np.ndarray, samples_a_universe: int) -> ParameterScore:
    """Return the score of estimates, (samples, 4) in -1 to 1, a universe's parts adjacent."""
    squares = (estimated - true) ** 2
    of_universes = [
        x.reshape(-1, samples_a_universe, x.shape[1]).mean(1) for x in (estimated, true)
    ]
    halves = [(high - low) / 2 for low, high in RANGES.values()]
    errors = np.sqrt(squares.mean(0)) * halves
    return ParameterScore(
        float(squares.mean()),
        float(((of_universes[0] - of_universes[1]) ** 2).mean()),
        float(true.var(0).mean()),
        *errors.tolist(),
    )
