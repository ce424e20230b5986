"""Zeros, infinities, empty sequences and broadcast operands give what serial gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from serial import agrees, random_grid, random_tensor

import distconv as dc

INF = float("inf")

ONE: dict[str, tuple[Callable, list]] = {
    "logsumexp of a masked block": (lambda x: x.logsumexp(0), [[2.0], [-INF], [3.0], [4.0]]),
    "std of equal elements": (lambda x: x.std(1), [[1.0, 1.0], [2.0, 2.0], [1.0, 3.0]]),
    "amax beside a nan": (lambda x: x.amax(1), [[1.0, 7.0, 2.0], [4.0, 4.0, 1.0]]),
    "prod with an infinity": (lambda x: x.prod(1), [[2.0, 3.0, INF], [1.0, 2.0, 3.0]]),
    "squeeze of no dimension": (lambda x: x.squeeze(()), [[1.0], [2.0], [3.0]]),
    "any over no dimension": (lambda x: torch.any(x, ()), [[1.0, 0.0], [0.0, 0.0]]),
    "normalize by the default norm": (lambda x: F.normalize(x, "fro"), [[3.0, 4.0], [0.0, 1.0]]),
}


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", ONE)
def test_degenerate_values(name: str) -> None:
    function, values = ONE[name]
    rng = random.Random(name)
    for _ in range(4):
        x = torch.tensor(values, dtype=torch.float64)
        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("shapes", [((5, 3, 7), (3, 7)), ((5, 3, 7), (5, 1, 7))])
@pytest.mark.parametrize("eps", [1e-8, 10.0])
def test_cosine_similarity_of_broadcast_operands(shapes: tuple, eps: float) -> None:
    rng = random.Random(1)
    tensors = [random_tensor(rng, s) for s in shapes]
    agrees(lambda x, y: F.cosine_similarity(x, y, 1, eps), tensors, [], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
def test_an_infinity_does_not_spread_in_interpolation() -> None:
    grid = dc.ProcessGrid(width=-1)
    x = torch.tensor([[[1.0, INF, 2.0, 3.0]]], dtype=torch.float64)
    for size in (4, 8):
        expected = F.interpolate(x, size=size, mode="linear")
        actual = F.interpolate(dc.distribute_tensor(x, grid), size=size, mode="linear")
        torch.testing.assert_close(
            actual.full_tensor().nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9)
        )


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", ["repeat", "tile"])
def test_repetition_in_new_dimensions_is_a_new_tensor(name: str) -> None:
    x = dc.distribute_tensor(torch.zeros(4, 3), dc.ProcessGrid(sample=-1))
    getattr(x, name)(1, 1, 1).add_(1)
    assert torch.equal(x.full_tensor(), torch.zeros(4, 3))


def _query(rows: int = 3, features: int = 4) -> torch.Tensor:
    return torch.ones(1, 2, rows, features, dtype=torch.float64)


WRONG: dict[str, Callable] = {
    "key features": lambda q: F.scaled_dot_product_attention(q, _query(5, 6), _query(5, 6)),
    "value rows": lambda q: F.scaled_dot_product_attention(q, _query(5), _query(6)),
    "key type": lambda q: F.scaled_dot_product_attention(q, _query().float(), _query().float()),
    "mask columns": lambda q: F.scaled_dot_product_attention(
        q, _query(5), _query(5), torch.ones(3, 6, dtype=torch.bool)
    ),
    "layer norm type": lambda q: F.layer_norm(q, (4,), torch.ones(4)),
    "group norm type": lambda q: F.group_norm(q, 1, torch.ones(2)),
    "softmax of integers": lambda q: F.softmax(q.long(), 3),
    "product of types": lambda q: q @ torch.ones(4, 4),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_an_error_on_ranks_without_elements_too(name: str) -> None:
    q = dc.distribute_tensor(_query(), dc.ProcessGrid(height=-1))
    raised = False
    try:
        WRONG[name](q)
    except RuntimeError:
        raised = True
    assert MPI.COMM_WORLD.allgather(raised) == [True] * MPI.COMM_WORLD.size
