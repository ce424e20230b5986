"""The course of one epoch: a progress bar on rank 0, and its record."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm


class Progress:
    """Counts the steps of one epoch; a context manager, entered by every rank.

    Args:
        title: the text before the bar.
        samples: the samples of all mini-batches of the epoch.
        shown: whether this rank draws the bar.
    """

    def __init__(self, title: str, samples: int, shown: bool) -> None:
        self._bar = tqdm(total=samples, desc=title, unit="sample", disable=not shown)
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

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end = time.perf_counter()
        self._bar.close()
