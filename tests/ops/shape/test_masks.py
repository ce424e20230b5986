"""Elements picked by masks equal the serial ones, and nothing else moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import distconv as dc
from tests.support.serial import (
    agrees,
    examples,
    noted,
    raised_everywhere,
    random_grid,
    random_layout,
    random_tensor,
)

RANKS = [1, 2, 4]


def written(x: Tensor, index: Any, value: Any) -> Tensor:
    y = x * 2
    y[index] = value
    return y * x


def scaled(x: Tensor, index: Any) -> Tensor:
    y = x.sin()
    y[index] *= 3
    return y * x


READ: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all dimensions": lambda x, m: x[m],
    "a vector": lambda x, m: x.flatten()[m.flatten()] * 2,
    "masked_select": lambda x, m: x.masked_select(m),
    "a broadcast mask": lambda x, m: torch.masked_select(x, m[:1]),
    "a broadcast input": lambda x, m: torch.masked_select(x[..., :1], m),
    "leading dimensions": lambda x, m: x[m[..., 0]],
    "the first dimension": lambda x, m: x[m.flatten(1)[:, 0]].cos(),
    "the last dimension": lambda x, m: x[..., m.view(-1, m.shape[-1])[0]],
    "behind a slice": lambda x, m: x[1:, m[0]],
    "between others": lambda x, m: x[None, ..., -1, m.flatten(0, -2)[0]],
    "a loss without some labels": lambda x, m: (x[m].square() - x.detach()[m]).mean(),
    "nothing": lambda x, m: x[m & ~m],
    "everything": lambda x, m: x[m | ~m],
    "positions": lambda x, m: x.sum() * m.nonzero(),
    "positions by dimension": lambda x, m: torch.where(m)[-1] * x.mean(),
    "an order of all dimensions": lambda x, m: x.transpose(0, -1)[m.transpose(0, -1)],
}

WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a number": lambda x, m: written(x, m, 2.5),
    "numbers behind a slice": lambda x, m: written(x, (slice(None), m[0]), -1),
    "a value": lambda x, m: written(x, m, x.mean()),
    "a value for each": lambda x, m: written(x, m, x.cos()[m]),
    "rows": lambda x, m: written(x, m[..., 0], x.cos()[m[..., 0]]),
    "one row": lambda x, m: written(x, m[..., 0], x.cos().flatten(0, -2)[:1]),
    "columns": lambda x, m: written(x, (slice(None), m[0]), x.exp()[:, m[0]]),
    "infinities": lambda x, m: written(x, x < -0.5, -torch.inf).clamp(min=-1) * x,
    "truth values of rows": lambda x, m: written(x, m[..., 0], True),
    "integers of rows": lambda x, m: (written((4 * x).long(), m[..., 0], 2.7), x)[0],
    "before autograd": lambda x, m: written(x.detach().clone(), m, x.detach()[m]) * x,
    "scaled": lambda x, m: scaled(x, m),
    "scaled rows": lambda x, m: scaled(x, m.flatten(1)[:, 0]),
    "a slice of another tensor": lambda x, m: written(x, (..., slice(1, None)), x.cos()[..., 1:]),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", [*READ, *WRITTEN])
def test_masks_equal_serial(name: str) -> None:
    rng = random.Random(name)
    function = {**READ, **WRITTEN}[name]
    for _ in range(2):
        shape = [rng.randrange(1, 8) for _ in range(rng.choice([2, 3, 4]))]
        x = random_tensor(rng, shape)
        mask = random_tensor(rng, shape) > rng.choice([-1, 0, 1, 2])
        grid = random_grid(rng)
        with noted(shape):
            agrees(function, [x, mask], [], grid, rng)
            agrees(function, [x], [mask], grid, rng)
            layout = random_layout(rng, grid, shape)
            agrees(function, [x, mask], [], grid, rng, [layout, layout])


@pytest.mark.parallel(RANKS)
def test_a_plain_tensor_is_picked_from_by_a_distributed_mask() -> None:
    rng = random.Random(1)
    for _ in examples(6):
        shape = [rng.randrange(1, 8) for _ in range(3)]
        x, mask = random_tensor(rng, shape), random_tensor(rng, shape) > 0
        agrees(lambda m, x: x.masked_select(m) * 2, [mask], [x], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("shape", [(2, 3, 19, 13), (1, 1, 9, 8), (3, 2, 33, 6)])
def test_what_is_not_picked_does_not_move(shape: tuple[int, ...]) -> None:
    rng = random.Random(2)
    size = torch.Size(shape).numel()
    grid = dc.ProcessGrid(height=-1)
    whole, chosen = random_tensor(rng, shape), random_tensor(rng, shape) > 1
    x, mask = dc.distribute_tensor(whole, grid), dc.distribute_tensor(chosen, grid)
    dc.redistributions(reset=True)
    picked = x[mask]
    received = sum(entry.bytes for entry in dc.redistributions(reset=True))
    # The numbers in each row of planes, and the elements.
    planes = 8 * shape[0] * shape[1] * (grid.size - 1)
    assert received <= 8 * len(picked) + planes < 8 * size
    # One number for each element, however many dimensions it has.
    mask.nonzero()
    received = sum(entry.bytes for entry in dc.redistributions(reset=True))
    assert received <= 8 * len(picked) + planes
    x[mask] = 1.0
    x[mask] = picked.mean()
    x[:, :1] = x[:, :1] * 2
    assert not sum(entry.bytes for entry in dc.redistributions(reset=True))
    x[mask] = picked
    assert sum(entry.bytes for entry in dc.redistributions(reset=True)) <= planes


@pytest.mark.parallel([1, 2])
def test_numbers_of_elements_that_do_not_fit_raise_on_all_ranks() -> None:
    rng = random.Random(4)
    grid, whole = random_grid(rng), random_tensor(rng, (4, 3))
    x = dc.distribute_tensor(whole, grid, random_layout(rng, grid, whole.shape))
    for function in (
        lambda x: written(x, x == x, x.flatten()[1:]),
        lambda x: written(x, x[:, 0] == x[:, 0], x[:, :2]),
    ):
        assert "cannot be broadcast" in raised_everywhere(RuntimeError, function, x)
