"""Teams of servers and workers on ranks: serial numbers where there is one worker, sharing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import SGD, Adam

import distconv as dc
from distconv.training import AsynchronousElastic, Downpour, Report, ServerLost, Team, Worker, serve
from distconv.training.server import server_state
from distconv.training.team import TeamArrangement
from tests.support.serial import deviation, raised_everywhere

WORLD = MPI.COMM_WORLD


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1)
    ).double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(3, 2, 6, 5, generator=generator, dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True)


def trained_serially(optimizer: Callable[..., Any], steps: int) -> nn.Module:
    model = network()
    stepping = optimizer(model.parameters())
    for number in range(steps):
        x, y = batch(number)
        (model(x) - y).square().mean().backward()
        stepping.step()
        stepping.zero_grad()
    return model


def backward(model: nn.Module, grid: dc.ProcessGrid, number: int) -> None:
    x, y = (dc.distribute_tensor(t, grid) for t in batch(number))
    (model(x) - y).square().mean().backward()


def course(
    team: Team, method: Any, steps: int, optimizer: Any = None, **options: Any
) -> tuple[Report | None, dict[str, Tensor] | None]:
    """Serve or train; return the report of a server, the parameters of the center on a worker."""
    model = network()
    if team.serves:
        return serve(team, model, method, **options), None
    assert team.grid is not None and team.worker is not None
    dc.parallelize(model, team.grid)
    with Worker(team, model, method, optimizer and optimizer(model.parameters())) as worker:
        for number in range(worker.steps, steps):
            backward(model, team.grid, number)
            worker.step(3)
        worker.meet()
        with worker.center():
            state = copy.deepcopy(model.state_dict())
    return None, state


def teams() -> list[Team]:
    shapes: dict[int, list[dict[str, int]]] = {
        2: [{}],
        3: [{"height": 2}, {"servers": 2}],
        4: [{"height": 3}, {"servers": 2, "width": 2}, {"servers": 2, "sample": 2}],
    }
    return [Team(**shape) for shape in shapes[WORLD.size]]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.05, momentum=0.9), partial(Adam, lr=0.01)])
def test_one_worker_of_any_ranks_and_servers_trains_serially(
    optimizer: Callable[..., Any], synchronous: bool, tmp_path: Path
) -> None:
    folder = WORLD.bcast(tmp_path)
    for place, team in enumerate(teams()):
        method = Downpour(optimizer, synchronous=synchronous)
        report, state = course(team, method, 4, folder=folder / str(place))
        serial = trained_serially(optimizer, 4).state_dict()
        WORLD.barrier()
        saved = server_state(folder / str(place))
        assert saved.keys() == serial.keys()
        for name, expected in serial.items():
            assert deviation(saved[name], expected) <= 1e-9, name
            assert state is None or deviation(state[name], expected) <= 1e-9, name
        if report is not None:
            assert report.staleness == {0: 4} and report.samples == 12


@pytest.mark.parallel([4, 6])
@pytest.mark.parametrize("method", [Downpour(partial(SGD, lr=0.02)), AsynchronousElastic()])
@pytest.mark.parametrize("shape", [{}, {"groups": 2}] if WORLD.size > 4 else [{}])
def test_several_workers_learn_together(method: Any, shape: dict[str, int]) -> None:
    team = Team(**shape)
    report, state = course(team, method, 10 + 5 * (team.worker or 0), partial(SGD, lr=0.02))
    losses = WORLD.allgather(None if state is None else loss_with(state))
    begun = loss_with(network().state_dict())
    assert all(loss < 0.8 * begun for loss in losses if loss is not None)
    if team.rank == 0:
        assert report is not None and not report.lost
        assert report.samples == 3 * sum(10 + 5 * worker for worker in range(team.workers))


def loss_with(state: dict[str, Tensor]) -> float:
    model = network()
    model.load_state_dict(state)
    x, y = batch(99)
    return (model(x) - y).square().mean().item()


@pytest.mark.parallel([2, 4])
def test_a_team_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder = WORLD.bcast(tmp_path)
    method = Downpour(partial(Adam, lr=0.01))
    shape = {} if WORLD.size == 2 else {"servers": 2, "height": 2}
    for steps in (3, 6):
        course(Team(**shape), method, steps, folder=folder, save_every=1, resume=True)
        WORLD.barrier()
    serial = trained_serially(method.optimizer, 6).state_dict()
    for name, value in server_state(folder).items():
        assert deviation(value, serial[name]) <= 1e-9, name


@pytest.mark.parallel([2])
def test_the_state_of_another_run_is_refused_before_training(tmp_path: Path) -> None:
    folder = WORLD.bcast(tmp_path)
    method = Downpour(partial(SGD, lr=0.05))
    course(Team(), method, 2, folder=folder)
    WORLD.barrier()
    with pytest.raises(
        (FileExistsError, ServerLost), match=r"belongs to another run; .*resume=True"
    ):
        course(Team(), method, 1, folder=folder)


@pytest.mark.parallel([3])
def test_sharded_weights_reach_the_server_whole() -> None:
    team, method = Team(channel=2), Downpour(partial(SGD, lr=0.05))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    serial = copy.deepcopy(model)
    optimizer = method.optimizer(serial.parameters())
    for number in range(3):
        serial(batch(number)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if team.serves:
        serve(team, model, method)
        return
    assert team.grid is not None
    dc.parallelize(model, team.grid, shard_parameters=True)
    assert any(isinstance(p, dc.DistTensor) for p in model.parameters())
    with Worker(team, model, method) as worker:
        for number in range(3):
            x = dc.distribute_tensor(batch(number)[0], team.grid)
            model(x).square().mean().backward()
            worker.step()
        for name, value in dc.full_state_dict(model).items():
            assert deviation(value, serial.state_dict()[name]) <= 1e-10, name


@pytest.mark.parallel([2, 4])
def test_what_does_not_fit_is_an_error_on_every_rank() -> None:
    assert "start" in raised_everywhere(ValueError, lambda: Team(height=5))
    assert "servers=0 is not a count" in raised_everywhere(ValueError, lambda: Team(servers=0))
    assert "'time'" not in raised_everywhere(ValueError, lambda: Team(time=1))
    different = raised_everywhere(ValueError, lambda: Team(servers=1 + WORLD.rank))
    assert "pass the same on every rank" in different
    team = Team()
    model = network()
    if team.serves:
        with pytest.raises(ValueError, match="this rank is a server"):
            Worker(team, model, Downpour(partial(SGD, lr=0.1)))
    else:
        with pytest.raises(ValueError, match=r"not parallelized; parallelize it on team\.grid"):
            Worker(team, model, Downpour(partial(SGD, lr=0.1)))
        with pytest.raises(ValueError, match="belongs to a worker"):
            serve(team, model, Downpour(partial(SGD, lr=0.1)))


@given(
    shards=st.integers(1, 4),
    groups=st.integers(1, 4),
    of_worker=st.integers(1, 5),
    workers=st.integers(1, 9),
)
def test_every_worker_has_a_server_and_every_server_its_place(
    shards: int, groups: int, of_worker: int, workers: int
) -> None:
    serving = shards * (groups + 1 if groups > 1 else 1)
    ranks = serving + of_worker * workers
    if workers < groups:
        with pytest.raises(ValueError, match="at least one worker in each"):
            TeamArrangement(ranks, shards, groups, of_worker)
        return
    team = TeamArrangement(ranks, shards, groups, of_worker)
    assert (team.servers, team.workers) == (serving, workers)
    assert sorted(r for w in range(workers) for r in team.ranks_of(w)) == list(
        range(serving, ranks)
    )
    for rank in range(ranks):
        above = team.above(rank)
        talks = team.serves(rank) or rank == team.ranks_of(team.worker_of(rank))[0]
        assert len(above) == (0 if rank < shards or not talks else 1 if rank < serving else shards)
        assert all(rank in team.below(server) for server in above)
        if above:
            # Shard by shard, with the same part of the parameters.
            assert [server % shards for server in above] == (
                [rank % shards] if rank < serving else list(range(shards))
            )
    in_group = [0] * groups
    for worker in range(workers):
        in_group[team.group_of(worker)] += 1
    assert max(in_group) - min(in_group) <= 1
    if of_worker > 1:
        with pytest.raises(ValueError, match=f"start {ranks} ranks"):
            TeamArrangement(ranks + 1, shards, groups, of_worker)
