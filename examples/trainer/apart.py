"""Runs whose workers do not run in step: elastic averaging, or servers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

import distconv as dc
from distconv.comm.collectives import all_reduce_coalesced
from distconv.data import Checkpoint, DataError, Loader, Sampler, on_rank_zero, together
from distconv.data.checkpoint import last_in_common
from distconv.training import (
    AllWorkersLost,
    Downpour,
    ElasticAveraging,
    ServerLost,
    Team,
    Worker,
    serve,
    worker_grid,
)
from distconv.transport.interface import ObjectCommunicator

from .building import OPTIMIZERS, Diverged, build_model, build_optimizer, check_finite, make_grid
from .checkpoint import DECISIVE, check_checkpoint
from .example import Example, check_batch_size
from .logs import write_json, write_table
from .methods import DECISIVE_APART, recipe_of
from .output import KEPT, is_restart, prepare_output
from .progress import Progress


class Share(Sampler):
    """The part of each mini-batch for one worker; see `Sampler`."""

    def __init__(self, worker: int, workers: int, samples: int, batch_size: int, seed: int):
        super().__init__(samples, batch_size, shuffle=True, drop_last=True, seed=seed)
        self.worker, self.workers = worker, workers

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the sample numbers of every mini-batch of this worker in an epoch."""
        return [batch[self.worker :: self.workers] for batch in super().batches(epoch)]


Learner: TypeAlias = "Worker | _Elastic"
"""How a worker learns with others."""


def train_apart(
    example: Example[Any, Any], args: argparse.Namespace, comm: ObjectCommunicator
) -> None:
    """Train, validate and write the results, on all ranks; errors end the program in one line."""
    # Of errors of all workers; a worker's own error it prints itself.
    speaks = comm.rank == (0 if args.method == "easgd" else args.servers)
    try:
        if args.method == "easgd":
            _by_elastic_averaging(example, args, comm)
        else:
            _by_servers(example, args, comm)
    except (DataError, FileExistsError, ServerLost) as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (AllWorkersLost, Diverged):
        sys.exit(2)  # the workers have said why


def _by_elastic_averaging(
    example: Example[Any, Any], args: argparse.Namespace, comm: ObjectCommunicator
) -> None:
    grid = make_grid(args, comm)
    own = worker_grid(grid)
    worker, workers = grid.coords["sample"], grid.shape["sample"]
    folder = f"worker-{worker}"
    saved = _saved_before(
        args, lambda run: last_in_common(run / folder, grid.comm, looks=own.rank == 0)
    )

    def learner(model: nn.Module, epoch: int) -> _Elastic:
        optimizer = build_optimizer(args, model)
        recipe = recipe_of(args, args.batch_size // workers, epoch)
        scheduler = recipe.schedule(optimizer) if recipe else None
        elastic = ElasticAveraging(model, grid, period=args.period)
        return _Elastic(elastic, model, grid, optimizer, scheduler, folder)

    with speaking_of_divergence(own, worker):
        _learn(example, args, own, worker, workers, learner, args.output / folder, saved)


def _saved_before(args: argparse.Namespace, find: Callable[[Path], Path | None]) -> Path | None:
    """Return this rank's state to resume from, if `--resume` is given or torchrun has restarted the
    job.

    Args:
        find: returns the state in the folder of a run, on all ranks together; None if there is
        none.

    Raises:
        DataError: on every rank, where `--resume` names a folder without a state.
    """
    if is_restart() and (saved := find(args.output)) is not None:
        args.resume = args.output
        return saved
    if args.resume is None:
        return None
    if (saved := find(args.resume)) is None:
        raise DataError(
            f"{args.resume} holds no state that all ranks of --method {args.method} have saved "
            "together; continue on as many as before, or start anew without --resume"
        )
    return saved


@contextmanager
def speaking_of_divergence(own: dc.ProcessGrid, worker: int) -> Iterator[None]:
    """Let the first rank of a diverging worker print the error, as no other worker knows of it."""
    try:
        yield
    except Diverged as error:
        if own.rank == 0:
            print(f"error: worker {worker}: {error}", file=sys.stderr, flush=True)
        raise


def _by_servers(
    example: Example[Any, Any], args: argparse.Namespace, comm: ObjectCommunicator
) -> None:
    extents, workers = _groups(args, comm)
    team = Team(servers=args.servers, **extents)
    saved = _saved_before(args, team.last_saved)

    def method(epoch: int) -> Downpour:
        recipe = recipe_of(args, args.batch_size // workers, epoch * workers)
        optimizer = partial(OPTIMIZERS[args.optimizer], lr=args.learning_rate)
        schedule = None if recipe is None else recipe.schedule
        return Downpour(optimizer, args.period, args.period, schedule=schedule)

    if team.grid is not None and team.worker is not None:

        def learner(model: nn.Module, epoch: int) -> Worker:
            optimizer = build_optimizer(args, model) if args.period > 1 else None
            return Worker(team, model, method(epoch), optimizer)

        try:
            with speaking_of_divergence(team.grid, team.worker):
                folder = team.folder(args.output)
                _learn(example, args, team.grid, team.worker, workers, learner, folder, saved)
        except Exception as error:
            team.leave(error)
            raise
        return
    try:
        own = dc.ProcessGrid([team.rank], device="cpu")
        training, _ = example.open(args, own)
        epoch = len(Share(0, workers, training.samples, args.batch_size, args.seed))
        report = serve(
            team,
            build_model(example, args),
            method(epoch),
            folder=args.output,
            save_every=None,
            keep=KEPT,
            resume=saved or False,
        )
        print(report, flush=True)
        staleness = {str(n): report.staleness[n] for n in sorted(report.staleness)}
        facts = {"updates": report.updates, "samples": report.samples, "staleness": staleness}
        write_json(args.output / f"server-{team.rank}.json", facts)
    except Exception as error:
        team.leave(error)
        raise


def _groups(args: argparse.Namespace, comm: ObjectCommunicator) -> tuple[dict[str, int], int]:
    """Return the grid of a worker, and the number of workers; raises DataError on all ranks."""
    extents: dict[str, int] = {"sample": 1} | args.grid
    replicas, ranks = extents["sample"], prod(extents.values())
    groups = args.groups or (min(2, replicas) if args.method == "hybrid" else replicas)
    if ranks < 1 or comm.size != args.servers + ranks:
        raise DataError(
            f"--method {args.method} with --servers {args.servers} takes as many ranks more than "
            f"the grid has, all of the job; there are {comm.size}, and the grid is "
            f"{','.join(f'{axis}={n}' for axis, n in args.grid.items())}"
        )
    if replicas % groups:
        raise DataError(
            f"--groups {groups} does not divide sample={replicas} of --grid; choose a divisor"
        )
    return extents | {"sample": replicas // groups}, groups


def _learn(
    example: Example[Any, Any],
    args: argparse.Namespace,
    own: dc.ProcessGrid,
    worker: int,
    workers: int,
    make: Callable[[nn.Module, int], Learner],
    folder: Path,
    saved: Path | None,
) -> None:
    """Train on the ranks of one worker; the first worker validates the common parameters.

    Args:
        make: makes the learner, from the model and the number of steps in an epoch.
        folder: the folder for the checkpoints of this worker.
        saved: the checkpoint to resume from.
    """
    training, validation = example.open(args, own)
    network = build_model(example, args)

    def check() -> None:
        example.check(args, network, training, validation)
        check_batch_size(args.batch_size, training, args.data)
        if args.batch_size < workers * own.shape["sample"]:
            raise ValueError(
                f"batch size {args.batch_size} leaves some replicas without a sample; choose at "
                f"least {workers * own.shape['sample']}"
            )

    together(own, check)
    on_rank_zero(own, lambda: prepare_output(args, folder))
    model = dc.parallelize(network, own)
    share = Share(worker, workers, training.samples, args.batch_size, args.seed)
    loader = Loader(training, batch_sampler=share)
    ordered = Loader(validation, args.batch_size)
    learner = make(model, len(share))
    args.groups = workers
    names = (*example.decisive, *DECISIVE, *DECISIVE_APART)
    settings = {name: getattr(args, name) for name in names}
    done, history = 0, list[dict[str, Any]]()
    if saved is not None:
        check_saved = partial(check_checkpoint, settings=settings, scores=example.scores())
        found = learner.load(saved, loader=loader, check=check_saved)
        done, history = found.step, found.extra["history"]

    def center() -> AbstractContextManager[None]:
        return learner.center() if worker == 0 or args.method == "easgd" else nullcontext()

    for epoch in range(done, args.epochs):
        model.train()
        title, shown = f"epoch {epoch + 1}/{args.epochs}", worker == own.rank == 0
        with Progress(title, len(loader) * args.batch_size, shown) as progress:
            for batch in loader:
                loss = example.loss(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                learner.step(len(batch[0]))
                progress.step(loss.item(), args.batch_size)
                check_finite(args, "loss", loss.item(), epoch, progress.steps)
            learner.meet()
        with center():
            if worker == 0:
                score = example.evaluate(model, ordered)
        if worker == 0:
            check_finite(args, "validation loss", score.loss, epoch, progress.steps)
            history.append(progress.record() | asdict(score))
        extra = {"settings": settings, "history": history}
        learner.save(args.output, epoch + 1, loader=loader, extra=extra)
        if worker == 0:
            on_rank_zero(own, lambda: write_table(args.output / "log.csv", history))
            if own.rank == 0:
                print(f"{progress}; validation: {score}", flush=True)
    with center():
        if worker == 0:
            example.draw(args, model, validation, history)
    learner.finish()
    if worker == 0:
        metrics = {
            "method": args.method,
            "workers": workers,
            "grid": own.shape,
            "batch_size": args.batch_size,
            "history": history,
        }
        on_rank_zero(own, lambda: write_json(args.output / "metrics.json", metrics))


@dataclass
class _Elastic:
    """Elastic averaging with the methods of a `Worker`; all workers take all its steps together."""

    elastic: ElasticAveraging
    model: nn.Module
    grid: dc.ProcessGrid
    optimizer: Optimizer
    scheduler: Any
    folder: str

    def step(self, samples: int = 1) -> None:
        """Pull in every `period`-th step, and take a step."""
        self.elastic.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def meet(self) -> None:
        """Do nothing: workers meet in the pulls."""

    @contextmanager
    def center(self) -> Iterator[None]:
        """Give the model the center, with the mean of all workers' running statistics."""
        buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        own = [b.clone() for b in buffers]
        with torch.no_grad(), self.elastic.center():
            sums = all_reduce_coalesced(buffers, self.grid, ("sample",))
            _fill(buffers, [total / self.grid.shape["sample"] for total in sums])
            try:
                yield
            finally:
                _fill(buffers, own)

    def save(self, within: Path, number: int, *, loader: Loader, extra: Mapping[str, Any]) -> None:
        """Save this worker's own parameters, and the center."""
        dc.save_checkpoint(
            within / self.folder,
            self.model,
            self.optimizer,
            self.scheduler,
            loader,
            number,
            keep=KEPT,
            extra={**extra, "elastic": self.elastic.state_dict()},
        )

    def load(
        self, path: Path, *, loader: Loader, check: Callable[[Checkpoint], object]
    ) -> Checkpoint:
        """Load this worker's own parameters, and the center."""
        found = dc.load_checkpoint(
            path, self.model, self.optimizer, self.scheduler, loader, check=check
        )
        assert found is not None
        self.elastic.load_state_dict(found.extra["elastic"])
        return found

    def finish(self) -> None:
        """Do nothing: all workers end together."""


def _fill(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
