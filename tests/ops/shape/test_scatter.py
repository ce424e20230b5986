"""Values written to positions along a dimension, and one-hot classes, equal the serial ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, examples, noted, random_grid, random_tensor

INTO: dict[str, Callable[..., Tensor]] = {
    "values": lambda x, i, v, d: x.scatter(d, i, v),
    "a number": lambda x, i, v, d: torch.scatter(x, d, i, 2.5),
    "a number by its name": lambda x, i, v, d: x.scatter(dim=d, index=i, value=2.5),
    "values in place": lambda x, i, v, d: x.clone().scatter_(d, i, v),
    "sums": lambda x, i, v, d: x.scatter_add(d, i, v),
    "sums in place": lambda x, i, v, d: x.clone().scatter_add_(d, i, v),
    "means": lambda x, i, v, d: x.scatter_reduce(d, i, v, "mean"),
    "maxima of the values alone": lambda x, i, v, d: torch.scatter_reduce(
        x, d, i, v, "amax", include_self=False
    ),
}


def positions(rng: random.Random, shape: list[int], size: int, dim: int) -> Tensor:
    """Draw distinct positions along the dimension, as torch writes equal ones in any order."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    full = [size if d == dim else n for d, n in enumerate(shape)]
    return torch.rand(full, generator=generator).argsort(dim).narrow(dim, 0, shape[dim])


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", INTO)
def test_scattering_equals_serial(name: str) -> None:
    rng = random.Random(name)
    for _ in range(6):
        shape = [rng.randrange(1, 7) for _ in range(rng.choice([1, 2, 3]))]
        dim = rng.randrange(len(shape))
        taken = [rng.choice([n, n, rng.randrange(1, n + 1)]) for n in shape]
        index = positions(rng, taken, shape[dim], dim)
        tensors = [random_tensor(rng, shape), random_tensor(rng, taken)]

        def function(x: Tensor, v: Tensor, i: Tensor, d: int = dim) -> Tensor:
            return INTO[name](x, i, v, d)

        with noted(shape, taken, dim):
            agrees(function, [*tensors, index], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_plain_indices_and_values_are_taken() -> None:
    rng = random.Random(1)
    x, values = random_tensor(rng, (3, 4, 5)), random_tensor(rng, (3, 2, 5))
    index = positions(rng, [3, 2, 5], 4, 1)
    agrees(lambda x, v, i: x.scatter_add(1, i, v), [x], [values, index], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_one_hot_classes_equal_serial() -> None:
    rng = random.Random(2)
    for shape in ([5], [2, 3, 5], [2, 1, 3, 4]):
        labels = (4 * random_tensor(rng, shape).abs()).long().clamp(max=5)
        for count in (-1, 6, 9):
            agrees(lambda t, n=count: F.one_hot(t, n), [labels], [], random_grid(rng), rng)


def dice(scores: Any, labels: Any, onehot: Any) -> Any:
    """Return the usual Dice loss, of one-hot classes along the dimension of channels."""
    probabilities = scores.softmax(1)
    over = tuple(range(2, scores.dim()))
    both = (probabilities * onehot).sum(over)
    return (1 - 2 * both / (probabilities + onehot).sum(over)).mean()


def histogram(x: Any, labels: Any, *, within: bool) -> Any:
    """Return sums of x by label for each sample, added to zeros of x's kind or to plain ones."""
    n = labels.shape[0]
    into = x.new_zeros(n, 3) if within else torch.zeros(n, 3, dtype=x.dtype)
    return into.scatter_add(1, labels.flatten(1), x.flatten(1)).cos()


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("within", [True, False])
def test_sums_by_label_equal_serial(within: bool) -> None:
    rng = random.Random(within)
    for _ in examples(8):
        shape = [rng.randrange(1, 4), *(rng.randrange(1, 9) for _ in range(rng.choice([1, 2, 3])))]
        labels = (3 * random_tensor(rng, shape).sigmoid()).long()
        function = partial(histogram, within=within)
        agrees(function, [random_tensor(rng, shape), labels], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
def test_a_confusion_matrix_moves_nothing_but_sums() -> None:
    rng = random.Random(3)
    labels = (3 * random_tensor(rng, (2, 19, 13)).sigmoid()).long()
    cut = dc.distribute_tensor(labels, dc.ProcessGrid(width=-1), dc.Layout(width="width"))

    def counts(x: Any) -> Any:
        found = torch.zeros(2, 3, dtype=torch.int64)
        return found.scatter_add_(1, x.reshape(2, -1), torch.ones_like(x.reshape(2, -1)))

    dc.redistributions(reset=True)
    actual = counts(cut)
    assert torch.equal(actual, counts(labels))
    assert not sum(entry.bytes for entry in dc.redistributions(reset=True))


@pytest.mark.parallel([2, 4])
def test_values_splatted_into_plain_zeros_are_sent_to_their_rows() -> None:
    grid = dc.ProcessGrid(height=2, width=-1)
    n = 1024

    def splat(x: Tensor) -> Tensor:
        to = (torch.arange(n * n) + n).clamp(max=n * n - 1).view(1, 1, n, n) + (x > 9).long()
        return torch.zeros(1, 1, n * n).scatter_add(2, to.flatten(2), x.flatten(2))

    plain = torch.rand(1, 1, n, n)
    x = dc.distribute_tensor(plain, grid)
    with dc.count_traffic() as traffic:
        y = splat(x)
    assert torch.equal(y.full_tensor(), splat(plain))
    assert y.to_local().numel() == n * n // grid.size
    # On 2 x 2 ranks half of each block moves, of indices of 8 bytes and values of 4.
    moved = 0 if grid.size == 2 else 12 * n * n / 8
    assert moved <= traffic.forward < moved + 64 * n
