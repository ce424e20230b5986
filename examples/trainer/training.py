"""Training, validation and saving, epoch by epoch: the run that all examples share."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distconv as dc
from distconv.data import DataError, Loader, on_rank_zero, together
from distconv.grid.ranks import world
from distconv.transport.interface import ObjectCommunicator

from .apart import train_apart
from .arguments import command_line, errors_in_one_line
from .building import (
    Diverged,
    add_arguments,
    build_model,
    build_optimizer,
    check_finite,
    make_grid,
)
from .checkpoint import DECISIVE, check_checkpoint, check_finite_state, checkpoint_size
from .compare import compare_serial
from .example import Example, check_batch_size
from .launch import found_mpiexec
from .logs import TensorBoard, write_json, write_table
from .methods import Steps, check_method
from .output import KEPT, make_room, prepare_output, restarted_from
from .progress import Progress


def run(
    example: Example[Any, Any],
    arguments: Sequence[str] | None = None,
    comm: ObjectCommunicator | None = None,
) -> None:
    """Train on the ranks of `comm`; errors are one line on rank 0, with exit status 2.

    Args:
        arguments: the command line; the program's own when not given.
        comm: the ranks; all of the job when not given.
    """
    if comm is None:
        comm = world().for_program()

    parser, add = command_line(f"{example.name}.train", example.description, comm, example.defaults)
    add_arguments(add, example)
    with errors_in_one_line(comm, (DataError, Diverged)):
        args = parser.parse_args(arguments)
        args.words = list(sys.argv[1:] if arguments is None else arguments)
        try:
            check_method(args)
        except ValueError as error:
            raise DataError(str(error)) from error
        (train if args.method == "sync" else train_apart)(example, args, comm)


def train(example: Example[Any, Any], args: argparse.Namespace, comm: ObjectCommunicator) -> None:
    """Train, validate and save epoch by epoch, then draw and write the results. Collective."""
    grid = make_grid(args, comm)
    training, validation = example.open(args, grid)
    network = build_model(example, args)

    def check() -> None:
        example.check(args, network, training, validation)
        check_batch_size(args.batch_size, training, args.data)

    together(grid, check)
    args.resume = on_rank_zero(grid, lambda: restarted_from(args))
    on_rank_zero(grid, lambda: prepare_output(args, args.output))

    model = dc.parallelize(network, grid, wire=args.wire, error_feedback=args.wire is not None)
    optimizer = build_optimizer(args, model)
    settings = {name: getattr(args, name) for name in (*example.decisive, *DECISIVE)}
    loader = Loader(training, args.batch_size, shuffle=True, drop_last=True, seed=args.seed)
    ordered = Loader(validation, args.batch_size)
    steps = Steps(args, model, optimizer, len(loader))
    history = resume(example, args, model, optimizer, steps, loader, settings)
    on_rank_zero(
        grid,
        lambda: make_room(args, checkpoint_size({model, steps.evaluated}, optimizer), len(history)),
    )
    board = None
    if args.tensorboard:
        folder = args.output / "tensorboard"
        board = together(grid, lambda: None if grid.rank else TensorBoard(folder, history))
    metrics: dict[str, Any] = {"grid": grid.shape, "method": args.method, **settings}
    if args.compare_serial:
        metrics["compare_serial"] = compare_serial(example, args, grid)

    seconds = 0.0
    for epoch in range(len(history), args.epochs):
        if history and example.is_done(args, history[-1]):
            break
        model.train()
        begin = time.perf_counter()
        samples = len(loader) * args.batch_size
        with Progress(f"epoch {epoch + 1}/{args.epochs}", samples, grid.rank == 0) as progress:
            for batch in loader:
                loss = example.loss(model, batch)
                steps.step(loss)
                progress.step(loss.item(), len(batch[0]))
                check_finite(args, "loss", loss.item(), len(history), progress.steps)
        record = progress.record()
        seconds += progress.seconds

        score = example.evaluate(steps.evaluated, ordered)
        check_finite(args, "validation loss", score.loss, len(history), progress.steps)
        record["seconds"] = time.perf_counter() - begin
        history.append(record | asdict(score))
        together(grid, lambda: check_finite_state(model, optimizer))
        dc.save_checkpoint(
            args.output,
            model,
            optimizer,
            steps.scheduler,
            loader=loader,
            step=len(history),
            keep=KEPT,
            extra={"settings": settings, "history": history, **steps.state_dict()},
        )
        on_rank_zero(grid, lambda: write_table(args.output / "log.csv", history))
        if board is not None:
            board.add(history[-1])
        if grid.rank == 0:
            print(f"{progress}; validation: {score}", flush=True)

    metrics["bytes_read_by_rank"] = comm.allgather(training.bytes_read + validation.bytes_read)
    metrics["seconds_waited_by_rank"] = comm.allgather(
        loader.traffic.seconds_waited + ordered.traffic.seconds_waited
    )
    waited = max(comm.allgather(loader.traffic.seconds_waited))
    metrics["waiting_share"] = waited / seconds if seconds else 0.0
    metrics["history"] = history
    example.draw(args, steps.evaluated, validation, history)
    on_rank_zero(grid, lambda: write_metrics(args, metrics))
    if grid.rank == 0:
        print(results(example, args, example.is_done(args, history[-1])), flush=True)


def results(example: Example[Any, Any], args: argparse.Namespace, done: bool) -> str:
    """Return a message that names a run's results, and the next command unless it is `done`."""
    files = {**example.pictures, "metrics.json": "settings, and all numbers of every epoch"}
    program = f"{typed(Path(sys.executable))} -m examples.{example.name}.train"
    mpiexec = typed(Path(found_mpiexec() or "mpiexec"))
    axis = next(axis for axis in example.axes if axis in ("depth", "height"))
    more = {"--grid": f"{axis}=2", "--epochs": args.epochs + 1, "--resume": args.output}
    same = shlex.join([*without(args.words, more), *map(str, chain(*more.items()))])
    return "\n".join(
        (
            "Look at",
            *(f"  {args.output / name}: {what}" for name, what in files.items()),
            "Next",
            *(
                []
                if done
                else [f"  one more epoch, on two ranks:\n    {mpiexec} -n 2 {program} {same}"]
            ),
            "  numbers of a grid beside those of one rank: add --compare-serial 3 to a new run",
            f"  what the example does: docs/examples, and {program} --help",
            "  a network of your own: docs/tutorials/first_network.md; the site: make docs",
        )
    )


def typed(program: Path) -> str:
    """Return the path of a program as one types it in the current folder."""
    here = Path.cwd()
    return str(program.relative_to(here) if program.is_relative_to(here) else program)


def without(words: Iterable[str], options: Container[str]) -> Iterator[str]:
    """Yield the words of a command line without some options, each of which has one value."""
    rest = iter(words)
    for word in rest:
        name, attached, _ = word.partition("=")
        if name not in options:
            yield word
        elif not attached:
            next(rest, None)


def resume(
    example: Example[Any, Any],
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Steps,
    loader: Loader,
    settings: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the history of the run that this one resumes, after loading its state. Collective."""
    if not args.resume:
        return []
    found = dc.load_checkpoint(
        args.resume,
        model,
        optimizer,
        steps.scheduler,
        loader=loader,
        check=partial(check_checkpoint, settings=settings, scores=example.scores()),
    )
    assert found is not None
    together(loader.grid, lambda: check_finite_state(model, optimizer))
    steps.load_state_dict(found.extra)
    history: list[dict[str, Any]] = found.extra["history"]
    return history


def write_metrics(args: argparse.Namespace, metrics: dict[str, Any]) -> None:
    """Write metrics.json into the output folder, and print the cost of reading."""
    least, most = min(metrics["bytes_read_by_rank"]), max(metrics["bytes_read_by_rank"])
    waited = max(metrics["seconds_waited_by_rank"])
    print(
        f"read by each rank: {least / 1e6:.1f} to {most / 1e6:.1f} MB; waited for it: at most "
        f"{waited:.1f} s, {metrics['waiting_share']:.1%} of the time of training steps"
    )
    write_json(args.output / "metrics.json", metrics)
