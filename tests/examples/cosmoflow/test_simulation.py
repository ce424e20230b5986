"""Fields, displacements and densities of examples/cosmoflow, and slabs against one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from examples.cosmoflow.cosmology import Cosmology, draw_cosmology
from examples.cosmoflow.simulation import (
    SLABS,
    density_contrast,
    displaced_density,
    displacements,
    to_field,
    to_modes,
    white_noise,
)
from tests.support.example_grids import alone

WORLD = MPI.COMM_WORLD
GRIDS = {
    1: [{}],
    2: [{"depth": 2}, {"sample": 2}],
    3: [{"depth": 3}],
    4: [{"sample": 2, "depth": 2}, {"depth": 4}],
}
COSMOLOGY = Cosmology(omega_m=0.3, sigma_8=0.9, n_s=0.96, h_0=70.0)


def whole(field: dc.DistTensor) -> np.ndarray:
    return field.full_tensor().numpy()


@pytest.mark.parametrize("width", [8, 9])
def test_modes_are_the_fourier_transform_and_come_back(width: int) -> None:
    noise = white_noise(0, [0, 1], width, alone())
    modes = to_modes(noise)
    np.testing.assert_allclose(whole(modes), np.fft.rfftn(whole(noise), axes=(2, 3, 4)), atol=1e-12)
    np.testing.assert_allclose(whole(to_field(modes)), whole(noise), atol=1e-12)


def test_the_spectrum_of_a_field_is_the_input_spectrum() -> None:
    width, cell, universes = 32, 8.0, 8
    noise = white_noise(5, range(universes), width, alone())
    modes = whole(density_contrast(noise, universes * [COSMOLOGY], cell))[:, 0]
    volume = (width * cell) ** 3
    # |mode|^2 without a factor is W^6 / L^3 times the power.
    power = np.abs(modes) ** 2 * volume / width**6
    axis, half = np.fft.fftfreq(width, cell), np.fft.rfftfreq(width, cell)
    k = 2 * np.pi * np.sqrt(sum(x**2 for x in np.ix_(axis, axis, half)))
    # Modes of the last index but its first and last plane stand for two.
    weight = np.full(k.shape, 2.0)
    weight[..., 0] = weight[..., -1] = 1.0
    edges = 2 * np.pi / (width * cell) * np.arange(1.5, 15, 2)
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        shell = (k >= low) & (k < high)
        measured = (weight * power)[:, shell].sum() / (universes * weight[shell].sum())
        expected = (weight * COSMOLOGY.power(k))[shell].sum() / weight[shell].sum()
        # Each mode's power scatters by as much as it is.
        independent = universes * weight[shell].sum() / 2
        assert abs(measured / expected - 1) < 4 / np.sqrt(independent)


def plane_wave(width: int, waves: int, amplitude: float, dimension: int) -> dc.DistTensor:
    """The modes of the contrast amplitude cos(k q) along one dimension."""
    wave = amplitude * np.cos(2 * np.pi * waves * np.arange(width) / width)
    shape = [1] * 5
    shape[2 + dimension] = width
    field = np.broadcast_to(wave.reshape(shape), (1, 1, *3 * (width,))).copy()
    grid = alone()
    return to_modes(dc.distribute_tensor(torch.from_numpy(field), grid, SLABS))


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_the_density_of_a_plane_wave_is_zeldovichs(dimension: int) -> None:
    width, amplitude, growth = 64, 0.8, 0.5
    psi = displacements(plane_wave(width, 1, amplitude, dimension))
    density = whole(displaced_density(psi, [growth]))[0, 0]
    density = np.moveaxis(density, dimension, 0)
    np.testing.assert_allclose(density, np.broadcast_to(density[:, :1, :1], density.shape))
    # At x = q - D A sin(k q) / k the density is 1 / (1 - D A cos(k q)): its modes are Bessel's
    # J_n(n D A), here by their integral, times the window of two boxes that are one cell wide.
    angle = 2 * np.pi * (np.arange(1000) + 0.5) / 1000
    modes = np.fft.rfft(density[:, 0, 0]) / width
    for n in range(1, 5):
        bessel = np.cos(n * (growth * amplitude * np.sin(angle) - angle)).mean()
        expected = bessel * np.sinc(n / width) ** 2
        assert expected > 0.01
        assert modes[n] == pytest.approx(expected, abs=1e-3)


def test_mass_is_conserved_and_goes_to_the_eight_nearest_cells() -> None:
    width = 6
    shifts = [torch.zeros(1, 1, width, width, width, dtype=torch.float64) for _ in range(3)]
    # One particle goes across the corner of the box, all others stay.
    for field, shift in zip(shifts, (-0.25, 6.5, -1.125), strict=True):
        field[0, 0, 0, 0, 0] = shift
    grid = alone()
    psi = [dc.distribute_tensor(field, grid, SLABS) for field in shifts]
    density = whole(displaced_density(psi, [1.0]))[0, 0]
    assert density.sum() == pytest.approx(width**3, rel=1e-14)
    extra = density - 1
    extra[0, 0, 0] += 1
    expected = np.zeros((width, width, width))
    for z, z_share in ((5, 0.25), (0, 0.75)):
        for y, y_share in ((0, 0.5), (1, 0.5)):
            for x, x_share in ((4, 0.125), (5, 0.875)):
                expected[z, y, x] = z_share * y_share * x_share
    np.testing.assert_allclose(extra, expected, atol=1e-12)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("width", [8, 7])
def test_slabs_make_the_universes_of_one_rank(width: int) -> None:
    universes, cell, seed = [3, 4, 5], 2.0, 11
    cosmologies = [draw_cosmology(seed, index) for index in universes]
    growth = [1.0, 0.5, 0.25]

    def made(grid: dc.ProcessGrid) -> Sequence[np.ndarray]:
        noise = white_noise(seed, universes, width, grid)
        psi = displacements(density_contrast(noise, cosmologies, cell))
        return [*map(whole, psi), whole(displaced_density(psi, growth))]

    expected = made(alone())
    # Particles cross several slabs, and the edges of the box.
    assert max(np.abs(field).max() for field in expected[:3]) > width / 4
    assert expected[3].sum() == pytest.approx(3 * width**3, rel=1e-12)
    for extents in GRIDS[WORLD.size]:
        for actual, wanted in zip(made(dc.ProcessGrid(**extents)), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, atol=1e-10)


@pytest.mark.parallel(2)
def test_no_rank_holds_a_volume() -> None:
    grid = dc.ProcessGrid(depth=2)
    noise = white_noise(0, [0], 8, grid)
    contrast = density_contrast(noise, [COSMOLOGY], 4.0)
    psi = displacements(contrast)
    density = displaced_density(psi, [1.0])
    for field in (noise, *psi, density):
        assert field.to_local().numel() == 8**3 // 2
    assert contrast.to_local().numel() == 8 * 4 * 5
