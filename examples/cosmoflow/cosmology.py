"""Flat cosmologies of matter and a cosmological constant: growth, transfer function, spectrum.

Lengths are in Mpc/h, wave numbers k in h/Mpc, powers in (Mpc/h)^3; h = H_0 / (100 km/s/Mpc).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RANGES = {"omega_m": (0.2, 0.4), "sigma_8": (0.6, 1.0), "n_s": (0.85, 1.05), "h_0": (55.0, 85.0)}
"""The parameters and the ranges they are drawn from, around measured values: H_0 in km/s/Mpc."""

BARYONS = 0.0224
"""Omega_b h^2, the same for all cosmologies: it is known from the light elements."""

CMB_TEMPERATURE = 2.7255
"""The temperature of the microwave background, in K."""


@dataclass(frozen=True)
class Cosmology:
    """A flat universe.

    Attributes:
        omega_m: the density of matter over the critical density, today.
        sigma_8: the deviation of the linear density contrast in spheres of 8 Mpc/h, today.
        n_s: the index of the primordial spectrum.
        h_0: the Hubble constant in km/s/Mpc.
    """

    omega_m: float
    sigma_8: float
    n_s: float
    h_0: float

    def growth(self, redshift: float) -> float:
        """Return the linear growth of contrasts until a redshift, over the growth until today.

        The growing mode of Heath, MNRAS 179 (1977): D(a) ~ E(a) int_0^a da' / (a' E(a'))^3.
        """
        return self._growing_mode(1.0 / (1.0 + redshift)) / self._growing_mode(1.0)

    def transfer(self, k: Array) -> Array:
        """Return the transfer function at wave numbers `k`; 1 for k = 0.

        It is the growth of waves until matter dominates, relative to very long waves. The fit
        without acoustic oscillations of Eisenstein and Hu, ApJ 496 (1998), equations 26 and 28 to
        31.
        """
        h = self.h_0 / 100.0
        matter = self.omega_m * h**2
        fraction = BARYONS / matter
        sound_horizon = 44.5 * np.log(9.83 / matter) / np.sqrt(1.0 + 10.0 * BARYONS**0.75)  # Mpc
        alpha = (
            1.0
            - 0.328 * np.log(431.0 * matter) * fraction
            + 0.38 * np.log(22.3 * matter) * fraction**2
        )
        suppressed = 1.0 + (0.43 * k * h * sound_horizon) ** 4
        shape = self.omega_m * h * (alpha + (1.0 - alpha) / suppressed)
        q = k * (CMB_TEMPERATURE / 2.7) ** 2 / shape
        logarithm = np.log(2.0 * np.e + 1.8 * q)
        return np.asarray(logarithm / (logarithm + (14.2 + 731.0 / (1.0 + 62.5 * q)) * q**2))

    def power(self, k: Array) -> Array:
        """Return the power spectrum of the linear density contrast today; 0 for k = 0."""
        return np.asarray(self._amplitude * k**self.n_s * self.transfer(k) ** 2)

    @cached_property
    def _amplitude(self) -> float:
        """Return the factor with which spheres of 8 Mpc/h have the deviation sigma_8."""
        # ln k by Gauss and Legendre: beyond these bounds the window, or P, is negligible.
        nodes, weights = np.polynomial.legendre.leggauss(400)
        low, high = np.log(1e-5), np.log(20.0)
        k = np.exp(0.5 * (high - low) * nodes + 0.5 * (high + low))
        integrand = k ** (3.0 + self.n_s) * self.transfer(k) ** 2 * sphere_window(8.0 * k) ** 2
        variance = 0.5 * (high - low) * (weights @ integrand) / (2.0 * np.pi**2)
        return float(self.sigma_8**2 / variance)

    def _growing_mode(self, a: float) -> float:
        # With a' = x^2 the integrand is smooth at 0.
        nodes, weights = np.polynomial.legendre.leggauss(64)
        x = 0.5 * np.sqrt(a) * (nodes + 1.0)
        integrand = 2.0 * x * (self.omega_m / x**2 + (1.0 - self.omega_m) * x**4) ** -1.5
        expansion = np.sqrt(self.omega_m / a**3 + 1.0 - self.omega_m)
        return float(expansion * 0.5 * np.sqrt(a) * (weights @ integrand))


def sphere_window(x: Array) -> Array:
    """Return the Fourier transform of a sphere of volume 1, at the product of k and radius."""
    small = np.abs(x) < 1e-2
    safe = np.where(small, 1.0, x)
    window = 3.0 * (np.sin(safe) - safe * np.cos(safe)) / safe**3
    return np.asarray(np.where(small, 1.0 - x**2 / 10.0, window))


def draw_cosmology(seed: int, index: int) -> Cosmology:
    """Return the random cosmology of universe `index`, which does not depend on other draws."""
    random = np.random.default_rng([seed, index, 0])
    return Cosmology(**{name: random.uniform(*RANGES[name]) for name in RANGES})
