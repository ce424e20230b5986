"""Elements picked by tensors of positions equal the serial ones, whatever is cut."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, examples, noted, random_grid, random_tensor

RANKS = [1, 2, 4]


def random_shape(rng: random.Random) -> list[int]:
    return [rng.randrange(1, 8) for _ in range(rng.choice([1, 2, 3, 4]))]


def positions(rng: random.Random, shape: list[int], size: int, first: int = 0) -> Tensor:
    numbers = [rng.randrange(first, size) for _ in range(torch.Size(shape).numel())]
    return torch.tensor(numbers, dtype=torch.int64).reshape(shape)


def picks(function: Callable, x: Tensor, index: Tensor, rng: random.Random) -> None:
    """Compare with serial, with the index as a plain and as a distributed tensor."""
    with noted(tuple(x.shape), tuple(index.shape)):
        agrees(function, [x], [index], random_grid(rng), rng)
        agrees(function, [x, index], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_index_select() -> None:
    rng = random.Random(1)
    for _ in examples(12):
        shape = random_shape(rng)
        dim = rng.randrange(-len(shape), len(shape))
        index = positions(rng, [rng.randrange(9)], shape[dim])
        picks(lambda x, i, d=dim: x.index_select(d, i), random_tensor(rng, shape), index, rng)


def of_classes(table: Tensor, labels: Tensor) -> Tensor:
    """Return for each position the row of its class, (sample, entry, position)."""
    n = labels.shape[0]
    positions = labels.flatten(1)[:, None, None].expand(-1, -1, table.shape[1], -1)
    rows = table[None, :, :, None].expand(n, -1, -1, positions.shape[-1])
    return rows.gather(1, positions).squeeze(1)


@pytest.mark.parallel(RANKS)
def test_rows_for_the_class_of_each_position() -> None:
    rng = random.Random(12)
    for _ in examples(8):
        shape = [rng.randrange(1, 8) for _ in range(rng.choice([2, 3, 4]))]
        table, labels = random_tensor(rng, (4, 3)), positions(rng, shape, 4)
        agrees(lambda i, t: of_classes(t, i).sin(), [labels], [table], random_grid(rng), rng)
        agrees(of_classes, [table, labels], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
def test_positions_do_not_move_where_the_input_is_whole() -> None:
    rng = random.Random(13)
    labels = positions(rng, [2, 9, 7, 5], 4)
    grid = dc.ProcessGrid(height=2, depth=-1)
    cut = dc.distribute_tensor(labels, grid, dc.Layout(channel="depth", height="height"))
    dc.redistributions(reset=True)
    found = of_classes(torch.eye(4, 3), cut)
    assert not sum(entry.bytes for entry in dc.redistributions(reset=True))
    assert torch.equal(found.full_tensor(), of_classes(torch.eye(4, 3), labels))


@pytest.mark.parallel(RANKS)
def test_gather_with_a_shorter_or_longer_index() -> None:
    rng = random.Random(2)
    for _ in examples(12):
        shape = random_shape(rng)
        dim = rng.randrange(len(shape))
        longest = [rng.choice([n, n, rng.randrange(1, n + 1)]) for n in shape]
        longest[dim] = rng.randrange(1, 9)
        index = positions(rng, longest, shape[dim])
        picks(lambda x, i, d=dim: torch.gather(x, d, i), random_tensor(rng, shape), index, rng)


@pytest.mark.parallel(RANKS)
def test_take_along_a_dimension() -> None:
    rng = random.Random(3)
    for _ in examples(10):
        shape = random_shape(rng)
        dim = rng.choice([None, *range(len(shape))])
        size = torch.Size(shape).numel() if dim is None else shape[dim]
        first = 0 if dim is None else -size
        index = positions(rng, [rng.choice([1, n]) for n in shape], size, first)
        picks(
            lambda x, i, d=dim: torch.take_along_dim(x, i, d), random_tensor(rng, shape), index, rng
        )


INDEXED: dict[str, Callable] = {
    "first": lambda x, i: x[i],
    "second": lambda x, i: x[:, i],
    "last": lambda x, i: x[..., i],
    "before an ellipsis": lambda x, i: x[:, i, ..., 1:],
    "beside an integer": lambda x, i: x[:, 1, i],
    "beside a number in a tensor": lambda x, i: x[torch.tensor(1), i],
    "beside a new dimension": lambda x, i: x[None, 1:, None, i, :, -1],
    "of two dimensions": lambda x, i: x[:, i.reshape(2, 2)],
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", INDEXED)
def test_indexing_by_a_tensor(name: str) -> None:
    rng = random.Random(name)
    for _ in range(3):
        index = positions(rng, [4], 4, -4)
        picks(INDEXED[name], random_tensor(rng, (4, 5, 4, 6)), index, rng)


@pytest.mark.parallel(RANKS)
def test_embedding() -> None:
    rng = random.Random(7)
    for padding in (None, 2, -1):
        for shape in ([5], [3, 4], [2, 3, 4], [0, 3]):
            rows = random_tensor(rng, [6, 3])
            index = positions(rng, shape, 6)

            def function(index: Tensor, rows: Tensor, padding: int | None = padding) -> Tensor:
                return F.embedding(index, rows, padding)

            with noted(shape, padding):
                agrees(function, [index], [rows], random_grid(rng), rng)
                agrees(function, [index, rows], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_lists_and_arrays_of_integers_index_as_in_torch() -> None:
    rng = random.Random(8)
    x = random_tensor(rng, (3, 4, 6))
    for index in (
        (slice(None), [2, 0, -1]),
        ([1],),
        (..., np.array([0, 5])),
        (0, [[0, 3], [1, 1]]),
    ):
        agrees(lambda x, i=index: x[i], [x], [], random_grid(rng), rng)
    agrees(lambda x: x[[2, 0]], [x], [], random_grid(rng), rng)
    agrees(lambda x: x[:, []], [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 3])
def test_masks_and_several_tensors_index_what_is_made_whole() -> None:
    rng = random.Random(9)
    x = random_tensor(rng, (3, 4, 6))
    agrees(lambda x: x[x > 0.3], [x], [], random_grid(rng), rng)
    agrees(lambda x: x[:, x[0, :, 0] > 0, 2:], [x], [], random_grid(rng), rng)
    agrees(lambda x, m: x[m], [x], [x[:, :, 0] > 0], random_grid(rng), rng)
    agrees(lambda m, x: x[m], [x > 0], [x], random_grid(rng), rng)
    agrees(lambda x: x[[True, False, True]], [x], [], random_grid(rng), rng)
    agrees(lambda x: torch.where(x > 0.3), [x], [], random_grid(rng), rng)
    first, second = positions(rng, [2, 5], 3), positions(rng, [5], 6, -6)
    agrees(lambda x, i, j: x[i, 1:, j], [x, first], [second], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_list_of_anything_but_numbers_is_a_tuple_of_indices_as_in_torch() -> None:
    rng = random.Random(10)
    x = random_tensor(rng, (3, 4, 6))
    for index in (
        [slice(None), slice(1, 3), slice(None, None, 2)],
        [[0, 2], [3, 1]],
        [None, 1],
        [..., 2],
        [slice(None), [2, 0]],
    ):
        agrees(lambda x, index=index: x[index], [x], [], random_grid(rng), rng)

        def assigned(x, index=index):
            y = x * 2
            y[index] = 3.0
            return y * x

        agrees(assigned, [x], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_assignment_where_positions_pick_elements() -> None:
    rng = random.Random(8)
    x, values = random_tensor(rng, (5, 4, 3)), random_tensor(rng, (5, 4, 3))
    places = torch.tensor([3, 0, -1])

    def written(x, values):
        y = x * 1.5
        y[:, places] = values[:, :3]
        y[[4, 1], 2:, [0, 2]] = 7.0
        return y * x

    for _ in range(3):
        agrees(written, [x, values], [], random_grid(rng), rng)
        agrees(written, [x], [values], random_grid(rng), rng)
