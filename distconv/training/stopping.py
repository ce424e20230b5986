"""Ending a run after the same step on all ranks: before a time limit, on a signal, or early."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from distconv.grid.process_grid import ProcessGrid
from distconv.transport.launch import CONTINUE

_END = "SLURM_JOB_END_TIME"
"""The environment variable with the time at which Slurm ends the job, in seconds since 1970."""


class TimeToStop:
    """Decide whether the job should save its state and end, identically on all ranks after a step.

    A signal reaches ranks at different moments, and perhaps one rank alone. When one rank has
    received a signal, or is short of time, the next call returns True on every rank.

    Under a script of `python -m distconv launch --requeue`, the job is queued again after a call
    has returned True.

    Parameters
    ----------
    grid: the process grid.
    limit: the seconds from now after which to stop; None to stop before the end of a Slurm job.
    margin: the seconds to keep for the checkpoint, before the end that Slurm states.
    signals: the numbers of the signals that ask to stop. Handlers that were installed before are
        called as well. In a thread other than the main one no signal is handled.
    every: exchange a message only in each call whose number is a multiple of `every`. Other calls
        return False until the ranks have decided to stop.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> stop = dc.training.TimeToStop(grid, limit=3600)
    >>> stop()
    False
    >>> import os, signal
    >>> if grid.rank == 1:
    ...     os.kill(os.getpid(), signal.SIGUSR1)
    >>> stop()
    True
    """

    def __init__(
        self,
        grid: ProcessGrid,
        *,
        limit: float | None = None,
        margin: float = 300.0,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        every: int = 1,
    ) -> None:
        if every < 1:
            raise ValueError(f"TimeToStop: every={every}; expected a number of calls from 1")
        self._grid, self._every, self._calls = grid, every, 0
        self._asked = self._stopped = False
        end = float(os.environ.get(_END, inf)) - margin
        left = end - time.time() if limit is None else limit
        self._end = time.monotonic() + left
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._ask) for n in signals}

    def __call__(self) -> bool:
        """Return whether to stop, the same on all ranks. Collective."""
        if self._stopped:
            return True
        self._calls += 1
        if self._calls % self._every:
            return False
        own = self._asked or time.monotonic() > self._end
        self._stopped = self._grid.mean(float(own)) > 0
        if self._stopped and self._grid.rank == 0:
            _mark_to_continue()
        return self._stopped

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


def _mark_to_continue() -> None:
    """Create the file that the environment variable DISTCONV_CONTINUE names, if it is set.

    The script of a job looks for the file to queue the job again. If the file cannot be written,
    only warn, so that the program still saves its state.
    """
    file = os.environ.get(CONTINUE)
    if file:
        try:
            Path(file).touch()
        except OSError as error:
            warnings.warn(
                f"TimeToStop: {file} cannot be written ({error.strerror}), so this job will not "
                "be queued again; submit it once more after its end",
                stacklevel=3,
            )


class EarlyStopping:
    """Decide, identically on all ranks, whether a value such as a validation loss no longer falls.

    Parameters
    ----------
    grid: the process grid.
    patience: the calls without an improvement after which to stop.
    least: the fraction of the best value by which a value must be lower to be an improvement.

    Attributes
    ----------
    best: the lowest value.
    improved: whether the last call's value was an improvement.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> early = dc.training.EarlyStopping(grid, patience=2)
    >>> [early(loss) for loss in (3.0, 2.0, 2.5)]
    [False, False, False]
    >>> resumed = dc.training.EarlyStopping(grid, patience=2)
    >>> resumed.load_state_dict(early.state_dict())  # from a checkpoint
    >>> resumed(2.1)  # the second call without a better loss
    True
    """

    def __init__(self, grid: ProcessGrid, *, patience: int, least: float = 0.0) -> None:
        if patience < 1 or not 0 <= least < 1:
            raise ValueError(
                f"EarlyStopping: patience={patience}, least={least}; expected a number of calls "
                "from 1, and a fraction from 0 below 1"
            )
        self._grid, self._patience, self._least = grid, patience, least
        self.best, self.improved, self._waited = inf, False, 0

    def __call__(self, value: Any, weight: float = 1.0) -> bool:
        """Return whether to stop. Collective.

        The value that decides is the mean of all ranks' values, weighted by `weight`, such as a
        rank's number of samples; see `ProcessGrid.mean`. NaN is no improvement.
        """
        mean = self._grid.mean(value, weight)
        self.improved = mean < self.best - self._least * abs(self.best) or (
            self.best == inf and mean < inf
        )
        self.best = mean if self.improved else self.best
        self._waited = 0 if self.improved else self._waited + 1
        return self._waited >= self._patience

    def state_dict(self) -> dict[str, float]:
        """Return the best value and the number of calls since then, for a checkpoint."""
        return {"best": self.best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the state of a checkpoint."""
        self.best, self._waited = float(state["best"]), int(state["waited"])
