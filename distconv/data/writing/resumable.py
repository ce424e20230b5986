"""Files that are written in steps, so that an interrupted run continues after its last step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from distconv.data.durable import remove, sync_folder, write_atomically, writing_to
from distconv.data.errors import DataError, on_rank_zero
from distconv.grid.interface import Grid


class StepwiseFile:
    """A file that all ranks write in steps, as a `with` block. Collective.

    The unfinished file has the final name with the suffix `.partial`. A file of notes beside it
    says which steps are finished, and for which task. At the end of the block the file takes its
    final name. If a step raises DataError, the message says where the finished steps are kept;
    without any, nothing is kept.

    Parameters
    ----------
    path: the final name.
    task: facts about the run by name; another run may continue if its facts are equal.
    create: makes the unfinished file; returns values for `state`. Called on rank 0.
    finish: gives the complete file its final name. Called on rank 0.
    restart: whether to discard the steps of an earlier run.

    Attributes
    ----------
    partial: the unfinished file.
    state: the values from `create`, "finished": the number of finished steps, and what `keep`
        added; equal on all ranks.

    Raises DataError on every rank if an earlier run with another task is unfinished.
    """

    def __init__(
        self,
        grid: Grid,
        path: Path,
        task: Mapping[str, str],
        create: Callable[[Path], Mapping[str, Any]],
        finish: Callable[[Path], object],
        restart: bool,
    ) -> None:
        self._grid, self._path, self._finish = grid, path, finish
        self.partial = path.with_name(f"{path.name}.partial")
        self._notes = path.with_name(f"{path.name}.partial.json")
        self.state: dict[str, Any] = on_rank_zero(
            grid, writing_to(path)(lambda: self._begun(dict(task), create, restart))
        )
        self._kept = bool(self.state.pop("continued"))

    def _begun(
        self, task: dict[str, str], create: Callable[[Path], Mapping[str, Any]], restart: bool
    ) -> dict[str, Any]:
        if restart:
            self._remove()
        if self._notes.exists() and self.partial.exists():
            state: dict[str, Any] = json.loads(self._notes.read_text())
            other = [k for k in {**task, **state["task"]} if state["task"].get(k) != task.get(k)]
            if other:
                raise DataError(
                    f"{self.partial} belongs to another run, with other {', '.join(other)}; finish "
                    "that one, or discard its results by restart=True (--restart)"
                )
            return state | {"continued": True}
        if self.partial.exists():
            raise FileExistsError(
                f"{self.partial} exists without {self._notes.name}, which lists its finished "
                "steps; remove it, or discard it by restart=True (--restart)"
            )
        try:
            state = {"task": task, **create(self.partial), "finished": 0}
            self._write(state)
        except BaseException:
            with suppress(OSError):
                self._remove()
            raise
        return state | {"continued": False}

    def keep(self, **values: Any) -> None:
        """Note that `finished` steps, and other values, are on the disk. Collective."""
        self.state.update(values)
        self._kept = True
        on_rank_zero(self._grid, writing_to(self._path)(lambda: self._write(self.state)))

    def _write(self, state: Mapping[str, Any]) -> None:
        write_atomically(self._notes, lambda file: file.write(json.dumps(state).encode()))
        sync_folder(self._path.parent)

    def _remove(self) -> None:
        remove(self.partial)
        self._notes.unlink(missing_ok=True)

    def _complete(self) -> None:
        self._finish(self.partial)
        self._notes.unlink()

    def __enter__(self) -> StepwiseFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                on_rank_zero(self._grid, writing_to(self._path)(self._complete))
            except DataError as failure:
                error = failure
        if not isinstance(error, DataError):
            return  # one rank alone may be here, and an interrupted run may continue
        if not self._kept:
            on_rank_zero(self._grid, writing_to(self._path)(self._remove))
            raise error
        raise DataError(
            f"{error}. {self.partial} keeps {self.state['finished']} finished steps: the same call "
            "continues there, and restart=True (--restart) discards them"
        ) from error
