"""Validation at a server is as frequent as asked for, may end the training, and is recorded."""

from __future__ import annotations

import copy
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from torch import nn
from torch.optim import SGD, Adam

import distconv as dc
from distconv.data.checkpoint import checkpoints_in
from distconv.training import (
    AsynchronousElastic,
    Downpour,
    History,
    Report,
    ServerLost,
    Team,
    Worker,
    serve,
    server_state,
)
from distconv.training.history import Validation
from tests.support.jobs import end_of
from tests.support.killed_workers import PROGRAM, begin
from tests.support.verdicts import one_verdict
from tests.training.test_lost_ranks import KILLED
from tests.training.test_servers import Point
from tests.training.test_team import backward, batch, network

WORLD = MPI.COMM_WORLD

ASYNCHRONOUS = Downpour(partial(SGD, lr=0.02))


def loss_of(model: nn.Module, number: int) -> Any:
    x, y = batch(number)
    return (model(x) - y).square().mean()


def evaluate(model: nn.Module) -> Any:
    """Return the loss of a mini-batch on which nobody trains."""
    assert not model.training and not torch.is_grad_enabled()
    return loss_of(model, 99)


def course(team: Team, method: Any, steps: int, **options: Any) -> tuple[Report | None, int]:
    """Serve, or train for `steps` steps at most; return the report, and the steps taken."""
    model = network()
    if team.serves:
        return serve(team, model, method, **options), 0
    assert team.grid is not None
    dc.parallelize(model, team.grid)
    with Worker(team, model, method, SGD(model.parameters(), lr=0.02)) as worker:
        for number in range(worker.steps, steps):
            if worker.stopped:
                break
            x, y = (dc.distribute_tensor(t, team.grid) for t in batch(number))
            loss = (model(x) - y).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            worker.step(3, loss=loss)
        return None, worker.steps


def one_worker() -> Team:
    return Team(height=WORLD.size - 1)


def written(folder: Path) -> Any:
    """Return the content of the file, which has to be JSON in the strict sense."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads((folder / "history.json").read_text(), parse_constant=refuse)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("push", [1, 2])
def test_a_server_validates_every_so_many_updates_and_at_the_end(tmp_path: Path, push: int) -> None:
    folder = WORLD.bcast(tmp_path)
    method = Downpour(partial(Adam, lr=0.01), push=push, fetch=push)
    options = {"validate": evaluate, "every": 2, "folder": folder}
    report, _ = course(one_worker(), method, 5 * push, **options)
    if report is None:
        return
    model, losses, expected = network(), list[float](), list[float]()
    optimizer = Adam(model.parameters(), lr=0.01)
    for number in range(5 if push == 1 else 0):  # a worker also steps between its pushes
        loss = loss_of(model, number)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss_of(copy.deepcopy(model).eval(), 99).item())
    history = report.history
    assert [v.update for v in history.validation] == [2, 4, 5]
    assert [v.samples for v in history.validation] == [6 * push, 12 * push, 15 * push]
    assert [(t.update, t.client) for t in history.training] == [(n, 0) for n in range(1, 6)]
    seconds = [v.seconds for v in history.validation]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < history.seconds
    for validation in history.validation if push == 1 else []:
        assert abs(validation.loss - expected[validation.update - 1]) <= 1e-9
    for training in history.training if push == 1 else []:
        assert abs(training.loss - losses[training.update - 1]) <= 1e-9
    content = written(folder)
    assert content["validation"]["loss"] == [v.loss for v in history.validation]
    assert content["training"]["update"] == [1, 2, 3, 4, 5] and content["stopped"] is None


@pytest.mark.parallel([2])
def test_losses_between_two_updates_are_averaged_by_samples() -> None:
    team, model = Team(), network()
    method = Downpour(partial(SGD, lr=0.1), push=2, fetch=2)
    if team.serves:
        report = serve(team, model, method)
        assert [t.loss for t in report.history.training] == [2.5, math.inf]
        return
    assert team.grid is not None
    dc.parallelize(model, team.grid)
    with Worker(team, model, method) as worker:
        # Without a loss, or without samples, there is no entry.
        losses = [(1, 4.0), (3, torch.tensor([2.0])), (1, math.inf), (2, None), (1, None), (0, 9.0)]
        for samples, loss in losses:
            backward(model, team.grid, 0)
            worker.step(samples, loss)


LOSSES = [5.0, 4.0, math.nan, 6.0, 3.0, 2.0]


@pytest.mark.parallel([2, 3, 4, 6])
@pytest.mark.parametrize("options", [{"target": 4.0}, {"patience": 2}])
@pytest.mark.parametrize(
    "method",
    [ASYNCHRONOUS, Downpour(partial(SGD, lr=0.02), synchronous=True), AsynchronousElastic()],
)
def test_a_server_ends_the_training_of_all_workers(
    tmp_path: Path, method: Any, options: dict[str, Any]
) -> None:
    folder = WORLD.bcast(tmp_path)
    team = Team(groups=2) if WORLD.size == 6 else Team()
    validated: list[dict[str, Any]] = []

    def validate(model: nn.Module) -> float:
        validated.append(copy.deepcopy(model.state_dict()))
        return LOSSES[len(validated) - 1]

    report, steps = course(team, method, 1000, validate=validate, every=2, folder=folder, **options)
    taken = WORLD.allgather(steps)
    assert max(taken) < 1000, taken  # a slow worker may be ended before its first step
    if report is None:
        return
    assert not report.lost
    if team.above:
        return
    times = 2 if "target" in options else 4
    assert [v.update for v in report.history.validation] == [2 * n for n in range(1, times + 1)]
    assert report.updates == 2 * times
    assert {t.update for t in report.history.training} == set(range(1, 2 * times + 1))
    reason = "reaches target=4" if "target" in options else "not improved on 4 in patience=2"
    assert report.stopped is not None and reason in report.stopped and reason in str(report)
    content = written(folder)
    assert content["validation"]["loss"] == [5.0, 4.0, None, 6.0][:times]
    assert content["stopped"] == report.stopped
    # Updates that were under way have changed nothing.
    saved = server_state(folder) if team.arrangement.groups == 1 else validated[-1]
    for name, value in validated[-1].items():
        assert torch.equal(saved[name], value), name


def test_a_worker_that_dies_meanwhile_is_dropped_and_the_others_are_ended(tmp_path: Path) -> None:
    text = PROGRAM.replace("resume=True", "validate=validate, every=5, patience=3")
    validate = "validate = lambda model: float(model[0].weight.shape[0])\n"
    text = text.replace("team = Team", validate + "team = Team")
    text = text.replace(
        "            model(x)", "            if worker.stopped: break\n            model(x)"
    )
    ends = [end_of(process) for process in begin(tmp_path, "synchronous", 99999, KILLED, text=text)]
    report = "".join(end.stdout + end.stderr for end in ends)
    assert not any(end.returncode for end in ends[:2]) and ends[2].returncode, report
    assert "lost 1" in ends[0].stdout and "client 1 is dropped" in ends[0].stderr, report
    # The first validation is the best, the fourth the third without an improvement.
    assert written(tmp_path / "state")["validation"]["update"] == [5, 10, 15, 20]


@pytest.mark.parallel([2, 3, 4])
def test_the_history_survives_a_restart(tmp_path: Path) -> None:
    folder = WORLD.bcast(tmp_path)
    options = {"validate": evaluate, "every": 2, "save_every": 1, "keep": 9, "resume": True}
    reports = []
    for steps in (3, 6):
        report, _ = course(one_worker(), ASYNCHRONOUS, steps, folder=folder / "run", **options)
        reports.append(report)
        WORLD.barrier()
    checkpoints = checkpoints_in(folder / "run" / "server-0")
    [earlier] = [path for path in checkpoints if path.stem.endswith("000002")]
    options |= {"folder": folder / "again", "resume": earlier}
    third, _ = course(one_worker(), ASYNCHRONOUS, 3, **options)
    first, second = reports
    if first is None or second is None or third is None:
        return
    assert [v.update for v in second.history.validation] == [2, 3, 4, 6]
    assert [t.update for t in second.history.training] == [1, 2, 3, 4, 5, 6]
    assert second.history.validation[:2] == first.history.validation
    seconds = [t.seconds for t in second.history.training]
    assert seconds == sorted(seconds)
    assert written(folder / "run")["training"]["seconds"] == seconds
    # From an earlier checkpoint, the history is that of its updates.
    assert third.history.validation[0] == first.history.validation[0]
    assert [v.update for v in third.history.validation] == [2, 3]
    assert [t.update for t in third.history.training] == [1, 2, 3]


@pytest.mark.parallel([2, 3, 4])
def test_a_training_that_has_ended_continues_only_for_another_target(tmp_path: Path) -> None:
    folder = WORLD.bcast(tmp_path)
    losses = iter([0.5, 0.25])
    options = {"validate": lambda _: next(losses), "every": 2, "resume": True, "folder": folder}
    reports = []
    for target in (0.5, 0.5, 0.25):
        reports.append(course(Team(), ASYNCHRONOUS, 1000, target=target, **options)[0])
        WORLD.barrier()
    if updates := [report.updates for report in reports if report is not None]:
        assert updates == [2, 2, 4]
        assert all(report is not None and report.stopped for report in reports)


@pytest.mark.parallel([2])
def test_the_history_of_a_run_without_checkpoints_is_not_replaced(tmp_path: Path) -> None:
    folder = WORLD.bcast(tmp_path)
    for steps in (2, 3, 4):
        course(Team(), ASYNCHRONOUS, steps, folder=folder, save_every=None)
        WORLD.barrier()
    for name, steps in {"history": 4, "history-1": 2, "history-2": 3}.items():
        content = json.loads((folder / f"{name}.json").read_text())
        assert content["training"]["update"] == list(range(1, steps + 1))


@pytest.mark.parallel([2])
def test_a_validation_that_fails_ends_the_job_with_its_state_on_disk(tmp_path: Path) -> None:
    folder = WORLD.bcast(tmp_path)

    def validate(model: nn.Module) -> Any:
        return "good"

    with pytest.raises((ValueError, ServerLost), match="result of validate is 'good'; pass a real"):
        course(Team(), ASYNCHRONOUS, 9, folder=folder, validate=validate, every=3)
    WORLD.barrier()
    assert checkpoints_in(folder / "server-0")[0].stem.endswith("-0000000003")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"every": 5}, "every=5 needs a validation loss; pass validate="),
    ({"patience": 5}, "patience=5 needs a validation loss; pass validate="),
    ({"target": 0.5}, "target=0.5 needs a validation loss; pass validate="),
    ({"validate": 3, "every": 1}, "validate=3 is not a function; pass a function of the model"),
    ({"validate": evaluate}, "every=None is not a count; pass an integer of 1 or more"),
    ({"validate": evaluate, "every": 0}, "every=0 is not a count; pass an integer of 1 or more"),
    ({"validate": evaluate, "every": 2, "patience": 0}, "patience=0 is not a count; pass an"),
    ({"validate": evaluate, "every": 2, "target": "x"}, "target is 'x'; pass a real number"),
    ({"validate": evaluate, "every": 2, "target": math.nan}, "target is NaN, which no loss"),
    ({"save_every": 0}, "save_every=0 is not a count; pass an integer of 1 or more"),
]


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_arguments_are_an_error_on_every_rank(options: dict[str, Any], message: str) -> None:
    with one_verdict(), pytest.raises((ValueError, ServerLost), match=re.escape(message)):
        course(Team(), ASYNCHRONOUS, 1, **options)


@pytest.mark.parallel([3, 4])
def test_a_server_of_several_ranks_has_no_whole_model_to_validate() -> None:
    message = r"each of the servers=2 holds a part; create a Team\(servers=1\), or validate in"
    with one_verdict(), pytest.raises((ValueError, ServerLost), match=message):
        course(Team(servers=2), ASYNCHRONOUS, 1, validate=evaluate, every=1)


@pytest.mark.parallel([2, 3])
def test_a_loss_that_is_no_number_is_an_error_in_the_worker() -> None:
    team, model = one_worker(), network()
    if team.serves:
        with pytest.raises(RuntimeError, match="all workers are lost"):
            serve(team, model, ASYNCHRONOUS)
        return
    dc.parallelize(model, team.grid)
    with pytest.raises(ValueError, match=r"Worker.step: loss is a tensor of shape \(3,\); pass a"):
        with Worker(team, model, ASYNCHRONOUS) as worker:
            worker.step(1, loss=torch.rand(3))


@given(
    losses=st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), max_size=8),
    patience=st.integers(1, 3),
)
def test_patience_counts_validations_since_the_best(losses: list[float], patience: int) -> None:
    model, given_losses, history = Point(), iter(losses), History()
    validate = Validation(
        lambda _: next(given_losses), 1, patience, 1.0, model, [model.place], history
    )
    best, since = math.inf, -1
    for update, loss in enumerate(losses, start=1):
        assert validate.is_due(update)
        validate.run(update, update)
        assert not validate.is_due(update)
        first = all(math.isnan(x) for x in losses[: update - 1]) and not math.isnan(loss)
        since = 0 if first or loss < best or update == 1 else since + 1
        best = loss if first or loss < best else best
        reason = validate.reason_to_stop()
        assert (reason is not None) == (since >= patience or loss <= 1)
    state = json.loads(json.dumps(history.state_dict()))
    again = History()
    again.load_state_dict(state)
    assert repr(again.validation) == repr(history.validation)
