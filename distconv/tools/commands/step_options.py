"""The options by which commands describe a training step, and the machine it is predicted on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from distconv.planning.machine import Machine
from distconv.planning.recorded_step import LOSSES, OPTIMIZERS
from distconv.tools.arguments import BadArguments
from distconv.tools.commands.module_options import add_dtype_option, add_module_options
from distconv.transport.world import world_if_rank


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the module, its inputs, what is minimised and how, and the machine."""
    add_module_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add(
        "--machine",
        type=Path,
        default=Path("machine.json"),
        metavar="FILE",
        help="what `calibrate` has measured, or somebody described (default: %(default)s)",
    )
    add("--loss", choices=LOSSES, default="mse", help="what is minimised (default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="by what (default: %(default)s)")


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
