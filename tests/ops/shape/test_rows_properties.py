"""Rows that positions ask for equal the serial ones, forward and backward, on any grid."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import distconv as dc
from distconv.device.kinds import thresholds
from distconv.ops.shape import rows
from tests.support.serial import raised_everywhere
from tests.support.strategies import Case, on_any_grid, sizes


@pytest.fixture(autouse=True)
def _no_rows_are_few() -> Iterator[None]:
    """Let rows be exchanged in all tests, however few they are and however many are needed."""

    def none_gathered(accelerator: bool) -> object:
        return thresholds(accelerator)._replace(gathered_rows=-1)

    with (
        mock.patch.object(rows, "thresholds", none_gathered),
        mock.patch.object(rows, "MOST_MOVED", float("inf")),
    ):
        yield


def _table(case: Case) -> tuple[list[int], int]:
    """Draw a shape, and one of its dimensions, which is not empty."""
    shape = [case.draw(st.integers(0, 5)) for _ in range(case.one_of(2, 1, 3))]
    d = case.draw(st.integers(0, len(shape) - 1))
    shape[d] = case.draw(sizes(1, 13))
    return shape, d


def _positions(case: Case, shape: list[int], size: int, first: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(case.draw(st.integers(0, 999)))
    kind = case.one_of(torch.int64, torch.int64, torch.int32)
    found = torch.randint(first, size, tuple(shape), generator=generator, dtype=kind)
    # Often neighbours are close, as on a mesh.
    return (found.sort().values if shape and case.flag() else found).to(case.grid.device)


@on_any_grid(40, more=[3, 6])
def test_selected_rows_equal_serial(case: Case) -> None:
    shape, d = _table(case)
    n = case.draw(st.integers(0, 9))
    index = _positions(case, [n], shape[d])
    cut = case.one_of([0], [0, 1])
    if case.flag():
        case.agrees(lambda x, i: x.index_select(d, i), case.tensor(shape), index, cut=cut)
        return
    index = _positions(case, [n, 2], shape[d], -shape[d])
    case.agrees(lambda x, i: x[(slice(None),) * d + (i,)], case.tensor(shape), index, cut=cut)


@on_any_grid(40, more=[3, 6])
def test_gathered_elements_equal_serial(case: Case) -> None:
    shape, d = _table(case)
    longest = list(shape)
    longest[d] = case.draw(st.integers(0, 9))
    index = _positions(case, longest, shape[d]).long()
    cut = case.one_of([0], [0, 1])
    case.agrees(lambda x, i: x.gather(d, i).sin(), case.tensor(shape), index, cut=cut)


@on_any_grid(40, more=[3, 6])
def test_added_slices_equal_serial(case: Case) -> None:
    shape, d = _table(case)
    slices = list(shape)
    slices[d] = case.draw(st.integers(0, 9))
    index = _positions(case, [slices[d]], shape[d])
    alpha = case.one_of(1, -2)
    case.agrees(
        lambda x, i, source: x.index_add(d, i, source, alpha=alpha),
        *(case.tensor(shape), index, case.tensor(slices)),
        cut=[0, *case.some([1, 2])],
    )


@on_any_grid(15, more=[3])
def test_rows_added_by_index_put_equal_serial(case: Case) -> None:
    shape = [case.draw(sizes(1, 9)), *(case.draw(sizes(0, 3)) for _ in range(case.one_of(1, 0)))]
    index = _positions(case, [case.draw(st.integers(0, 5)), 2], shape[0], -shape[0]).long()
    values = case.tensor([*case.one_of(index.shape, [1]), *shape[1:]])
    case.agrees(
        lambda x, i, values: x.index_put((i,), values, accumulate=True),
        *(case.tensor(shape), index, values),
        cut=[0, *case.some([1, 2])],
    )


@on_any_grid(40, more=[3, 6])
def test_added_elements_equal_serial(case: Case) -> None:
    shape, d = _table(case)
    longest = list(shape)
    longest[d] = case.draw(st.integers(0, 9))
    index = _positions(case, longest, shape[d]).long()
    source = [n + case.one_of(0, 0, 1) for n in longest]
    case.agrees(
        lambda x, i, source: x.scatter_add(d, i, source),
        *(case.tensor(shape), index, case.tensor(source)),
        cut=[0, *case.some([1, 2])],
    )


@on_any_grid(20, more=[3])
def test_embeddings_in_a_partitioned_table_equal_serial(case: Case) -> None:
    table, n = case.tensor([case.draw(sizes(1, 9)), 3]), case.draw(sizes(0, 6))
    index = _positions(case, [n, 2], len(table))
    padding = case.one_of(None, 0, -1)
    case.agrees(lambda w, i: F.embedding(i, w, padding), table, index, cut=case.one_of([0], [0, 1]))


@pytest.mark.parallel([1, 2, 3])
def test_a_position_out_of_range_raises_on_every_rank_by_its_number() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(6, 2), grid, dc.Layout(sample="height"))
    index = torch.tensor([0, 1, 2, 3, 4, 7])
    for call in (
        lambda: x.index_select(0, index),
        lambda: x[index],
        lambda: x.index_add(0, index, torch.ones(6, 2)),
        lambda: F.embedding(index, x),
    ):
        if grid.size > 1:
            assert "7 is out of range" in raised_everywhere(IndexError, call)
    wide = index[:, None].expand(-1, 2)
    for call in (lambda: x.gather(0, wide), lambda: x.scatter_add(0, wide, torch.ones(6, 2))):
        assert "7 is out of" in raised_everywhere(RuntimeError, call)
    assert torch.equal(x[index[:3]].full_tensor(), torch.ones(3, 2))


@pytest.mark.parallel([2])
def test_one_rank_alone_looks_up_what_it_has_in_full() -> None:
    grid = dc.ProcessGrid(height=-1)
    whole = dc.distribute_tensor(torch.arange(12.0).view(4, 3), grid, dc.Layout())
    index = torch.tensor([[2, 0, 1]] * 4)
    if grid.rank == 0:
        assert whole.gather(1, index).full_tensor()[0].tolist() == [2.0, 0.0, 1.0]
        assert whole.scatter(1, index[:, :1], 5.0).full_tensor()[0].tolist() == [0.0, 1.0, 5.0]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("own", [True, False], ids=["distributed", "plain"])
def test_a_position_out_of_range_in_one_ranks_rows_raises_on_every_rank(own: bool) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(4, 3), grid, dc.Layout(sample="height"))
    for number in (7, -1):
        index = torch.zeros(4, 3, dtype=torch.int64)
        index[3, 1] = number  # in the rows of the last rank
        given = dc.distribute_tensor(index, grid, dc.Layout()) if own else index
        for call in (
            lambda given=given: x.gather(1, given),
            lambda given=given: x[:, :0].gather(1, given[:, :2]),
            lambda index=index: torch.ones(4, 3).gather(
                1, dc.distribute_tensor(index, grid, x.grid_layout)
            ),
            lambda given=given: x.scatter(1, given, 2.0),
            lambda given=given: x.scatter_reduce(1, given, x, "amax"),
            lambda given=given: x.scatter_add(1, given, x),
        ):
            assert "out of" in raised_everywhere(RuntimeError, call)
