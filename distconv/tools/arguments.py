"""Parsing command lines on all ranks, with types for grids, shapes, layouts and files."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distconv.geometry.layout import Layout
from distconv.geometry.topology import AXES
from distconv.grid.ranks import world, world_if_rank
from distconv.tools.reports.figures import has_matplotlib


class BadArguments(Exception):
    """A command line that asks for something impossible; raised on every rank."""


@contextmanager
def complaining(*kinds: type[Exception]) -> Iterator[None]:
    """Raise `BadArguments` in place of exceptions of these kinds, in a `with` block."""
    try:
        yield
    except kinds as error:
        raise BadArguments(str(error)) from None


class RankParser(argparse.ArgumentParser):
    """An argument parser that all ranks of `comm`, or the job, call: all succeed, or all end.

    A command line that differs between ranks is an error, and so is an error of one rank alone,
    such as a file that only others can read. Rank 0 prints the first failing rank's message.
    """

    def __init__(self, comm: Any = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._comm = world_if_rank() if comm is None else comm
        self._parsing = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments, as `argparse` does. All ranks call it."""
        return self._together(super().parse_args, args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return parsed arguments and the unknown ones, as `argparse` does. All ranks call it."""
        return self._together(super().parse_known_args, args, namespace)

    def add_subparsers(self, **keywords: Any) -> Any:
        """Add subcommands, as `argparse` does, with plain parsers that this one calls."""
        return super().add_subparsers(**({"parser_class": argparse.ArgumentParser} | keywords))

    def _together(self, parse: Callable[[Any, Any], Any], args: Any, namespace: Any) -> Any:
        if self._comm is None or self._parsing:
            return parse(args, namespace)
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
                parsed = parse(given, namespace)
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
    """Parse `height=height+width,sample` into a `Layout`; `whole` is a layout without cuts."""
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
    """Return the path of a report, which is written last; its folder must exist now."""
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
    """Call the factory of this name, with torch's seed set, and return the module that it makes."""
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
    """Return the result of `module_from` on every rank; all raise if one rank cannot make it."""
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
