"""Attention written as products and softmax equals serial attention, and moves blocks once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, random_tensor
from tests.support.strategies import Case, on_any_grid, sizes

HEADS = 4


def _guided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend as diffusion networks do, heads folded into the samples, positions last."""
    shape = q.shape
    q, k, v = (x.flatten(2).reshape(-1, x.shape[1] // HEADS, x[0, 0].numel()) for x in (q, k, v))
    weights = torch.einsum("bct,bcs->bts", q, k).softmax(-1)
    return torch.einsum("bts,bcs->bct", weights, v).reshape(shape)


def _batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by products of batches of matrices, heads folded into the samples."""
    shape = q.shape

    def rows(x: Tensor) -> Tensor:
        return x.flatten(2).unflatten(1, (HEADS, -1)).transpose(2, 3).flatten(0, 1)

    q, k, v = map(rows, (q, k, v))
    weights = torch.baddbmm(q.new_zeros(()), q, k.mT, alpha=0.5).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (-1, HEADS)).transpose(2, 3).reshape(shape)


def _by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with heads in a dimension of their own."""
    shape = q.shape
    q, k, v = (x.flatten(2).unflatten(1, (HEADS, -1)) for x in (q, k, v))
    weights = (q.mT @ k).softmax(-1)
    return (v @ weights.mT).reshape(shape)


def _einsum_by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with heads in a dimension of their own, by einsum, features last."""
    shape = q.shape
    q, k, v = (x.flatten(2).unflatten(1, (HEADS, -1)).mT for x in (q, k, v))
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v).mT.reshape(shape)


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend linearly: a softmax of the keys over all positions, and no product of positions."""
    shape = q.shape
    q, k, v = (x.flatten(2).unflatten(1, (HEADS, -1)) for x in (q, k, v))
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
    return torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2)).reshape(shape)


def _gram(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return products that are no attention, of rows with rows."""
    return (q @ k.mT) @ v


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "guided": _guided,
    "batched": _batched,
    "by heads": _by_heads,
    "einsum by heads": _einsum_by_heads,
    "linear": _linear,
    "gram": _gram,
}


@pytest.mark.parametrize("name", FORMS)
@on_any_grid(25, more=[3, 6])
def test_attention_by_products_equals_serial(case: Case, name: str) -> None:
    samples, rows, columns = case.one_of(1, 2, 4), case.draw(sizes(1, 7)), case.draw(sizes(1, 6))
    shape = samples, HEADS * case.one_of(1, 3), rows, columns
    case.agrees(FORMS[name], *(case.tensor(shape) for _ in range(3)), cut=[0, 1, 2])


@pytest.mark.parallel([3, 4])
@pytest.mark.parametrize("extents", [{"height": -1}, {"height": 2, "width": -1}])
@pytest.mark.parametrize("name", ["guided", "batched", "by heads", "einsum by heads"])
def test_blocks_move_to_the_heads_and_back(name: str, extents: dict[str, int]) -> None:
    if "width" in extents and MPI.COMM_WORLD.size % 2:
        extents = {"width": -1}
    grid = dc.ProcessGrid(**extents)
    n = grid.size
    x = random_tensor(random.Random(0), (n, 8, 12, 12))
    agrees(FORMS[name], [x, 2 * x, x + 1], [], grid, random.Random(1), [None] * 3)
    q, k, v = (dc.distribute_tensor(x, grid).requires_grad_() for _ in range(3))
    FORMS[name](q, k, v)
    with dc.count_traffic() as traffic:
        out = FORMS[name](q, k, v)
        out.sum().backward()
    # Queries, keys, values and results, of which a rank keeps a share.
    share = 4 * x.nbytes * (n - 1) / n**2
    assert traffic.forward == pytest.approx(share, rel=0.02)
    assert traffic.backward == pytest.approx(share, rel=0.02)
    assert out.grid_layout == q.grid_layout


@pytest.mark.parallel([4])
def test_linear_attention_moves_no_positions() -> None:
    grid = dc.ProcessGrid(height=2, width=2)
    q, k, v = (dc.distribute_tensor(torch.ones(1, 8, 32, 32), grid) for _ in range(3))
    with dc.count_traffic() as traffic:
        _linear(q, k, v)
    # The largest element and the sum of 8 rows from each rank, and a sum of 2 x 8 products.
    assert traffic.forward <= 4 * (3 * 2 * 8 + 2 * 2 * 8)


@pytest.mark.parallel([4])
def test_one_sample_moves_to_its_heads() -> None:
    grid = dc.ProcessGrid(height=2, width=2)
    q, k, v = (dc.distribute_tensor(torch.ones(1, 8, 16, 16), grid) for _ in range(3))
    with dc.count_traffic() as traffic:
        _einsum_by_heads(q, k, v)
    assert traffic.forward == 4 * q.numel() * 4 * 3 / 16
