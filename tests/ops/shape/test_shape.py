"""Shapes that change in place, and cuts that stay."""

from __future__ import annotations

import random

import pytest
import torch

import distconv as dc
from tests.support.serial import agrees, random_grid, random_tensor, refused


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_shape_changes_in_place_while_views_keep_theirs() -> None:
    rng = random.Random(31)
    for _ in range(5):
        x = random_tensor(rng, (3, 1, 5))

        def function(x):
            y = x * 2
            before = y.flip(2)
            y.unsqueeze_(0).transpose_(1, 3)
            y.squeeze_(2)
            assert y.size() == y.shape == (1, 5, 3) and y.dim() == 3
            return y.mul_(3), before * x

        agrees(function, [x], [], random_grid(rng), rng)
        with torch.no_grad():
            agrees(lambda x: x.clone().t_(), [x[:, 0]], [], random_grid(rng), rng)
    for function in (
        lambda x: x.requires_grad_().unsqueeze_(0),
        lambda x: torch.no_grad()(torch.Tensor.unsqueeze_)(x.requires_grad_() * 2, 0),
    ):
        refused(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 3])
def test_what_is_cut_stays_so_beside_what_is_whole() -> None:
    grid = dc.ProcessGrid(height=-1)
    whole = dc.distribute_tensor(torch.rand(2, 5, 7, 4), grid, dc.Layout())
    cut = dc.distribute_tensor(torch.rand(2, 3, 7, 4), grid)
    dc.redistributions(reset=True)
    joined = torch.cat([whole, cut], 1)
    assert joined.cuts == cut.cuts
    assert not sum(entry.bytes for entry in dc.redistributions(reset=True))


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("samples", [1, 3])
def test_slices_of_permuted_samples_are_added_to_in_place(samples: int) -> None:
    """With one sample on a rank, torch gives the view that `+=` assigns other strides."""
    rng = random.Random(5)
    x = random_tensor(rng, (samples, 3, 4, 2))

    def rows(x):
        y = x.permute(0, 2, 3, 1) * 1
        y[..., 0] += 2
        y[:, 1] *= x[0, 0, 0, 0]
        return y

    def planes(x):
        y = x.transpose(1, 2) * 1
        y[:, :, 0] += 2
        return y

    def heads(x):
        y = x.permute(1, 0, 2, 3) * 1
        y[0] += 2
        return y

    def flat(x):
        y = x.permute(3, 2, 0, 1).flatten(0, 2) * 1
        y[:, 0] += 2
        return y

    for function in (rows, planes, heads, flat):
        for axis in ("sample", "height"):
            agrees(function, [x], [], dc.ProcessGrid(**{axis: -1}), rng)
