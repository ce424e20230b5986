"""Options and functions that several commands share: a module, a grid, a step, a report."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distconv.data.durable import write_atomically
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world, world_if_rank
from distconv.model.sample_shards import SHARDS
from distconv.planning.machine import Machine
from distconv.planning.recorded_step import LOSSES, OPTIMIZERS
from distconv.tools.arguments import (
    BadArguments,
    complaining,
    grid_axes,
    layout,
    pattern_and_layout,
    report_file,
    shape,
)

# Results of commands as one line of JSON.


def as_json(record: Any, **more: object) -> str:
    """Return the fields of a dataclass, and `more`, as one line of JSON.

    Values without a form in JSON become text; numbers that are not finite become null.
    """
    return json.dumps(_plain(asdict(record) | more), allow_nan=False, default=repr)


def _plain(value: Any) -> Any:
    """Return a value with dictionaries for dataclasses, and None for NaN and infinite numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# `StatusLine`: the progress of a command, on one line of the terminal.


_SOON, _SELDOM = 2.0, 10.0
"""Seconds until the first line, and between lines, where stderr is no terminal."""


class StatusLine:
    """A command's progress on stderr of the first rank, in a `with` block: one line that changes.

    If stderr is no terminal, the text is printed every 10 seconds with the seconds passed, so that
    in a log a long computation differs from one that hangs.
    """

    def __init__(self, first: bool = True, begin: str = ""):
        self._first, self._terminal = first, first and sys.stderr.isatty()
        self._begun, self._text, self._ended = time.monotonic(), "", threading.Event()
        self(begin)

    def __call__(self, text: str) -> None:
        """Set the text of the line, in place of the last one; "" to clear the line."""
        self._text = text
        if self._terminal:
            print(f"\r\033[K{text[:79]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> StatusLine:
        if self._first and not self._terminal:
            threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self("")

    def _repeat(self) -> None:
        pause = _SOON
        while not self._ended.wait(pause):
            if self._text:
                passed = time.monotonic() - self._begun
                print(f"{self._text} ({passed:.0f} s)", file=sys.stderr, flush=True)
            pause = _SELDOM


DTYPES = ("float32", "float64", "bfloat16", "float16")


class Command(NamedTuple):
    """A subcommand: its purpose for the help, and functions that add its options and run it."""

    purpose: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_module_options(parser: argparse.ArgumentParser) -> None:
    """Add options for the module, the shapes and layouts of its inputs, the seed, and `--json`."""
    add = parser.add_argument
    text = (
        "the function or class that creates the torch module when called without arguments, in "
        "package.module or ./file.py"
    )
    add("factory", metavar="MODULE:FACTORY", help=text)
    text = "the global shape of the input; repeated for several inputs"
    several: Any = {"action": "append", "metavar": "N,C,...", "help": text}
    add("--shape", type=shape, required=True, **several)
    text = "the layout of the inputs (default: every dimension over the axis of the same name)"
    add("--layout", type=layout, metavar="DIMENSION=AXIS+AXIS,...", help=text)
    text = "the layout of the inputs of modules whose names match a pattern; may be repeated"
    several |= {"metavar": "PATTERN:DIMENSION=AXIS+AXIS,...", "help": text}
    add("--layouts", type=pattern_and_layout, default=[], **several)
    add("--seed", type=int, default=0, help="the seed of parameters and inputs (%(default)s)")
    add("--json", action="store_true", help="print one line of JSON instead of a table")


def add_grid_option(parser: argparse.ArgumentParser) -> None:
    """Add `--grid`, which is required."""
    metavar, text = "AXIS=RANKS,...", "ranks along the axes of the grid"
    parser.add_argument("--grid", type=grid_axes, required=True, metavar=metavar, help=text)


def grid_of_all_ranks(extents: dict[str, Any], command: str) -> ProcessGrid:
    """Return a grid of all ranks; raise `BadArguments` if their number does not fit."""
    ranks = prod(extents.values())
    if min(extents.values()) > 0 and ranks != world().size:
        raise BadArguments(
            f"the grid has {ranks} ranks, but {world().size} have been started; start it "
            f"with mpiexec -n {ranks} python -m distconv {command} ..."
        )
    with complaining(ValueError):
        return ProcessGrid(**extents)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Add `--dtype`, the type of the inputs."""
    text = "the type of the inputs (default: the parameters')"
    parser.add_argument("--dtype", choices=DTYPES, help=text)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add options for the module, its inputs, loss and optimizer, and for the machine."""
    add_module_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    text = "a machine: a file by `calibrate`, or a name such as h100 (default: %(default)s)"
    add("--machine", type=Path, default=Path("machine.json"), metavar="FILE", help=text)
    add("--loss", choices=LOSSES, default="mse", help="the loss of each result (%(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="the optimizer (%(default)s)")
    add("--wire", choices=DTYPES[2:], help="the type in which gradients are sent")
    text = "the number of mini-batches in a step, all but the last within no_sync (%(default)s)"
    add("--accumulate", type=int, default=1, metavar="N", help=text)
    add_memory_options(parser)


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add options for what a step keeps in memory: weights and activations."""
    add = parser.add_argument
    add("--autocast", choices=DTYPES[2:], help="the type of autocast around module and loss")
    text = "shard weights over the axes that partition channels"
    add("--shard-parameters", action="store_true", help=text)
    add("--shard", choices=SHARDS, help="shard weights over the samples, as parallelize does")
    text = (
        "recompute the modules of this class, or whose names match this pattern; 'blocks' chooses "
        "the first level of at least three modules; may be repeated"
    )
    add("--checkpoint", action="append", default=[], metavar="CLASS", help=text)
    text = "keep saved activations on the host, as by save_on_cpu"
    add("--offload", action="store_true", help=text)


def memory_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_memory_options` as keyword arguments of `record_step`."""
    names = ("shard_parameters", "shard", "checkpoint", "offload")
    given = {name: getattr(arguments, name) for name in names}
    return given | {"autocast": dtype_named(arguments.autocast)}


def step_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `predict` and `plan`, as keyword arguments, from a command line."""
    return {
        **{name: getattr(arguments, name) for name in _AS_GIVEN},
        **memory_options(arguments),
        "dtype": dtype_named(arguments.dtype),
        "layouts": dict(arguments.layouts),
    }


_AS_GIVEN = ("layout", "loss", "optimizer", "wire", "accumulate")


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return torch's type of this name, such as "float32"; None for None."""
    return None if name is None else getattr(torch, name)


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Add `--html`, the file of a report for a browser."""
    text = "write a report for a browser: one page with tables and drawings"
    parser.add_argument("--html", type=report_file, metavar="FILE", help=text)


def write_report(path: Path | None, page: Callable[[], str]) -> None:
    """Write a report, if the command line named a file, and say so on stderr; for rank 0."""
    if path is not None:
        with complaining(OSError):
            write_atomically(path, lambda file: file.write(page().encode()))
        print(f"wrote {path}", file=sys.stderr, flush=True)


def loaded(path: Path) -> Machine:
    """Return the machine in a file; raise `BadArguments` if it holds none."""
    with complaining(ValueError):
        return Machine.load(path)


def is_first() -> bool:
    """Return whether this is rank 0 of the job, which prints."""
    comm = world_if_rank()
    return comm is None or comm.rank == 0


def check_alone(command: str) -> None:
    """Raise `BadArguments` if several ranks run a command that is for one process."""
    comm = world_if_rank()
    if comm is not None and comm.size > 1:
        raise BadArguments(
            f"{command} runs in one process; start it without mpiexec, srun or torchrun"
        )


def keep_times(machine: Machine, path: Path) -> None:
    """Save a machine with the local operators timed on it, if its file can be written."""
    if machine.roofline is None:
        with suppress(OSError):  # another user's file: the times are taken again next time
            machine.save(path)
