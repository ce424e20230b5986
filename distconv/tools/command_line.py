"""Command lines: parsing on all ranks, types of arguments, options and output of commands."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distconv.data.durable import write_atomically
from distconv.geometry.layout import Layout
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world, world_if_rank
from distconv.model.sample_shards import SHARDS
from distconv.planning.machine import Machine
from distconv.planning.recorded_step import LOSSES, OPTIMIZERS
from distconv.tools.reports.figures import has_matplotlib


class BadArguments(Exception):
    """A command line that asks for something impossible; raised on every rank."""


@contextmanager
def complaining(*kinds: type[Exception]) -> Iterator[None]:
    """Raise `BadArguments` with the message of any exception of `kinds` in a `with` block."""
    try:
        yield
    except kinds as error:
        raise BadArguments(str(error)) from None


class RankParser(argparse.ArgumentParser):
    """An argument parser for all ranks of `comm`, or of the job: all succeed, or all end.

    A command line that differs between ranks is an error, and so is an error of one rank alone,
    such as a file that only others can read. Rank 0 prints the first failing rank's message.
    Parsing is collective.
    """

    def __init__(self, comm: Any = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._comm = world_if_rank() if comm is None else comm
        self._parsing = False

    def add_subparsers(self, **keywords: Any) -> Any:
        """Add subcommands, as `argparse` does, whose parsers are plain and do not communicate."""
        return super().add_subparsers(**({"parser_class": argparse.ArgumentParser} | keywords))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return parsed and unknown arguments; `parse_args` calls this method. Collective."""
        if self._comm is None:
            return super().parse_known_args(args, namespace)
        given = sys.argv[1:] if args is None else list(args)
        everyone = self._comm.allgather(given)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                self.error(
                    f"the arguments of rank {rank} are {shlex.join(map(str, theirs))!r} and those "
                    f"of rank 0 {shlex.join(map(str, everyone[0]))!r}; start all ranks with the "
                    "same arguments"
                )
        said = StringIO(), StringIO()
        ended, self._parsing = None, True
        try:
            with redirect_stdout(said[0]), redirect_stderr(said[1]):
                parsed = super().parse_known_args(given, namespace)
        except SystemExit as end:
            ended = end.code, *(text.getvalue() for text in said)
        finally:
            self._parsing = False
        for rank, theirs in enumerate(self._comm.allgather(ended)):
            if theirs is not None:
                status, out, err = theirs
                self._print_message(out, sys.stdout)
                self._print_message(f"{err}(on rank {rank})\n" if rank else err, sys.stderr)
                sys.exit(status)
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._comm is None or self._parsing or self._comm.rank == 0:
            super()._print_message(message, file)


def grid_axes(text: str, axes: Sequence[str] = AXES) -> dict[str, int]:
    """Parse `sample=2,height=-1` into the keyword arguments of a `ProcessGrid`."""
    extents: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, ranks = part.strip().partition("=")
        if axis not in axes or axis in extents or not equals:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not an axis with a number of ranks; write AXIS=RANKS once for each "
                f"axis, separated by commas, where AXIS is one of {', '.join(axes)}"
            )
        try:
            extents[axis] = int(ranks)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{part!r}: {ranks!r} is not a number of ranks; write a whole number, such as "
                f"{axis}=2"
            ) from None
    return extents


def byte_count(text: str) -> int:
    """Parse `16GiB`, `512MiB` or a number of bytes."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    number, unit = next(
        ((text[: -len(u)], n) for u, n in units.items() if text.endswith(u)), (text, 1)
    )
    try:
        count = float(number) * unit
    except ValueError:
        count = 0.0
    if not 1 <= count < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an amount of memory; write 16GiB, 512MiB or a number of bytes"
        )
    return int(count)


def shape(text: str) -> tuple[int, ...]:
    """Parse `1,18,256,256` into the shape of a tensor."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; write the sizes separated by commas, such as 1,18,256,256"
        )
    return tuple(map(int, sizes))


def layout(text: str) -> Layout:
    """Parse `height=height+width,sample` into a `Layout`; the text `whole` partitions nothing."""
    dimensions = {}
    for part in text.split(",") if text != "whole" else ():
        name, equals, axes = part.strip().partition("=")
        dimensions[name] = tuple(axes.split("+")) if equals else name
    try:
        return Layout(**dimensions)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{error}. Write DIMENSION=AXIS+AXIS,..., DIMENSION if the axis has the same name, or "
            "'whole'"
        ) from None


def pattern_and_layout(text: str) -> tuple[str, Layout]:
    """Parse `block5.*:channel=height,sample` into a glob pattern of module names and a `Layout`."""
    pattern, colon, cuts = text.rpartition(":")
    if not colon:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a pattern with a layout; write PATTERN:DIMENSION=AXIS+AXIS,..., "
            "such as 'block5.*:sample,channel=height'"
        )
    return pattern, layout(cuts)


def report_file(text: str) -> Path:
    """Return the path of a report, which is written at the end; its folder must exist now."""
    if not has_matplotlib():
        raise argparse.ArgumentTypeError(
            "reports need matplotlib, which is not installed; install it by pip install "
            "'distconv[reports]', or leave --html out"
        )
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; name a file in an existing folder"
        )
    return path


# Making the module that a command line names: `package.module:factory`, `./file.py:factory`.


def module_from(factory: str, seed: int) -> nn.Module:
    """Return the module made by the function that `factory` names, with torch's seed set.

    Raises BadArguments if there is no such function, or if it does not return a module.
    """
    path, colon, name = factory.rpartition(":")
    if not colon or not name:
        raise BadArguments(
            f"{factory!r} is not the name of a factory; write package.module:factory or "
            "./file.py:factory"
        )
    make: Any = _from_file(Path(path)) if path.endswith(".py") else _imported(path)
    for part in name.split("."):
        make = getattr(make, part, None)
    if not callable(make):
        raise BadArguments(
            f"{path} has no function or class {name!r}; name a function or class that creates the "
            "module"
        )
    torch.manual_seed(seed)
    try:
        module = make()
    except TypeError as error:
        raise BadArguments(
            f"{factory} raised TypeError: {error}; expected a function that takes no arguments"
        ) from error
    if not isinstance(module, nn.Module):
        raise BadArguments(f"{factory} returns a {type(module).__name__}, not a torch.nn.Module")
    return module


def _imported(path: str) -> Any:
    """Import a Python module by name; raise `BadArguments` if there is none."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise BadArguments(
            f"there is no module {error.name!r}; start from the folder of the module, install the "
            "module, or write its file, ./file.py:factory"
        ) from None


def _from_file(path: Path) -> Any:
    """Import a file as a Python module, with its folder on `sys.path`, as for a script."""
    if not path.is_file():
        raise BadArguments(f"there is no file {str(path)!r}; give its path from the current folder")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_everywhere(factory: str, seed: int) -> nn.Module:
    """Return `module_from(factory, seed)`; raise on all ranks if one rank fails. Collective."""
    module, problem = None, None
    try:
        module = module_from(factory, seed)
    except BadArguments as error:
        problem = error
    for found in world().allgather(problem):
        if found is not None:
            raise found
    assert module is not None
    return module


# The options that commands share, as keyword arguments of the functions that they call.


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
    """Return a grid of all ranks; raise `BadArguments` if their number does not fit.

    `command` is the name of the command for the message.
    """
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
    """Return torch's type with this name, such as "float32"; None for None."""
    return None if name is None else getattr(torch, name)


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Add `--html`, the file of a report for a browser."""
    text = "write a report for a browser: one page with tables and drawings"
    parser.add_argument("--html", type=report_file, metavar="FILE", help=text)


def write_report(path: Path | None, page: Callable[[], str]) -> None:
    """Write the HTML of `page()` to `path`, if not None, and report it on stderr; for rank 0."""
    if path is not None:
        with complaining(OSError):
            write_atomically(path, lambda file: file.write(page().encode()))
        print(f"wrote {path}", file=sys.stderr, flush=True)


def loaded(path: Path) -> Machine:
    """Return the machine in a file; raise `BadArguments` if the file has none."""
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
    """Save a machine, with the local operators timed in this run, if its file can be written."""
    if machine.roofline is None:
        with suppress(OSError):  # another user's file: operators are timed again next time
            machine.save(path)


# Results of commands as one line of JSON.


def as_json(record: Any, **more: object) -> str:
    """Return the fields of a dataclass, and `more`, as one line of JSON.

    Values without a form in JSON become text; numbers that are not finite become null.
    """
    return json.dumps(_plain(asdict(record) | more), allow_nan=False, default=repr)


def _plain(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinite numbers in dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# `StatusLine`: the progress of a command, on one line of the terminal.


_SOON, _SELDOM = 2.0, 10.0
"""Seconds until the first line, and between lines, if stderr is not a terminal."""


class StatusLine:
    """A command's progress on stderr of the first rank, in a `with` block: one line that changes.

    If stderr is not a terminal, the text is printed every 10 seconds with the seconds passed, so
    that a log shows that a long computation is running.
    """

    def __init__(self, first: bool = True, begin: str = ""):
        self._first, self._terminal = first, first and sys.stderr.isatty()
        self._begun, self._text, self._ended = time.monotonic(), "", threading.Event()
        self(begin)

    def __call__(self, text: str) -> None:
        """Replace the text of the line; "" clears the line."""
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
