"""Fourier transforms equal serial ones, and move each element to one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, random_tensor
from tests.support.strategies import Case, on_any_grid, shapes

KINDS = "fft", "ifft", "rfft", "irfft", "hfft", "ihfft"


@on_any_grid(40)
def test_transforms_along_any_dimensions_equal_serial(case: Case) -> None:
    shape = [n + 1 for n in case.draw(shapes(1, 4, 5))]
    dims = case.some(range(len(shape))) or [0]
    kind = case.one_of(*KINDS)
    given = {
        "dim": [d - case.one_of(0, len(shape)) for d in dims],
        "s": case.one_of(None, [case.one_of(3, 4, -1) for _ in dims]),
        "norm": case.one_of(None, "ortho", "forward"),
    }
    function = getattr(torch.fft, f"{kind}n")
    case.agrees(lambda x: function(x, **given), case.tensor(shape))


def moved(
    function: Callable[..., Tensor],
    x: Tensor,
    grid: dc.ProcessGrid,
    layout: dc.Layout | None = None,
    parameters: Sequence[Tensor] = (),
) -> dict[str, int]:
    """Check a function of a cut tensor; return the bytes that this rank receives by operators."""
    agrees(function, [x], parameters, grid, random.Random(1), [layout])
    y = dc.distribute_tensor(x, grid, layout).requires_grad_()
    dc.redistributions(reset=True)
    function(y, *parameters)
    return {entry.operator: entry.bytes for entry in dc.redistributions(reset=True) if entry.bytes}


@pytest.mark.parallel([2, 4])
def test_channels_are_cut_in_place_of_space_and_back_by_inverse_transforms() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = random_tensor(random.Random(0), (1, 8, 8, 6), torch.float64)
    share = x.nbytes // grid.size * (grid.size - 1) // grid.size
    assert moved(torch.fft.rfft2, x, grid) == {"rfft2": share}
    frequencies = torch.fft.rfft2(dc.distribute_tensor(x, grid))
    assert frequencies.layout == dc.Layout(channel="height")
    assert torch.fft.irfft2(frequencies).layout == dc.Layout(height="height")
    assert moved(torch.fft.ifft2, x, grid, dc.Layout()) == {"ifft2": 2 * share}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", ["rfftn", "fftn", "ifftn"])
def test_a_volume_of_one_channel_is_whole_on_no_rank(name: str) -> None:
    grid = dc.ProcessGrid(depth=2, height=-1)
    x = random_tensor(random.Random(0), (1, 1, 8, 8, 8), torch.float64)
    function = getattr(torch.fft, name)
    received = moved(lambda x: function(x, dim=(2, 3, 4)), x, grid)[name]
    # Complex numbers take twice the bytes, and move once for each dimension at most.
    assert received <= 3 * 2 * x.nbytes // grid.size


def spectral_layer(x: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    """Return the result of a layer of a Fourier neural operator (Li et al., ICLR 2021)."""
    frequencies = torch.fft.rfft2(x)
    made = torch.zeros(frequencies.shape, dtype=frequencies.dtype)
    made[..., :3, :3] = torch.einsum("bixy,ioxy->boxy", frequencies[..., :3, :3], weight)
    skipped = F.conv1d(x.flatten(2), kernel).unflatten(2, x.shape[2:])
    return torch.fft.irfft2(made, s=x.shape[2:]) + skipped


@pytest.mark.parallel([2, 4])
def test_a_spectral_layer_moves_elements_for_its_transforms_alone() -> None:
    rng = random.Random(0)
    grid = dc.ProcessGrid(height=2, width=-1)
    x = random_tensor(rng, (2, 8, 9, 12))
    weight = torch.view_as_complex(random_tensor(rng, (8, 8, 3, 3, 2)))
    kernel = random_tensor(rng, (8, 8, 1))
    assert set(moved(spectral_layer, x, grid, None, [weight, kernel])) == {"rfft2", "irfft2"}
