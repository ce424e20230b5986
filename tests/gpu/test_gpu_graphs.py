"""Training steps are captured as graphs of the GPU, by `compile` or by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import distconv as dc
from tests.gpu.steps import RANKS, batch, net, only_with_cuda, step
from tests.support.serial import deviation

pytestmark = pytest.mark.gpu

WARM_UP = 3


@pytest.mark.parallel(RANKS)
@pytest.mark.filterwarnings("error:compile")
def test_compile_captures_both_passes(grid: dc.ProcessGrid) -> None:
    if grid.transport.name == "mpi":
        pytest.skip("MPI makes the host wait")
    models = [dc.parallelize(net().double(), grid) for _ in range(2)]
    twins = [(m, torch.optim.SGD(m.parameters(), 0.1, 0.9)) for m in models]
    compiled = dc.compile(models[1])
    for seed in range(8):
        x, y = (dc.distribute_tensor(t, grid) for t in batch(seed=seed))
        theirs = step(*twins[0], x, y)
        assert deviation(step(compiled, twins[1][1], x, y), theirs) < 1e-10
        for _, optimizer in twins:  # present settings count
            optimizer.param_groups[0]["lr"] *= 0.9
    assert compiled.replays == 6
    for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert deviation(mine, other) < 1e-9


@only_with_cuda
@pytest.mark.parallel(RANKS)
def test_a_replayed_step_is_the_step(grid: dc.ProcessGrid) -> None:
    if grid.transport.name == "mpi":
        pytest.skip("MPI makes the host wait")
    models = [dc.parallelize(net().double(), grid) for _ in range(2)]
    twins = [(m, torch.optim.SGD(m.parameters(), 0.1, 0.9)) for m in models]
    batches = [batch(seed=seed) for seed in range(WARM_UP + 4)]
    x, y = (dc.distribute_tensor(t, grid) for t in batches[0])

    def load(values: tuple[Tensor, Tensor]) -> None:
        for static, value in zip((x, y), values, strict=True):
            static.to_local().copy_(dc.distribute_tensor(value, grid).to_local())

    losses = []
    for values in batches:
        load(values)
        losses.append(step(*twins[0], x, y))

    side = torch.cuda.Stream(grid.device)
    for i in range(WARM_UP):
        load(batches[i])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = step(*twins[1], x, y)
        torch.cuda.current_stream().wait_stream(side)
        assert deviation(loss, losses[i]) < 1e-10
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step(*twins[1], x, y)
    for i in range(WARM_UP, len(batches)):
        load(batches[i])
        graph.replay()
        assert deviation(loss, losses[i]) < 1e-10
    # The grid goes on as before.
    for optimizer in (twins[0][1], twins[1][1]):
        optimizer.zero_grad()
    assert deviation(step(*twins[1], x, y), step(*twins[0], x, y)) < 1e-10
    for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert deviation(mine, other) < 1e-9


@only_with_cuda
@pytest.mark.parallel(RANKS)
def test_mpi_says_that_it_cannot_be_captured() -> None:
    grid = dc.ProcessGrid(height=-1, transport="mpi")
    x = torch.ones(4, device=grid.device)
    message = [(0, x)] if grid.rank == 0 else []
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
        pytest.raises(RuntimeError, match="capture steps on a grid with transport='torch'"),
    ):
        grid.transport.exchange(message, [(0, x)], grid.transport.next_tag())
