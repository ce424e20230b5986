"""Values added at positions and masks, and written to positions of the flattened tensor."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import distconv as dc
from tests.support.serial import (
    agrees,
    deviation,
    noted,
    raises_alike,
    random_grid,
    random_tensor,
)

ROWS, COLUMNS = torch.tensor([2, 0, -1, 2]), torch.tensor([[1, -2, 1, 1]])
PLACES = torch.tensor([[7, 0, -1, 7], [30, 7, -30, 3]])
APART = torch.tensor([3, -1, 0, 11])

CALLS: dict[str, Callable[..., Tensor]] = {
    "rows": lambda x, v, i, j: x.index_put((i,), v[:4], True),
    "one row": lambda x, v, i, j: x.index_put((i[0],), v[0], accumulate=True),
    "one value for all rows": lambda x, v, i, j: x.index_put((i,), v[0, 0, 0], accumulate=True),
    "columns": lambda x, v, i, j: torch.index_put(x, (i, j[0]), v[:4, 0], accumulate=True),
    "a plane of positions": lambda x, v, i, j: x.index_put((i[:, None], j), v[0, 0, :1], True),
    "elements": lambda x, v, i, j: x.index_put((i, j[0], i), v[0, 0, 0], accumulate=True),
    "a mask of rows": lambda x, v, i, j: x.index_put((x[:, 0, 0] > 0,), v[0], accumulate=True),
    "a mask of elements": lambda x, v, i, j: x.index_put((x > 0,), v[0, 0, 0], True),
    "a mask of two dimensions": lambda x, v, i, j: torch.index_put(
        x, (x[:, :, 0] > 0, i[0]), v[0, 0, 0], accumulate=True
    ),
    "in place": lambda x, v, i, j: x.clone().index_put_((i, j), v[:1, 0], accumulate=True),
    "in place of a view": lambda x, v, i, j: (
        (y := x * 1)[1:].index_put_((i[:2] * 0,), v[:2], accumulate=True),
        y,
    )[1],
    "put": lambda x, v, i, j: x.put(PLACES.flatten()[:3], v.flatten()[:3]),
    "put distributed": lambda x, v, i, j: torch.put(x, i * 5, v.flatten()[:4], accumulate=True),
    "put more than once": lambda x, v, i, j: x.put(PLACES, v.flatten()[:8].view(2, 4), True),
    "put in place": lambda x, v, i, j: x.clone().put_(APART, v[0, 0, 0].expand(4)),
    "put in place, added": lambda x, v, i, j: x.clone().put_(PLACES[0], v.flatten()[:4], True),
    "put into a scalar": lambda x, v, i, j: x[0, 0, 0].put(i[:2] * 0, v.flatten()[:2], True),
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_values_at_positions_equal_serial(name: str) -> None:
    rng = random.Random(name)
    x, v = random_tensor(rng, (3, 4, 5)), random_tensor(rng, (4, 4, 5))
    for axes in (("sample",), ("channel",), ("width",), ("sample", "channel", "width")):
        grid = random_grid(rng, axes)
        with noted(grid):
            agrees(CALLS[name], [x, v, ROWS, COLUMNS], [], grid, rng)
            agrees(CALLS[name], [x], [v, ROWS, COLUMNS], grid, rng)
            agrees(CALLS[name], [x, v], [ROWS, COLUMNS], grid, rng)


@pytest.mark.parallel([2, 4])
def test_values_are_added_to_a_plain_tensor() -> None:
    rng = random.Random(0)
    x, v = random_tensor(rng, (3, 4, 5)), random_tensor(rng, (4, 4, 5))

    def function(v: Tensor) -> Tensor:
        out = x * 2
        out.index_put_((ROWS,), v, accumulate=True)
        out.put_(PLACES[0], v.flatten()[:4], accumulate=True)
        return out

    grid = random_grid(rng)
    agrees(function, [v], [], grid, rng)
    agrees(lambda v: torch.index_put(x, (ROWS,), v, True), [v], [], grid, rng)
    agrees(lambda v: x.put(APART, v.flatten()[:4]), [v], [], grid, rng)
    with torch.no_grad():
        found = function(dc.distribute_tensor(v, grid))
    assert type(found) is Tensor
    assert deviation(found, function(v)) <= 1e-12


V = torch.ones(1, 1, 5, dtype=torch.float64).expand(1, 4, 5)
REFUSED: dict[str, Callable[..., Tensor]] = {
    "another type": lambda x: x.index_put((ROWS,), V.float(), True),
    "positions that are no integers": lambda x: x.index_put((ROWS * 0.5,), V, True),
    "more indices than dimensions": lambda x: x.index_put((ROWS,) * 4, V[0, 0, 0], True),
    "values that do not broadcast": lambda x: x.index_put((ROWS,), V.expand(2, 4, 5), True),
    "a mask of another shape": lambda x: x.index_put((ROWS > 0,), V, True),
    "values of another type": lambda x: x.put(APART, torch.ones(4)),
    "positions of another type": lambda x: x.put(APART.int(), V[0, 0, :4]),
    "fewer values": lambda x: x.put_(APART, V[0, 0, :3], True),
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_what_serial_torch_refuses_is_refused_on_every_rank(name: str) -> None:
    rng = random.Random(0)
    x = random_tensor(rng, (3, 4, 5))
    raises_alike(REFUSED[name], [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_wrong_positions_are_refused_by_name_on_every_rank() -> None:
    rng = random.Random(0)
    x = dc.distribute_tensor(random_tensor(rng, (3, 4, 5)), random_grid(rng))
    with pytest.raises(IndexError, match="0 indices; expected 1 to 3"):
        x.index_put((), V, True)
    with pytest.raises(RuntimeError, match="do not broadcast"):
        x.index_put((ROWS, ROWS[:3]), V[0], True)
    with pytest.raises(RuntimeError, match="not all positions lie in dimension 1, of 4 elements"):
        x.index_put((ROWS, COLUMNS + 3), x[0, 0, 0], accumulate=True)
    with pytest.raises(RuntimeError, match="not all positions lie in the flattened tensor, of 60"):
        x.put(torch.tensor([-61]), x[0, 0, 0])
