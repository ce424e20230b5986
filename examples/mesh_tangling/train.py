"""Train a mesh-tangling network on samples cut over many ranks.

    mpiexec -n 4 python -m examples.mesh_tangling.train \\
        --data train.h5 --validation validation.h5 --grid sample=2,height=2 --output run

or without MPI, by `torchrun --nproc-per-node 4 -m examples.mesh_tangling.train ...`.
Interrupted at any moment, it continues after the last whole epoch, on the same grid or another:

    mpiexec -n 2 python -m examples.mesh_tangling.train \\
        --data train.h5 --validation validation.h5 --grid height=2 --output run \\
        --resume run
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import distconv as dc
from distconv.data import DataError, Loader, Sampler, on_rank_zero, together
from distconv.data.durable import write_atomically
from distconv.transport.communicator import ObjectCommunicator
from distconv.transport.world import world

from .arguments import parse_arguments
from .checkpoint import check_checkpoint, check_finite_state, checkpoint_size
from .compare import compare_with_serial
from .data import MeshTanglingData, check_batch_size
from .network import NETWORKS, MeshTanglingNet
from .output import KEPT, make_room, prepare_output, restarted_from
from .plots import CHANNELS_SHOWN, plot_loss, plot_prediction
from .progress import Progress
from .score import evaluate

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
DECISIVE = (
    "network",
    "size",
    "width",
    "batch_size",
    "optimizer",
    "learning_rate",
    "seed",
    "precision",
)
"""The arguments that determine the numbers of a run: it can be continued only with the same."""


class Diverged(ArithmeticError):
    """Training that has come to numbers which are not finite. Raised on every rank."""


def train(args: argparse.Namespace, comm: ObjectCommunicator) -> None:
    """Train, validate and save epoch by epoch, then draw and write the results. Collective."""
    grid = make_grid(args, comm)
    training = MeshTanglingData(args.data, grid, PRECISIONS[args.precision])
    validation = MeshTanglingData(args.validation, grid, training.dtype, normalise_as=training)
    args.size = args.size or training.size
    network = build_model(args)
    together(grid, lambda: check(args, network, training, validation))
    args.resume = on_rank_zero(grid, lambda: restarted_from(args))
    on_rank_zero(grid, lambda: prepare_output(args))
    tell_of_unchecked(grid.rank, training, validation)

    model = dc.parallelize(network, grid)
    optimizer = build_optimizer(args, model)
    settings = {name: getattr(args, name) for name in DECISIVE}
    loader = Loader(training, args.batch_size, shuffle=True, drop_last=True, seed=args.seed)
    ordered = Loader(validation, args.batch_size)
    history = resume(args, model, optimizer, loader, settings)
    on_rank_zero(grid, lambda: make_room(args, checkpoint_size(model, optimizer), len(history)))
    metrics: dict[str, Any] = {"grid": grid.shape, **settings}
    if args.compare_serial:
        metrics["compare_serial"] = compare_serial(args, grid)

    for epoch in range(len(history), args.epochs):
        model.train()
        samples = len(loader) * args.batch_size
        with Progress(f"epoch {epoch + 1}/{args.epochs}", samples, grid.rank == 0) as progress:
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.step(loss.item(), len(x))
                check_finite(args, "loss", loss.item(), len(history), progress.steps)

        score = evaluate(model, ordered)
        check_finite(args, "validation loss", score.loss, len(history), progress.steps)
        history.append(progress.record() | asdict(score))
        together(grid, lambda: check_finite_state(model, optimizer))
        dc.save_checkpoint(
            args.output,
            model,
            optimizer,
            loader=loader,
            step=len(history),
            keep=KEPT,
            extra={"settings": settings, "history": history},
        )
        if grid.rank == 0:
            print(f"validation: {score}", flush=True)

    waited = loader.traffic.seconds_waited + ordered.traffic.seconds_waited
    metrics["bytes_read_by_rank"] = comm.allgather(training.bytes_read + validation.bytes_read)
    metrics["seconds_waited_by_rank"] = comm.allgather(waited)
    metrics["history"] = history
    truth, probability = predict(model, validation, sample=0)
    on_rank_zero(grid, lambda: write_results(args, metrics, validation, truth, probability))


def make_grid(args: argparse.Namespace, comm: ObjectCommunicator) -> dc.ProcessGrid:
    """Return the grid of the command line. Collective."""
    try:
        return dc.ProcessGrid(comm, **args.grid)
    except ValueError as error:
        raise DataError(str(error)) from error


def resume(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    settings: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the history of the run that this one continues, whose state it takes. Collective."""
    if not args.resume:
        return []
    found = dc.load_checkpoint(
        args.resume,
        model,
        optimizer,
        loader=loader,
        check=partial(check_checkpoint, settings=settings),
    )
    assert found is not None
    together(loader.grid, lambda: check_finite_state(model, optimizer))
    history: list[dict[str, Any]] = found.extra["history"]
    return history


def build_model(args: argparse.Namespace) -> MeshTanglingNet:
    """Return the untrained model, the same on every rank and every grid."""
    torch.manual_seed(args.seed)
    return NETWORKS[args.network](args.width, args.size).to(PRECISIONS[args.precision])


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer: after `backward()` the gradients on every rank are the serial
    ones.
    """
    return OPTIMIZERS[args.optimizer](model.parameters(), lr=args.learning_rate)


def check(
    args: argparse.Namespace,
    model: MeshTanglingNet,
    training: MeshTanglingData,
    validation: MeshTanglingData,
) -> None:
    """Raise `ValueError` for data that this model cannot be trained on with these arguments."""
    for data in (training, validation):
        try:
            model.check_mesh(data.size, data.size)
        except ValueError as error:
            raise ValueError(f"{data.path}: {error}") from error
    check_batch_size(args.batch_size, training)


def tell_of_unchecked(rank: int, *files: MeshTanglingData) -> None:
    """Print which files have no checksums."""
    for path in dict.fromkeys(data.path for data in files if not data.checksummed):
        if rank == 0:
            print(f"note: {path} has no checksums; damage to its values is not noticed", flush=True)


def check_finite(
    args: argparse.Namespace, name: str, value: float, epochs_done: int, steps: int
) -> None:
    """Raise `Diverged` on every rank, as `value` is the same on all, if it is not finite."""
    if math.isfinite(value):
        return
    kept = (
        f"{args.output} holds the state after epoch {epochs_done}"
        if epochs_done
        else "there is no checkpoint yet"
    )
    raise Diverged(
        f"the {name} is {value} in epoch {epochs_done + 1} after step {steps}; {kept}. "
        "Start anew with a smaller --learning-rate or with --precision float64, or look for "
        f"values that are not finite in {args.data} and {args.validation}"
    )


def compare_serial(args: argparse.Namespace, grid: dc.ProcessGrid) -> dict[str, Any]:
    """Take the first steps of the run on the grid and on one rank, and print how they differ."""
    data = MeshTanglingData(args.data, grid, PRECISIONS[args.precision])
    sampler = Sampler(data.samples, args.batch_size, shuffle=True, drop_last=True, seed=args.seed)
    every_batch = (batch for epoch in count() for batch in sampler.batches(epoch))
    comparison = compare_with_serial(
        partial(build_model, args),
        partial(build_optimizer, args),
        data,
        list(islice(every_batch, args.compare_serial)),
    )
    if grid.rank == 0:
        print(
            f"largest relative difference over the first {args.compare_serial} steps:\n"
            f"  {grid} and one rank: {comparison.grid}\n"
            f"  one rank, mini-batches as they are and reversed: {comparison.rounding}",
            flush=True,
        )
    return asdict(comparison)


def predict(model: nn.Module, data: MeshTanglingData, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the truth and the predicted probability of one sample, (S, S) each. Collective."""
    model.eval()
    with torch.no_grad():
        [(x, y)] = data.batches([[sample]])
        truth, probability = y.full_tensor(), model(x).full_tensor()
    return truth[0, 0].cpu().numpy(), probability[0, 0].cpu().numpy()


def write_results(
    args: argparse.Namespace,
    metrics: dict[str, Any],
    validation: MeshTanglingData,
    truth: np.ndarray,
    probability: np.ndarray,
) -> None:
    """Write metrics.json, loss.png and prediction.png into the output folder."""
    least, most = min(metrics["bytes_read_by_rank"]), max(metrics["bytes_read_by_rank"])
    waited = max(metrics["seconds_waited_by_rank"])
    print(
        f"read by each rank: {least / 1e6:.1f} to {most / 1e6:.1f} MB; waited for it: at most "
        f"{waited:.1f} s"
    )
    text = json.dumps(metrics, indent=1)
    write_atomically(args.output / "metrics.json", lambda file: file.write(text.encode()))
    plot_loss(args.output / "loss.png", metrics["history"])
    inputs = {name: validation.channel(0, name) for name in CHANNELS_SHOWN}
    plot_prediction(args.output / "prediction.png", inputs, truth, probability)


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Train on the ranks of `comm`; what is wrong is one line on rank 0, and exit status 2."""
    if comm is None:
        comm = world().for_program()
    try:
        args = parse_arguments(comm, arguments, __doc__, NETWORKS, OPTIMIZERS, PRECISIONS)
        train(args, comm)
    except (DataError, Diverged) as error:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
