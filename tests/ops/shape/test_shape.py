"""Arguments of changes of shape that are refused, and shapes that change in place."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import (
    agrees,
    raises_alike,
    random_grid,
    random_layout,
    random_tensor,
    refused,
)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(7, -1),
        lambda x: x.view(-1, -1),
        lambda x: x.flatten(2, 1),
        lambda x: x.unflatten(1, (2, 2)),
        lambda x: x.unsqueeze(6),
        lambda x: x.squeeze(4),
        lambda x: x.permute(0, 1, 2),
        lambda x: x.permute(0, 0, 1, 2),
        lambda x: x.transpose(0, 5),
        lambda x: x.expand(2, 3, 4, 6),
        lambda x: x.expand(3, 4),
        lambda x: x[4],
        lambda x: x[0, 0, 0, 0, 0],
        lambda x: x[::-1],
        lambda x: x[:, 3],
        lambda x: x[::0],
        lambda x: x.narrow(1, 2, 2),
        lambda x: x.narrow(1, 0, -1),
        lambda x: x.select(0, 2),
        lambda x: x.split(0),
        lambda x: x.split([1, 2]),
        lambda x: x.chunk(0),
        lambda x: x.unbind(4),
        lambda x: torch.cat([x, torch.ones(2, 3, 4, 6).double()]),
        lambda x: torch.cat([x, x[0]]),
        lambda x: torch.cat([x, x], 4),
        lambda x: torch.stack([x, torch.ones(2, 3, 4, 6)]),
        lambda x: torch.stack([x, x], 5),
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: F.pixel_unshuffle(x, 2),
        lambda x: F.pixel_shuffle(x, 0),
        lambda x: F.pad(x, (1,)),
        lambda x: F.pad(x, (5, 0, 0, 0), "reflect"),
        lambda x: F.pad(x, (-6, 0)),
        lambda x: F.pad(x, (1, 1), "mirror"),
        lambda x: F.pad(x, (0, 0, 1, 1), "reflect", 1.0),
        lambda x: F.pad(x, (6, 0, 0, 0), "circular"),
    ],
)
def test_bad_arguments_are_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(8)
    x = random_tensor(rng, (2, 3, 4, 5))
    grid = random_grid(rng)
    for layout in (dc.Layout(), random_layout(rng, grid, x.shape)):
        raises_alike(function, [x], [], grid, rng, [layout])


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[True],
        lambda x: x.view(torch.int64),
        lambda x: torch.cat([x, x], out=torch.empty(1)),
        lambda x: x.as_strided((2, 2), (1, 1)),
    ],
)
def test_what_has_no_rule_is_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(9)
    refused(
        function,
        [random_tensor(rng, (4, 6))],
        [],
        random_grid(rng),
        rng,
        None,
        dc.UnsupportedOperation,
    )


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
