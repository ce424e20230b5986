"""Results of operators are remembered for operands that are alike, and for no others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distconv.planning.losses import mean_square, sgd
from distconv.planning.recorded_step import record_step


def test_a_dry_operator_with_a_whole_number_is_another_than_with_a_fraction() -> None:
    types = []

    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            numbers = torch.zeros_like(x, dtype=torch.int64)
            types.extend([(numbers * 2).dtype, (numbers * 2.0).dtype])
            return x * 2

    record_step(
        Scales(),
        [(1, 1, 8, 8)],
        {"height": 2},
        loss=mean_square,
        optimizer=sgd,
        input_gradients=True,
    )
    assert types == [torch.int64, torch.float32]
