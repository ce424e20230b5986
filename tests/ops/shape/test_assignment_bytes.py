"""Slice assignment sends each rank the elements that it writes, and no others."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.support.arriving import arriving


@pytest.mark.parallel([2, 4])
def test_rows_that_all_ranks_hold_are_written_without_messages() -> None:
    grid = dc.ProcessGrid(height=2, width=-1)
    out = dc.distribute_tensor(torch.zeros(2, 3, 12, 8), grid)
    row = dc.distribute_tensor(torch.ones(2, 3, 8), grid, dc.Layout.of(((), (), ("width",))))
    row = (
        row
        if grid.shape["width"] > 1
        else dc.distribute_tensor(torch.ones(2, 3, 8), grid, dc.Layout())
    )
    with arriving(grid) as sizes:
        for i in range(12):
            out[:, :, i] = row * i
    assert not sizes
    assert out.full_tensor()[0, 0, :, 0].tolist() == list(range(12))


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("step", [1, 2])
def test_a_shifted_slice_sends_what_crosses_to_a_neighbour(step: int) -> None:
    grid = dc.ProcessGrid(height=-1)
    rows = 12 * grid.size
    value = torch.arange(1.0, rows // step).repeat(1, 2, 1).unsqueeze(-1)
    out = dc.distribute_tensor(torch.zeros(1, 2, rows, 1), grid)
    y = dc.distribute_tensor(value, grid)
    with arriving(grid) as sizes:
        out[:, :, step::step] = y
    assert sum(sizes) <= 2 * 2 * value.element_size()
    assert torch.equal(out.full_tensor()[:, :, step::step], value)
