"""Spectral layers that keep few modes: partial transforms over transforms in full.

One call of a layer of a Fourier neural operator, on a plane partitioned in height, is timed with
its backward pass. The numbers decide `FEW` and `MOST_ALONG` in `distconv/ops/support/spectra.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from benchmarks.measuring.memory import peak_of
from benchmarks.measuring.report import Row, of_bytes, over
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.turns import alternate
from distconv.grid.process_grid import ProcessGrid
from distconv.ops.support import spectra
from distconv.planning.scaling import Contender, sleep_until_all_are_here
from distconv.tensor.dist_tensor import distribute_tensor

CHANNELS = 8

CASES = ((96, 6), (96, 12), (96, 24), (192, 12), (192, 24), (192, 48))
"""Rows of a square plane, and kept modes along each dimension."""


def modes(settings: Settings, cases: tuple[tuple[int, int], ...] = CASES) -> Iterator[Row]:
    """Yield rows of times and of peak memory for each case. All ranks call it."""
    grid = settings.grid(4)
    for rows, kept in cases:
        runs = [partial(_step, grid, rows, kept, few) for few in (1e9, 0.0)]
        sides = [Contender(make(), settings.threads) for make in runs]
        partly, full = alternate(grid.comm, sides, settings.seconds)
        row = "modes", f"{kept} of {by((rows, rows))}", settings.configuration(grid)
        yield over(row, "partial over full", partly, full, None)
        alone = peak_of(partial(_serial, rows, kept)) if grid.rank == 0 else None
        sleep_until_all_are_here(grid.comm)
        share = grid.comm.bcast(alone).whole / grid.size
        for way, make in zip(("partial", "full"), runs, strict=True):
            most = max(grid.comm.allgather(peak_of(make).whole))
            yield of_bytes(row, f"{way}: peak over share of serial peak", most, share)


def _layer(x: torch.Tensor, weights: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the result of a layer of the original Fourier neural operator."""
    x_ft = torch.fft.rfft2(x)
    out_ft = torch.zeros(x_ft.shape, dtype=torch.cfloat)
    for part in (slice(0, kept), slice(-kept, None)):
        modes = x_ft[:, :, part, :kept]
        out_ft[:, :, part, :kept] = torch.einsum("bixy,ioxy->boxy", modes, weights)
    return torch.fft.irfft2(out_ft, s=x.shape[2:])


def _operands(rows: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, CHANNELS, rows, rows, generator=generator)
    shape = CHANNELS, CHANNELS, kept, kept
    return x, torch.randn(shape, dtype=torch.cfloat, generator=generator)


def _step(grid: ProcessGrid, rows: int, kept: int, few: float) -> Callable[[], None]:
    plain, weights = _operands(rows, kept)
    x = distribute_tensor(plain, grid).requires_grad_()

    def step() -> None:
        with mock.patch.object(spectra, "FEW", few):
            _layer(x, weights, kept).sum().backward()
        x.grad = None

    return step


def _serial(rows: int, kept: int) -> Callable[[], None]:
    x, weights = _operands(rows, kept)
    x.requires_grad_()

    def step() -> None:
        _layer(x, weights, kept).sum().backward()
        x.grad = None

    return step
