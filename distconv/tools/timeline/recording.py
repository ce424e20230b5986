"""A timeline of all ranks, recorded while a program runs and written to one file."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from distconv.comm.ledger import trace_movements
from distconv.data.durable import write_atomically
from distconv.grid.communicators import carried_by
from distconv.grid.process_grid import ProcessGrid
from distconv.tools.timeline.clock import Offset, measure_offsets, on_clock_of_rank_0
from distconv.tools.timeline.events import Event, events_of, named_rows
from distconv.tools.timeline.messages import Kinds, RecordedTransport


@contextmanager
def timeline(path: str | Path, grid: ProcessGrid | None = None) -> Iterator[None]:
    """Record what all ranks do within the context, by torch.profiler, and write it to one file.

    All ranks enter and leave it together. At the end rank 0 writes the file, whole or not at all.
    After an error within it nothing is written. Open it in Perfetto (https://ui.perfetto.dev) or
    chrome://tracing, or let `python -m distconv timeline FILE` add it up.

    Each rank has rows: `compute`, torch's outermost operators, on a GPU `device` as well, and
    `wait`; and what is under way: halos, redistributions, reductions and messages, from their start
    to the end of the wait for them. Times of all ranks are on the clock of rank 0, from round trips
    of messages at the beginning and at the end.

    Parameters
    ----------
    path: of the file; with the ending .gz it is compressed.
    grid: the ranks that take part; all of the job when not given.

    Raises
    ------
    OSError
        On every rank, where rank 0 cannot write the file.
    RuntimeError
        On every rank, where torch's profiler is recording on one of them already. Within the
        context, where the program starts it.
    """
    path = Path(path)
    grid = _on_hosts(grid)
    missing = None if grid.rank or path.absolute().parent.is_dir() else str(path.absolute().parent)
    everyone = grid.all_gather_object((missing, torch.autograd._profiler_enabled()))
    if any(profiled for _, profiled in everyone):
        raise RuntimeError(f"timeline: torch's profiler is recording already. {_ONE_AT_A_TIME}")
    missing = everyone[0][0]
    if missing:
        raise FileNotFoundError(f"timeline: there is no folder {missing}; make it before")
    before = measure_offsets(grid)[grid.rank]
    kinds = Kinds()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with (
        profile(activities=activities) as recorded,
        _alone(),
        trace_movements(kinds),
        carried_by(lambda carrier: RecordedTransport(carrier, kinds.of)),
    ):
        yield
    after = measure_offsets(grid)[grid.rank]
    _write(path, grid, on_clock_of_rank_0(_exported(recorded, grid.rank), before, after), after)


_ONE_AT_A_TIME = (
    "It makes one recording at a time: let one of the two end before the other begins. "
    "python -m distconv timeline FILE adds up the operators and messages of a timeline"
)


@contextmanager
def _alone() -> Iterator[None]:
    """Raise where the program starts torch's profiler once more, which would end the recording."""
    prepare = profiler._prepare_profiler

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"torch.profiler within dc.timeline(). {_ONE_AT_A_TIME}")

    profiler._prepare_profiler = refuse  # type: ignore[attr-defined]
    try:
        yield
    finally:
        profiler._prepare_profiler = prepare  # type: ignore[attr-defined]


def _on_hosts(grid: ProcessGrid | None) -> ProcessGrid:
    """Return a grid of the same ranks whose messages lie on the host."""
    return ProcessGrid(None if grid is None else grid.ranks, sample=-1, device="cpu")


def _exported(recorded: Any, rank: int) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        return events_of(json.loads(file.read_text()), rank)


def _write(path: Path, grid: ProcessGrid, events: list[Event], offset: Offset) -> None:
    """Gather the events of all ranks on rank 0, which writes them; all ranks call it together."""
    mine = zlib.compress(json.dumps(named_rows(grid.rank, events) + events).encode(), 1)
    lengths = grid.all_gather_object(len(mine))
    errors = grid.all_gather_object(offset.error / 1000)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    others = range(1, grid.size) if grid.rank == 0 else ()
    arriving = [(r, torch.empty(lengths[r], dtype=torch.uint8)) for r in others]
    leaving = [(0, sent)] if grid.rank else []
    grid.transport.exchange(arriving, leaving, grid.transport.next_tag()).wait()
    failure = None
    if grid.rank == 0:
        everyone = [mine, *(message.numpy().tobytes() for _, message in arriving)]
        whole = [event for part in everyone for event in json.loads(zlib.decompress(part))]
        try:
            _write_trace(path, whole, errors)
        except OSError as error:
            failure = str(error)
    failure = grid.all_gather_object(failure)[0]
    if failure:
        raise OSError(f"timeline: {failure}")


def _write_trace(path: Path, events: list[Event], errors: list[float]) -> None:
    begin = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    about = {
        "ranks": len(errors),
        "clock_error_us": [round(error, 1) for error in errors],
        "recorded": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": torch.__version__,
    }
    document = {"traceEvents": events, "displayTimeUnit": "ms", "distconv": about}
    content = json.dumps(document).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    write_atomically(path, lambda file: file.write(content))
