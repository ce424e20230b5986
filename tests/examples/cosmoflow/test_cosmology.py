"""Growth, transfer function and normalisation of examples/cosmoflow."""

from __future__ import annotations

import numpy as np
import pytest

from examples.cosmoflow.cosmology import BARYONS, RANGES, Cosmology, draw_cosmology, sphere_window

PLANCK = Cosmology(omega_m=0.31, sigma_8=0.81, n_s=0.965, h_0=67.7)
COSMOLOGIES = [PLANCK, *(draw_cosmology(0, index) for index in range(4))]


def bardeen(cosmology: Cosmology, k: np.ndarray) -> np.ndarray:
    """The fit of Bardeen et al. (1986), with the shape parameter of Sugiyama (1995)."""
    h = cosmology.h_0 / 100
    baryons = BARYONS / h**2
    exponent = -baryons * (1 + np.sqrt(2 * h) / cosmology.omega_m)
    q = k / (cosmology.omega_m * h * np.exp(exponent))
    polynomial = 1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    return np.log1p(2.34 * q) / (2.34 * q) * polynomial**-0.25


def test_growth_without_a_cosmological_constant_is_the_scale_factor() -> None:
    universe = Cosmology(omega_m=1.0, sigma_8=0.8, n_s=1.0, h_0=50.0)
    for redshift in (0.0, 0.5, 1.0, 3.0, 30.0):
        assert universe.growth(redshift) == pytest.approx(1 / (1 + redshift), rel=1e-12)


def test_growth_fits_the_formula_of_carroll_press_and_turner() -> None:
    def fitted(matter: float, vacuum: float) -> float:
        middle = (1 + matter / 2) * (1 + vacuum / 70)
        return 2.5 * matter / (matter ** (4 / 7) - vacuum + middle)

    for cosmology in COSMOLOGIES:
        for redshift in (0.5, 1.5, 3.0):
            square = cosmology.omega_m * (1 + redshift) ** 3 + 1 - cosmology.omega_m
            matter = cosmology.omega_m * (1 + redshift) ** 3 / square
            ratio = fitted(matter, 1 - matter) / fitted(cosmology.omega_m, 1 - cosmology.omega_m)
            assert cosmology.growth(redshift) == pytest.approx(ratio / (1 + redshift), rel=0.01)


def test_the_transfer_function_begins_at_one_and_is_near_another_fit() -> None:
    for cosmology in COSMOLOGIES:
        assert cosmology.transfer(np.array([0.0, 1e-5])) == pytest.approx(1.0, abs=1e-3)
        k = np.geomspace(0.005, 5.0, 50)
        np.testing.assert_allclose(cosmology.transfer(k), bardeen(cosmology, k), rtol=0.2)


def test_spheres_of_8_megaparsecs_have_the_deviation_asked_for() -> None:
    # By the trapezoidal rule in k, instead of Gauss' in its logarithm.
    k = np.concatenate([np.linspace(1e-6, 0.1, 20_001), np.linspace(0.1, 10, 100_001)[1:]])
    for cosmology in COSMOLOGIES:
        integrand = k**2 * cosmology.power(k) * sphere_window(8 * k) ** 2
        variance = np.trapezoid(integrand, k) / (2 * np.pi**2)
        assert np.sqrt(variance) == pytest.approx(cosmology.sigma_8, rel=1e-4)
    assert PLANCK.power(np.array([0.0])) == 0


def test_cosmologies_lie_in_their_ranges_and_differ() -> None:
    drawn = np.array([list(vars(draw_cosmology(3, index)).values()) for index in range(200)])
    low, high = np.array(list(RANGES.values())).T
    assert (drawn >= low).all() and (drawn <= high).all()
    np.testing.assert_allclose(drawn.mean(0), (low + high) / 2, rtol=0.05)
    assert vars(draw_cosmology(3, 7)) == dict(zip(RANGES, drawn[7], strict=True))
