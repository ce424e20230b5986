"""The checkpoints of servers: each rank of a server saves its tensors in a folder of its own."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from distconv.data.checkpoint import (
    checkpoints_in,
    load_checkpoint,
    newest_whole,
    save_checkpoint,
    step_of,
)
from distconv.training.server import Rule, Server
from distconv.training.team import SERVER_FOLDER


@dataclass(eq=False)
class ServerCheckpoints:
    """The checkpoints of one rank of a server: of its tensors, its optimizer, and its counts.

    They lie in `folder`; None to save nothing. The state is saved every `save_every` updates, or if
    `save_every` is None, when workers ask for it.
    """

    part: nn.Module
    rule: Rule
    server: Server
    folder: Path | None
    save_every: int | None
    keep: int
    history: Path | None
    """The file for the history of losses; None to write none."""
    _saved: tuple[int, int] = field(default=(-1, 0), init=False)
    """The numbers of updates and validations in the last checkpoint."""

    def save_if_due(self) -> None:
        """Save the state if `save_every` updates were made since the last checkpoint."""
        if (
            self.save_every
            and self.server.report.updates - max(self._saved[0], 0) >= self.save_every
        ):
            self.save()

    def save(self) -> None:
        """Save the state under the number of updates made, unless it is saved already."""
        if self.folder is not None and self.save_every and self._counts() != self._saved:
            self._save(self.folder, self.server.report.updates)
        self.write_history()

    def save_under(self, number: int) -> None:
        """Save the state under a number that the workers chose.

        Raises ValueError if the server has no folder, or saves every `save_every` updates.
        """
        if self.folder is None or self.save_every:
            raise ValueError(
                f"Worker.save({number}): the server saves "
                + ("nothing" if self.folder is None else f"in every {self.save_every}-th update")
                + "; call serve with a folder and save_every=None"
            )
        self._save(self.folder, number)
        self.write_history()

    def write_history(self) -> None:
        """Write the history of losses to its file, if there are losses."""
        report = self.server.report
        if self.history is not None and (report.history.training or report.history.validation):
            report.history.write(self.history, report.stopped)

    def _save(self, folder: Path, number: int) -> None:
        report = self.server.report
        save_checkpoint(
            folder,
            self.part,
            self.rule.optimizer,
            self.rule.scheduler,
            step=number,
            keep=self.keep,
            extra={
                "updates": report.updates,
                "samples": report.samples,
                "staleness": dict(report.staleness),
                "steps": dict(self.server.steps),
                "history": report.history.state_dict(),
            },
        )
        self._saved = self._counts()

    def _counts(self) -> tuple[int, int]:
        report = self.server.report
        return report.updates, len(report.history.validation)

    def spare_history(self) -> None:
        """Rename the history of a run that this one does not continue, which left no checkpoint."""
        if self.history is not None and self.history.exists() and not self.server.report.updates:
            names = (self.history.with_stem(f"{self.history.stem}-{n}") for n in count(1))
            self.history.rename(next(name for name in names if not name.exists()))

    def check_new(self) -> None:
        """Raise `FileExistsError` if the folder holds checkpoints: another run has written them."""
        for newest in [] if self.folder is None else checkpoints_in(self.folder)[:1]:
            if step_of(newest) > 0:
                raise FileExistsError(
                    f"serve: {newest} is of another run; go on from it by resume=True, choose "
                    "another folder, or remove it"
                )

    def load(self, chosen: Path | None) -> None:
        """Load the checkpoint `chosen`; if it is None, the last one in the folder, if there is one.

        Raises DataError if it cannot be read, or is of another model or optimizer.
        """
        path = chosen or self.folder
        if path is None:
            raise ValueError("serve: resume=True needs the folder in which the state was saved")
        rule, server = self.rule, self.server
        missing_ok = chosen is None
        found = load_checkpoint(
            path, self.part, rule.optimizer, rule.scheduler, missing_ok=missing_ok
        )
        if found is not None:
            server.report.updates = found.extra["updates"]
            server.report.samples = found.extra["samples"]
            server.report.staleness = Counter(found.extra["staleness"])
            server.steps = Counter(found.extra["steps"])
            if "history" in found.extra:  # earlier versions of distconv have saved none
                server.report.history.load_state_dict(found.extra["history"])
            self._saved = self._counts()

    def take(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors, received from another server, into those that this rank holds."""
        with torch.no_grad():
            own = (*self.part.parameters(), *self.part.buffers())
            for tensor, value in zip(own, tensors, strict=True):
                if value is not None:
                    tensor.copy_(value)


def server_state(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the last state that a server saved, joined from all its ranks, as a state_dict.

    Raises FileNotFoundError if there is none.
    """
    state: dict[str, Tensor] = {}
    for place in sorted(filter(Path.is_dir, Path(folder).glob(SERVER_FOLDER.format(rank="*")))):
        _, content = newest_whole(place, True, {})
        if content:
            stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            state |= stored["model"]
    if not state:
        raise FileNotFoundError(
            f"{folder} holds no state of a server; pass the folder that `serve` was given"
        )
    return state
