"""Logs of a run for other programs: tables of epochs, JSON, and events for TensorBoard."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distconv.data.durable import write_atomically


def write_table(path: Path, history: Sequence[dict[str, Any]]) -> None:
    """Write a line for each epoch: its number, the steps so far, the mean loss, and all numbers.

    The file is written anew from the history, so that it is whole at any moment, and a resumed run
    has each epoch once.
    """
    steps = 0
    text = io.StringIO()
    table = None
    for epoch, record in enumerate(history, start=1):
        losses = record["step_losses"]
        steps += len(losses)
        row = {"epoch": epoch, "steps": steps, "training_loss": sum(losses) / len(losses)}
        row |= {f"validation_{n}" if n == "loss" else n: v for n, v in record.items()}
        del row["step_losses"]
        if table is None:
            table = csv.DictWriter(text, list(row), lineterminator="\n", extrasaction="ignore")
            table.writeheader()
        table.writerow(row)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def write_json(path: Path, facts: Any) -> None:
    """Write facts as JSON into a file that is whole at any moment."""
    text = json.dumps(facts, indent=1)
    write_atomically(path, lambda file: file.write(text.encode()))


class TensorBoard:
    """Writes losses and scores as events for TensorBoard. One rank makes it.

    Args:
        folder: the folder of the events.
        history: the epochs before a resumed run; later ones in the folder are hidden.

    Raises:
        ValueError: where tensorboard is not installed.
    """

    def __init__(self, folder: Path, history: Sequence[dict[str, Any]]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard needs the package tensorboard ({error}); pip install tensorboard, "
                "or leave the option out: log.csv has the same numbers"
            ) from error
        self._step = sum(len(record["step_losses"]) for record in history)
        self._writer = SummaryWriter(str(folder), purge_step=self._step + 1)

    def add(self, record: dict[str, Any]) -> None:
        """Log one epoch: the loss of each step, and each of its numbers."""
        for loss in record["step_losses"]:
            self._step += 1
            self._writer.add_scalar("training/loss", loss, self._step)
        for name, value in record.items():
            if name != "step_losses":
                self._writer.add_scalar(f"validation/{name}", value, self._step)
        self._writer.flush()
