"""All ranks stop after the same step: on a signal to one, at a time limit, without improvement."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.training import EarlyStopping, TimeToStop
from tests.support.everywhere import WORLD

every_size = pytest.mark.parallel([1, 2, 4])


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the handlers of signals back, and hide a job of Slurm."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@every_size
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCONV_CONTINUE", str(folder / "continue"))
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Conv2d(1, 1, 3, padding=1), grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = dc.distribute_tensor(torch.ones(2, 1, 8, 8), grid)
    stop, step = TimeToStop(grid), 0
    while step < 9:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 3 and grid.rank == grid.size - 1:
            os.kill(os.getpid(), number)
        if stop():
            dc.save_checkpoint(folder / "run", model, optimizer, step=step)
            break
    assert WORLD.allgather(step) == [3] * WORLD.size
    assert stop()  # and without a message
    found = dc.load_checkpoint(folder / "run", model, optimizer)
    assert found is not None and found.step == 3
    WORLD.barrier()
    assert (folder / "continue").exists()


@pytest.mark.parallel([1, 2])
def test_a_file_for_the_script_that_cannot_be_written_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("DISTCONV_CONTINUE", str(folder / "none" / "continue"))
    assert TimeToStop(dc.ProcessGrid(height=-1), limit=0.0)()
    found = [str(w.message) for w in recwarn if "will not be queued again" in str(w.message)]
    assert len(found) == (WORLD.rank == 0)


@every_size
def test_time_limits_of_a_rank_and_of_slurm_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = dc.ProcessGrid(height=-1)
    assert not TimeToStop(grid)()
    assert not TimeToStop(grid, limit=1e6)()
    assert TimeToStop(grid, limit=1e6 if grid.rank else 0.0)()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 200))
    assert TimeToStop(grid)() and not TimeToStop(grid, margin=20)()
    assert not TimeToStop(grid, limit=1e6)()


@every_size
def test_only_one_call_in_so_many_asks_and_other_handlers_are_called() -> None:
    grid, heard = dc.ProcessGrid(height=-1), []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    stop = TimeToStop(grid, every=3)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [stop() for _ in range(4)] == [False, False, True, True]
    assert heard == [signal.SIGUSR1]
    with pytest.raises(ValueError, match="every=0; expected a number of calls from 1"):
        TimeToStop(grid, every=0)


@every_size
def test_early_stopping_decides_alike_where_ranks_have_other_losses() -> None:
    grid = dc.ProcessGrid(sample=-1)
    early, ended = EarlyStopping(grid, patience=2, least=0.1), []
    for loss in (4.0, 3.0, 2.9, 2.6, float("nan"), 2.5):
        ended.append(early(loss + grid.rank - (grid.size - 1) / 2))
        if loss == 2.6:
            state = early.state_dict()
            early = EarlyStopping(grid, patience=2, least=0.1)
            early.load_state_dict(state)
    assert ended == [False] * 5 + [True]
    assert early.best == pytest.approx(2.6) and not early.improved
    for options in ({"patience": 0}, {"patience": 1, "least": 1.0}):
        with pytest.raises(ValueError, match="expected a number of calls from 1"):
            EarlyStopping(grid, **options)
