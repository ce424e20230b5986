"""Moves between layouts lose nothing, and random numbers do not depend on the grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from tests.support.strategies import FLOATING, INTEGER, Case, on_any_grid, shapes

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "uniform_": lambda x: x.clone().uniform_(-2, 3),
    "normal_": lambda x: x.clone().normal_(5, 2),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.7),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5) if x.dim() == 3 else x * 1,
    "dropout2d": lambda x: F.dropout2d(x, 0.5) if x.dim() == 4 else x * 1,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: (
        F.feature_alpha_dropout(x, 0.4, training=True) if x.dim() >= 3 else x * 1
    ),
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x[None, None].clone()),
}


@on_any_grid(18)
def test_a_tensor_survives_every_move_between_layouts(case: Case) -> None:
    dtype = case.one_of(*FLOATING, *INTEGER, torch.bool)
    x = case.tensor(case.draw(shapes(0, 5)), "normal", "wild", dtype=dtype)
    d = dc.distribute_tensor(x, case.grid, case.layout(x.shape))
    for _ in range(case.draw(st.integers(0, 3))):
        if case.flag():
            layout = case.layout(x.shape)
            d = d.redistribute(layout)
            assert d.grid_layout == layout
        else:
            d = dc.DistTensor.from_local(d.to_local(), case.grid, d.grid_layout)
        assert d.shape == x.shape and d.dtype == x.dtype
        assert d.box == dc.local_box(x.shape, case.grid, d.grid_layout)
        assert torch.equal(d.to_local().nan_to_num(7), x[d.box.slices].nan_to_num(7))
    assert torch.equal(d.full_tensor().nan_to_num(7), x.nan_to_num(7))


@on_any_grid(9)
def test_gradients_take_the_same_way_back(case: Case) -> None:
    x = case.tensor(case.draw(shapes(0, 5)))
    layouts = [case.layout(x.shape) for _ in range(case.draw(st.integers(1, 3)))]

    def move(x: Tensor) -> Tensor:
        for layout in layouts:
            x = x * 2
            if isinstance(x, dc.DistTensor):
                x = x.redistribute(layout)
        return x

    case.agrees(move, x)


@on_any_grid(14)
def test_random_numbers_are_those_of_a_single_rank(case: Case) -> None:
    x = case.tensor(case.draw(shapes(1, 4)))
    function, seed = DRAWS[case.one_of(*DRAWS)], case.draw(st.integers(0, 99))
    torch.manual_seed(seed)
    expected = function(dc.distribute_tensor(x, dc.ProcessGrid(MPI.COMM_SELF))).full_tensor()
    # Rank 0 decides, whatever the others have drawn before.
    torch.manual_seed(seed + 100 * (MPI.COMM_WORLD.rank > 0))
    actual = function(dc.distribute_tensor(x, case.grid, case.layout(x.shape))).full_tensor()
    assert torch.equal(actual, expected)
