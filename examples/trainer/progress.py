"""The course of one epoch: a progress bar on rank 0 of a terminal, and its record."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tqdm import tqdm

ON_TERMINAL = "EXAMPLES_ON_TERMINAL"
"""The environment variable that a demo on a terminal sets for its ranks, whose output is a pipe."""


def on_terminal() -> bool:
    """Return whether lines of standard error that are written over are seen by somebody."""
    return sys.stderr.isatty() or ON_TERMINAL in os.environ


class Progress:
    """Counts the steps of one epoch; a context manager, entered by every rank.

    Its text is a line about the epoch for after it.

    Args:
        title: the text before the bar.
        samples: the samples of all mini-batches of the epoch.
        shown: whether this rank draws a bar, if it is on a terminal.
    """

    def __init__(self, title: str, samples: int, shown: bool) -> None:
        self._title = title
        hidden = not (shown and on_terminal())
        self._bar = tqdm(total=samples, desc=title, unit="sample", disable=hidden, leave=False)
        self._begin = time.perf_counter()
        self._end = 0.0
        self._samples = 0
        self._losses: list[float] = []

    def step(self, loss: float, samples: int) -> None:
        """Record a training step: its loss, and the samples of its mini-batch over all ranks."""
        self._losses.append(loss)
        self._samples += samples
        self._bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
        self._bar.update(samples)

    @property
    def steps(self) -> int:
        """Return the steps recorded so far."""
        return len(self._losses)

    @property
    def seconds(self) -> float:
        """Return the time from the beginning to the end of the epoch, or until now."""
        return (self._end or time.perf_counter()) - self._begin

    def record(self) -> dict[str, Any]:
        """Return the loss of every step, and samples per second."""
        return {"step_losses": self._losses, "samples_per_second": self._samples / self.seconds}

    def __str__(self) -> str:
        mean = sum(self._losses) / max(1, len(self._losses))
        speed = self._samples / self.seconds
        return f"{self._title}: loss {mean:.4g}, {speed:.0f} samples/s"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end = time.perf_counter()
        self._bar.close()
