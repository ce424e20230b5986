"""Trackers, searches of hyperparameters and submitit, with losses and ranks of a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import distconv as dc
from tests.support.everywhere import WORLD

both = pytest.mark.parallel([1, 2])

pytestmark = pytest.mark.filterwarnings("ignore")


def loss_on(grid: dc.ProcessGrid) -> Any:
    """Return a loss of 31.5 as a DistTensor."""
    return dc.distribute_tensor(torch.arange(64.0).view(1, 1, 8, 8), grid).mean()


@both
def test_mlflow_logs_a_loss_on_rank_zero(folder: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    loss = loss_on(dc.ProcessGrid(height=-1))
    if WORLD.rank == 0:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        with mlflow.start_run() as run:
            mlflow.log_metric("loss", loss)
        assert mlflow.get_run(run.info.run_id).data.metrics == {"loss": 31.5}
    WORLD.barrier()


@both
def test_wandb_logs_the_number_of_a_loss_on_rank_zero(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb: Any = pytest.importorskip("wandb")
    loss = loss_on(dc.ProcessGrid(height=-1))
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DIR", str(folder))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    if WORLD.rank == 0:
        run = wandb.init(project="test", dir=folder)
        run.log({"loss": loss.item()})
        with pytest.raises(TypeError, match="DistTensor is not JSON serializable"):
            run.log({"loss": loss})  # wandb knows torch's own class by its name
        assert run.summary["loss"] == 31.5
        run.finish()
    WORLD.barrier()


@both
def test_a_study_of_optuna_has_the_same_trials_on_all_ranks() -> None:
    optuna: Any = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    grid = dc.ProcessGrid(height=-1)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    tried = []
    for _ in range(4):
        trial = study.ask() if grid.rank == 0 else None
        rate = dc.data.on_rank_zero(grid, lambda: trial.suggest_float("rate", 0, 1))  # noqa: B023
        value = (loss_on(grid) * rate).item()
        tried.append((rate, value))
        if grid.rank == 0:
            study.tell(trial, value)
    assert len({tuple(each) for each in WORLD.allgather(tried)}) == 1
    if grid.rank == 0:
        assert study.best_value == min(value for _, value in tried)


def submitted(meets: bool) -> Any:
    """Return this task's rank and the sum of the ranks' numbers; runs in a task of submitit."""
    import submitit

    if meets:
        submitit.helpers.TorchDistributedEnvironment().export()
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)
    return grid.rank, grid.size, x.sum().item()


def test_tasks_of_submitit_are_ranks_or_an_error(tmp_path: Path) -> None:
    submitit: Any = pytest.importorskip("submitit")
    executor = submitit.LocalExecutor(tmp_path)
    executor.update_parameters(tasks_per_node=2, timeout_min=2)
    jobs = [executor.submit(submitted, meets) for meets in (True, False)]
    assert jobs[0].results() == [(0, 2, 64.0), (1, 2, 64.0)]
    with pytest.raises(Exception, match=r"submitit.helpers.TorchDistributedEnvironment\(\)"):
        jobs[1].results()
