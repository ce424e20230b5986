"""The options by which commands describe a training step, and the machine it is predicted on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from distconv.planning.losses import LOSSES, OPTIMIZERS
from distconv.planning.machine import Machine
from distconv.tools.arguments import BadArguments, layout, pattern_and_layout, shape
from distconv.transport.world import world_if_rank

DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the module, its inputs, what is minimised and how, and the machine."""
    add = parser.add_argument
    add(
        "factory",
        metavar="MODULE:FACTORY",
        help="what makes the torch module when called without arguments: a function or a class, in "
        "package.module or ./file.py",
    )
    add(
        "--shape",
        type=shape,
        action="append",
        required=True,
        metavar="N,C,...",
        help="global shape of the input; once for each input",
    )
    add(
        "--machine",
        type=Path,
        default=Path("machine.json"),
        metavar="FILE",
        help="what `calibrate` has measured, or somebody described (default: %(default)s)",
    )
    add("--dtype", choices=DTYPES, help="of the input (default: as the parameters)")
    add(
        "--layout",
        type=layout,
        metavar="DIMENSION=AXIS+AXIS,...",
        help="how the inputs are cut; by default every dimension over the axis of its name",
    )
    add(
        "--layouts",
        type=pattern_and_layout,
        action="append",
        default=[],
        metavar="PATTERN:DIMENSION=AXIS+AXIS,...",
        help="how modules whose names match take their inputs; once for each pattern",
    )
    add("--loss", choices=LOSSES, default="mse", help="what is minimised (default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="by what (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the parameters (%(default)s)")
    add("--json", action="store_true", help="one line of JSON instead of a table")


def step_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `predict` and `plan` that the command line has given."""
    return {
        "dtype": None if arguments.dtype is None else getattr(torch, arguments.dtype),
        "layout": arguments.layout,
        "layouts": dict(arguments.layouts),
        "loss": arguments.loss,
        "optimizer": arguments.optimizer,
    }


def loaded(path: Path) -> Machine:
    """Return the machine of a file; complain where it holds none."""
    try:
        return Machine.load(path)
    except ValueError as error:
        raise BadArguments(str(error)) from None


def check_alone(command: str) -> None:
    """Complain where several ranks have been started: one process predicts."""
    comm = world_if_rank()
    if comm is not None and comm.size > 1:
        raise BadArguments(f"{command} takes one process; start it without mpiexec or srun")


def keep_times(machine: Machine, path: Path) -> None:
    """Write down the local operators that have been timed, where the file can be written."""
    if machine.roofline is None:
        try:
            machine.save(path)
        except OSError:
            # Somebody else's file: the times are taken again next time.
            pass
