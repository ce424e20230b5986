"""Positions along a partitioned dimension move the rows that they name, and indices once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from benchmarks.measuring.memory import peak_of
from distconv.ops.support import operands
from tests.support.arriving import arriving

SIDE, FEATURES = 32, 8
BOUNDARY = SIDE * FEATURES * 4
"""The bytes of the nodes on one side of a block of a mesh whose rows are partitioned."""


def _mesh() -> tuple[Tensor, Tensor]:
    """Return the source and target of all edges of a mesh, by target."""
    nodes = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    pairs = [(nodes[:-1], nodes[1:]), (nodes[1:], nodes[:-1])]
    pairs += [(nodes[:, :-1], nodes[:, 1:]), (nodes[:, 1:], nodes[:, :-1])]
    source, target = (torch.cat([p[i].flatten() for p in pairs]) for i in (0, 1))
    order = target.argsort(stable=True)
    return source[order], target[order]


def _most(*sizes: float) -> list[float]:
    """Return the maximum over ranks of each number."""
    return [max(of_rank) for of_rank in zip(*MPI.COMM_WORLD.allgather(sizes), strict=True)]


def _messages(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return for each node the sum of messages of its neighbours."""
    messages = x.index_select(0, source).sin()
    return torch.zeros_like(x).index_add(0, target, messages)


@pytest.mark.parallel([2, 4])
def test_a_mesh_costs_its_boundary_from_the_third_call_on() -> None:
    grid = dc.ProcessGrid(height=-1)
    sides = min(grid.size - 1, 2)
    layout = dc.Layout(sample="height")
    given = torch.randn(SIDE * SIDE, FEATURES, generator=torch.Generator().manual_seed(1))
    x = dc.distribute_tensor(given, grid, layout).requires_grad_()
    edges = torch.stack(_mesh())
    found = []
    for _ in range(4):
        source, target = edges  # other tensors each time, in the same memory
        dc.redistributions(reset=True)
        with arriving(grid) as forward:
            y = _messages(x, source, target)
        told = sum(entry.bytes for entry in dc.redistributions())
        with arriving(grid) as backward:
            y.sum().backward()
        found.append(_most(sum(forward), sum(backward), told))
    # The blocks of nodes and of edges do not begin at the same rows of the mesh.
    gathered, first, second, third = found
    assert second == third
    assert second[0] == pytest.approx(second[2], abs=400)
    assert sides * BOUNDARY <= second[2] <= 3 * sides * BOUNDARY
    assert second[1] == pytest.approx(second[0], abs=400)
    assert second[0] < first[0] == pytest.approx(first[2], abs=400)
    assert first[0] < gathered[0]


@pytest.mark.parallel([2, 3])
def test_indices_are_sent_anew_after_a_write_to_them() -> None:
    grid = dc.ProcessGrid(height=-1)
    given = torch.arange(400000.0).view(1000, 400) + 1
    x = dc.distribute_tensor(given, grid, dc.Layout(sample="height"))
    for layout in (None, dc.Layout(sample="height")):
        expected, index = torch.arange(10), torch.arange(10)
        own = index if layout is None else dc.distribute_tensor(index, grid, layout)
        for _ in range(3):
            for _ in range(2):
                assert torch.equal(x.index_select(0, own).full_tensor(), given[expected])
            expected[:1] += 1
            own[:1] += 1  # written on one rank, if it is partitioned


@pytest.mark.parallel([4])
def test_few_rows_and_rows_that_are_nearly_all_needed_are_gathered() -> None:
    grid = dc.ProcessGrid(height=-1)
    layout = dc.Layout(sample="height")
    for nodes, positions in ((32, torch.arange(4)), (8192, torch.arange(8192).flip(0))):
        x = dc.distribute_tensor(torch.ones(nodes, 64), grid, layout)
        every = positions.repeat(4) if nodes > 32 else positions
        dc.redistributions(reset=True)
        x.index_select(0, every)
        told = sum(entry.bytes for entry in dc.redistributions(reset=True))
        assert told == nodes * 64 * 4 * 3 / 4


@pytest.mark.parallel([2])
def test_rows_are_gathered_while_a_graph_is_captured() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(8192, 64), grid, dc.Layout(sample="height"))
    index = torch.arange(4)
    for captured, moved in ((False, 2 * 64 * 4), (True, 8192 * 64 * 4 / 2)):
        dc.redistributions(reset=True)
        with (
            mock.patch.object(operands, "is_accelerator", mock.Mock(return_value=captured)),
            mock.patch.object(operands, "is_capturing", mock.Mock(return_value=True)),
        ):
            x.index_select(0, index)
        told = sum(entry.bytes for entry in dc.redistributions(reset=True))
        assert max(MPI.COMM_WORLD.allgather(told)) == pytest.approx(moved, abs=100)


def _step(serial: bool) -> Callable[[], object]:
    x, edges = torch.ones(2**14, 32), torch.stack([(torch.arange(2**14) + 1) % 2**14] * 2)
    if not serial:
        grid = dc.ProcessGrid(height=-1)
        x = dc.distribute_tensor(x, grid, dc.Layout(sample="height"))
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        _messages(x, *edges).sum().backward()

    return step


@pytest.mark.parallel([4])
def test_a_rank_needs_its_share_of_the_serial_memory() -> None:
    serial = peak_of(partial(_step, serial=True)).whole
    most = max(MPI.COMM_WORLD.allgather(peak_of(partial(_step, serial=False)).whole))
    assert most / serial < 2 / 4, most / serial


def _added(expanded: bool) -> Callable[[], object]:
    """Return sums by rows of 16 channels, whose index may be the same memory."""
    grid, nodes = dc.ProcessGrid(height=-1), 2**16
    cut = dc.Layout(channel="height")
    x = dc.distribute_tensor(torch.ones(16, nodes), grid, cut)
    rows = dc.distribute_tensor(torch.arange(nodes)[None] // 2, grid, cut)

    def step() -> None:
        index = (rows + 0).expand(16, -1)  # a new one, of which nothing is kept
        torch.zeros(16, nodes).scatter_add(1, index if expanded else index.contiguous(), x)

    return step


@pytest.mark.parallel([2])
def test_an_expanded_index_is_sorted_once() -> None:
    own = [peak_of(partial(_added, expanded)).step for expanded in (True, False)]
    assert own[0] < 2 / 3 * own[1]  # 0.53, and 0.82 if all channels are sorted


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, index: torch.zeros(1, 8, 256 * 256).scatter_add(2, index, x),
        lambda x, index: x.gather(2, index),
    ],
    ids=["scatter_add", "gather"],
)
def test_an_index_is_redistributed_before_it_is_expanded(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    grid = dc.ProcessGrid(height=2, width=2)
    given = torch.arange(8.0 * 256 * 256).view(1, 8, 256, 256)
    positions = torch.arange(256 * 256).view(1, 256, 256)
    layout = dc.Layout(channel="height", width="width")
    pairs = [(given, positions)]
    pairs += [(dc.distribute_tensor(given, grid), dc.distribute_tensor(positions, grid, layout))]

    def result(x: Tensor, places: Tensor) -> Tensor:
        index = ((places + 1) % 256**2).flatten(1)[:, None].expand(1, 8, -1)
        return function(x.flatten(2), index).view(1, 8, 256, 256)

    expected = result(*pairs[0])
    with arriving(grid) as sizes:
        got = result(*pairs[1])
    assert torch.equal(got.full_tensor(), expected)
    # Half of the values of a rank and of the results are moved, and an eighth as many positions.
    assert _most(sum(sizes))[0] < 1.3 * given.nbytes / 4


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("features", [8, 400])
def test_ranks_that_hold_positions_differently_agree_on_what_is_kept(features: int) -> None:
    grid = dc.ProcessGrid(height=-1)
    given = torch.arange(1000.0 * features).view(1000, features)
    x = dc.distribute_tensor(given, grid, dc.Layout(sample="height"))
    kept = torch.arange(10)
    for _ in range(4):
        # A new tensor on all ranks but one, as a broadcast of an object makes them.
        index = kept if grid.rank == 0 else kept.clone()
        assert torch.equal(x[index].full_tensor(), given[index])
    for number in range(4):
        if grid.rank == 0:
            kept.copy_(torch.arange(10) + number)
        MPI.COMM_WORLD.Bcast(kept.numpy())  # of which torch does not know on the other ranks
        assert torch.equal(x[kept].full_tensor(), given[number : number + 10])
