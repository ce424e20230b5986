"""Matter in periodic boxes, cut into slabs over the ranks: random fields, displaced particles.

A field is a DistTensor (universes, 1, W, W, W), cut in universes and depth, and its modes are one
(universes, 1, W, W, W // 2 + 1), cut in universes and height: a Fourier transform is local along
two dimensions, then an all-to-all exchanges the slabs, then it is local along the third. No rank
ever holds a volume, and all numbers equal those of one rank up to rounding.

Positions and displacements are in cells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import distconv as dc
from distconv.geometry.layout import block, owning_part
from distconv.tensor.redistribution import cuts_of_layout

from .cosmology import Cosmology

SLABS = dc.Layout(sample="sample", depth="depth")
"""The layout of fields."""

_PARTICLES = 2**19
"""Particles that are assigned to cells at once, so that temporaries stay small."""


def white_noise(
    seed: int, universes: Sequence[int], width: int, grid: dc.ProcessGrid
) -> dc.DistTensor:
    """Return a field of independent normal numbers; a plane depends on seed, universe and plane
    alone.

    Not collective.
    """
    shape = (len(universes), 1, width, width, width)
    box = dc.local_box(shape, grid, SLABS)
    noise = np.empty(box.shape)
    for place, sample in enumerate(range(box.start[0], box.stop[0])):
        for row, plane in enumerate(range(box.start[2], box.stop[2])):
            random = np.random.default_rng([seed, universes[sample], 1, plane])
            noise[place, 0, row] = random.standard_normal((width, width))
    return dc.DistTensor.from_local(torch.from_numpy(noise), grid, SLABS, shape=shape)


def to_modes(field: dc.DistTensor) -> dc.DistTensor:
    """Return the discrete Fourier transform of a field, without a factor. Collective."""
    return torch.fft.rfftn(field, dim=(2, 3, 4))


def to_field(modes: dc.DistTensor) -> dc.DistTensor:
    """Return the field with these modes, the inverse of `to_modes`. Collective."""
    width = modes.shape[2]
    return torch.fft.irfftn(modes, s=(width,) * 3, dim=(2, 3, 4))


def wave_numbers(modes: dc.DistTensor) -> list[Tensor]:
    """Return the three components of the wave vectors of this rank's modes, in radians a cell.

    Their shapes broadcast to the last three dimensions of the block. With an even number of modes
    the highest one stands for both signs; its component is 0, as required of a derivative.
    """
    width = modes.shape[2]
    box = dc.local_box(modes.shape, modes.grid, modes.grid_layout)
    components = []
    for dimension, frequencies in enumerate((np.fft.fftfreq, np.fft.fftfreq, np.fft.rfftfreq)):
        own = 2 * np.pi * frequencies(width)[box.slices[2 + dimension]]
        shape = [-1 if d == dimension else 1 for d in range(3)]
        components.append(torch.from_numpy(own).reshape(shape))
    return components


def density_contrast(
    noise: dc.DistTensor, cosmologies: Sequence[Cosmology], cell: float
) -> dc.DistTensor:
    """Return the modes of Gaussian random fields with the linear spectra of today. Collective.

    Args:
        noise: white noise, universes of W^3 cells.
        cosmologies: one for each universe.
        cell: the side of a cell, in Mpc/h.
    """
    modes = to_modes(noise)
    box = dc.local_box(modes.shape, modes.grid, modes.grid_layout)
    z, y, x = wave_numbers(modes)
    k = (torch.sqrt(z**2 + y**2 + x**2) / cell).numpy()
    local = modes.to_local().clone()
    for place, sample in enumerate(range(box.start[0], box.stop[0])):
        # <|noise|^2> = W^3, and <|contrast|^2> = W^6 P / L^3 with L = W cells.
        amplitude = np.sqrt(cosmologies[sample].power(k) / cell**3)
        local[place, 0] *= torch.from_numpy(amplitude)
    return _like(modes, local)


def displacements(contrast: dc.DistTensor) -> list[dc.DistTensor]:
    """Return the Zel'dovich displacement along depth, height and width, in cells. Collective.

    It is psi with div psi = -contrast and no rotation: i k / k^2 of a mode. Zel'dovich, A&A 5
    (1970).

    Args:
        contrast: the modes of a density contrast.
    """
    components = wave_numbers(contrast)
    square = sum((k**2 for k in components), start=torch.zeros(()))
    square = torch.where(square > 0, square, torch.ones(()))  # the mean displaces nothing
    width = contrast.shape[2]
    fields = []
    for k in components:
        odd = torch.where(k.abs() < np.pi * (1 - 0.5 / width), k, torch.zeros(()))
        fields.append(to_field(_like(contrast, contrast.to_local() * (1j * odd / square))))
    return fields


def displaced_density(psi: Sequence[dc.DistTensor], growth: Sequence[float]) -> dc.DistTensor:
    """Return the density, over its mean, of particles displaced from the centres of all cells.

    Collective. A particle's mass goes to the eight cells around it (cloud-in-cell; Hockney and
    Eastwood, 1981), which may be on other ranks.

    Args:
        psi: the displacements of today.
        growth: for each universe the growth, over that until today.
    """
    grid, shape = psi[0].grid, psi[0].shape
    width = shape[2]
    box = dc.local_box(shape, grid, SLABS)
    parts, own = grid.shape["depth"], grid.coords["depth"]
    thickest = block(width, parts, 0)[1]
    # The planes for the rank `parts` further on, for each universe of this rank.
    blocks = [field.to_local()[:, 0] for field in psi]
    blank = partial(torch.zeros, box.shape[0], 1, thickest, width, width, dtype=blocks[0].dtype)
    outgoing: defaultdict[int, Tensor] = defaultdict(blank)
    for place, sample in enumerate(range(box.start[0], box.stop[0])):
        first, planes = _assign([growth[sample] * b[place] for b in blocks], box.start[2], width)
        for row, plane in enumerate(planes):
            home = (first + row) % width
            owner = owning_part(width, parts, home)
            within = home - block(width, parts, owner)[0]
            outgoing[(owner - own) % parts][place, 0, within] += plane
    total = torch.zeros(box.shape, dtype=blocks[0].dtype)
    cuts = cuts_of_layout(dc.Layout(sample="sample", channel="depth"), grid, 5)
    of_all = (shape[0], parts, thickest, width, width)
    for distance in sorted(set().union(*grid.all_gather_object(set(outgoing)))):
        mine = outgoing.pop(distance) if distance in outgoing else blank()
        if distance:
            rolled: Any = torch.roll(dc.DistTensor(mine, of_all, cuts, grid), distance, 1)
            mine = rolled.to_local()
        total += mine[:, :, : box.shape[2]]
    return dc.DistTensor(total, shape, psi[0].cuts, grid)


def _assign(psi: Sequence[Tensor], start: int, width: int) -> tuple[int, Tensor]:
    """Assign the particles of a slab to cells.

    Args:
        psi: displacements (planes, W, W) along depth, height and width.
        start: the first plane of the slab.

    Returns the first plane that has mass, which may be negative or beyond the box, and the planes
    from there: (n, W, W).
    """
    planes = len(psi[0])
    if not planes:
        return start, torch.zeros(0, width, width, dtype=psi[0].dtype)
    along = torch.arange(start, start + planes, dtype=psi[0].dtype).reshape(-1, 1, 1)
    least, most = (int(torch.floor(f(along + psi[0]))) for f in (torch.min, torch.max))
    mass = torch.zeros((most - least + 2) * width**2, dtype=psi[0].dtype)
    ticks = torch.arange(width, dtype=psi[0].dtype)
    step = max(1, _PARTICLES // width**2)
    for a in range(0, planes, step):
        piece = slice(a, a + step)
        z = along[piece] + psi[0][piece] - least
        y = ticks.reshape(-1, 1) + psi[1][piece]
        x = ticks + psi[2][piece]
        corners = []
        for position, periodic in ((z, False), (y, True), (x, True)):
            lower = torch.floor(position)
            upper_share = position - lower
            cell = lower.long()
            pair = (cell % width, (cell + 1) % width) if periodic else (cell, cell + 1)
            corners.append(((pair[0], 1 - upper_share), (pair[1], upper_share)))
        for z_cell, z_share in corners[0]:
            for y_cell, y_share in corners[1]:
                rows, share = (z_cell * width + y_cell) * width, z_share * y_share
                for x_cell, x_share in corners[2]:
                    mass.index_add_(0, (rows + x_cell).reshape(-1), (share * x_share).reshape(-1))
    return least, mass.reshape(-1, width, width)


def _like(modes: dc.DistTensor, local: Tensor) -> dc.DistTensor:
    """Return a DistTensor with the layout of `modes`, whose block on this rank is `local`."""
    return dc.DistTensor(local, modes.shape, modes.cuts, modes.grid)
