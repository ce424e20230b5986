"""`Worker`: a replica that trains with the parameters of a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distconv.comm.collectives import broadcast
from distconv.data.checkpoint import Checkpoint, Stateful, load_checkpoint, save_checkpoint
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.model.gradient_reduction import reduction_of
from distconv.tensor.base import shards_of
from distconv.tensor.dist_tensor import DistTensor
from distconv.training.checks import checked_number
from distconv.training.requests import (
    Answer,
    Connection,
    MessageKind,
    ServerLost,
    ServerParts,
    copy_sent,
    holding,
)
from distconv.training.serving import Method, described, server_parts_of
from distconv.training.team import Team
from distconv.transport.link import Link, LinkMessage


class Worker:
    """Train a model with the parameters of a server. All ranks of the worker create it together.

    Training begins with the server's parameters and buffers. At the end of a `with` block the
    worker informs the server that it has finished, or has failed. Workers may take different
    numbers of steps.

    Raises ValueError if the model is not parallelized on `team.grid`, or this rank is a server. If
    the server ends, this and every method raise ServerLost on every rank of the worker.

    Parameters
    ----------
    team: the team, in which this rank belongs to a worker.
    model: a module, parallelized on `team.grid`.
    method: the training algorithm, a `Downpour` or `AsynchronousElastic` equal to the server's.
    optimizer: the optimizer that steps with this worker's own gradients: with Downpour between two
        fetches, with elastic averaging in every step.

    Attributes
    ----------
    steps: the steps that this worker has taken, also before the server was restarted.
    samples: the samples that the server had received when it last answered.
    stopped: whether validation at the server has ended the training. Leave the loop then: further
        updates do not change the server's parameters.

    Examples
    --------
    >>> from functools import partial
    >>> team = dc.training.Team()
    >>> method = dc.training.Downpour(partial(torch.optim.SGD, lr=0.1))
    >>> net = nn.Linear(4, 1)
    >>> if team.serves:
    ...     report = dc.training.serve(team, net, method)
    ... else:
    ...     model = dc.parallelize(net, team.grid)
    ...     with dc.training.Worker(team, model, method) as worker:
    ...         for epoch in range(2):
    ...             loss = model(dc.distribute_tensor(torch.ones(2, 4), team.grid)).square().mean()
    ...             loss.backward()
    ...             worker.step(samples=2, loss=loss)
    ...             worker.meet()  # all workers have finished the epoch
    ...         with worker.center():
    ...             weights = dc.full_state_dict(model)  # the server's parameters
    """

    def __init__(
        self, team: Team, model: nn.Module, method: Method, optimizer: Optimizer | None = None
    ):
        grid = team.grid
        if grid is None:
            raise ValueError("Worker: this rank is a server; call `serve` if team.serves is true")
        reduction = reduction_of(model)
        if reduction is None or reduction.grid != grid:
            where = "not parallelized" if reduction is None else f"parallelized on {reduction.grid}"
            raise ValueError(
                f"Worker: the model is {where}; parallelize it on team.grid, which is {grid}"
            )
        tensors = [*model.parameters(), *model.buffers()]
        server_parts, agreed = server_parts_of(model, team), described(model, method)
        self._server = _WorkerConnection(team.above, server_parts, agreed, grid, tensors)
        self._team, self._model, self._optimizer = team, model, optimizer
        self._done = False
        leaves, buffers = shards_of(model.parameters()), shards_of(model.buffers())
        self._tensors = [*leaves, *buffers]
        answer = self._server.ask(MessageKind.HELLO)
        copy_sent(self._tensors, answer.tensors)
        self.samples = answer.samples
        self._client = method.client(leaves, buffers, optimizer, self._server, answer.steps)

    @property
    def steps(self) -> int:
        """Return the number of this worker's steps, in this run and in earlier ones."""
        steps: int = self._client.steps
        return steps

    @property
    def stopped(self) -> bool:
        """Return whether the server has ended the training, according to its last answer."""
        return self._server.stopped

    def step(self, samples: int = 1, loss: float | Tensor | None = None) -> None:
        """Take a step of the training algorithm, after `backward()`, and set gradients to None.

        All ranks of the worker call it together. Raises ValueError on every rank of the worker if
        `loss` is not a number.

        Parameters
        ----------
        samples: the samples of the mini-batch, over all ranks of this worker: its weight in means.
        loss: the loss of the mini-batch, for the history of the server; None to report none.
        """
        if loss is not None:
            self._server.note(checked_number("Worker.step", "loss", loss), samples)
        self._client.step(samples)
        self.samples = self._server.samples

    def meet(self) -> None:
        """Wait until all active workers call `meet`, for example after an epoch. Collective."""
        self._server.ask(MessageKind.MEET)
        self.samples = self._server.samples

    def save(
        self,
        within: str | os.PathLike[str],
        number: int,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int = 2,
    ) -> None:
        """Save the state of this worker, together with all workers and servers.

        All ranks of all active workers call it together, for example at the end of an epoch; the
        servers run `serve(..., save_every=None)`. Outstanding updates are sent first. `load` and
        `serve(..., resume=...)` continue from the state that `Team.last_saved` finds.

        Raises DataError on every rank of the worker if its state cannot be saved.

        Parameters
        ----------
        within: a folder; each worker saves in a subfolder of it.
        number: a number that grows from one call to the next, the same on all workers.
        scheduler, loader, extra, keep: see `save_checkpoint`; they belong to this worker.
        """
        self._client.flush()
        save_checkpoint(
            self._team.folder(within),
            self._model,
            self._optimizer,
            scheduler,
            loader,
            number,
            keep=keep,
            extra=extra,
        )
        self._server.ask(MessageKind.SAVE, steps=number)
        self.samples = self._server.samples

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        check: Callable[[Checkpoint], object] | None = None,
    ) -> Checkpoint:
        """Load a state written by `save`. All ranks of the worker call it before the first step.

        Raises DataError on every rank of the worker if the state cannot be read, or is of another
        model.

        Parameters
        ----------
        path: the path that `Team.last_saved` returned for this worker; the server loads its own.
        scheduler, loader, check: see `load_checkpoint`.

        Examples
        --------
        >>> from functools import partial
        >>> method = dc.training.Downpour(partial(torch.optim.SGD, lr=0.1))
        >>> for job in range(3):
        ...     team, net = dc.training.Team(), nn.Linear(4, 1)
        ...     saved = team.last_saved("run")
        ...     if team.serves:
        ...         report = dc.training.serve(
        ...             team, net, method, folder="run", save_every=None, resume=saved or False
        ...         )
        ...         continue
        ...     model = dc.parallelize(net, team.grid)
        ...     with dc.training.Worker(team, model, method) as worker:
        ...         epoch = worker.load(saved).step if saved else 0
        ...         model(dc.distribute_tensor(torch.ones(2, 4), team.grid)).mean().backward()
        ...         worker.step(samples=2)
        ...         worker.save("run", epoch + 1)
        >>> team.last_saved("run").name
        'checkpoint-0000000003.pt'
        """
        found = load_checkpoint(path, self._model, self._optimizer, scheduler, loader, check=check)
        assert found is not None
        return found

    @contextmanager
    def center(self) -> Iterator[None]:
        """Give the model the server's parameters and buffers in a `with` block. Collective.

        The worker's own values are restored afterwards. With elastic averaging the server's
        parameters are the center. All ranks of the worker enter the block together.
        """
        with holding(self._tensors, self._server.ask(MessageKind.STATE).tensors):
            yield

    def finish(self) -> None:
        """Send outstanding updates, and inform the server of the worker's end. Collective."""
        if not self._done:
            self._client.flush()
            self._server.ask(MessageKind.DONE)
            self._done = True
            self._team.leave()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.finish()
        else:
            self._team.leave(error)


class _WorkerConnection(Connection):
    """The connection of a worker's ranks to the server: rank 0 sends and receives for all ranks.

    All ranks of the worker call its methods together. Blocks of sharded parameters are gathered to
    global tensors before they are sent, and each rank takes its blocks of the answer. `like` has
    the worker's parameters and buffers, in the order of the model.
    """

    def __init__(
        self,
        links: Sequence[Link],
        server_parts: ServerParts,
        agreed: str,
        grid: ProcessGrid,
        like: Sequence[Any],
    ):
        super().__init__(links, server_parts, agreed)
        self._grid, self._like = grid, like
        self._comm = grid.communicator(AXES, "servers")
        self._lost: str | None = None
        self.samples = 0

    def ask(
        self,
        kind: MessageKind,
        tensors: Sequence[Tensor | None] | None = None,
        samples: int = 0,
        steps: int = 0,
    ) -> Answer:
        """Send a request for all ranks of the worker; return this rank's blocks of the answer.

        The arguments are those of `Connection.ask`, with this rank's blocks of `tensors`.
        """
        whole = None if tensors is None else self._whole(tensors)
        found: list[LinkMessage] = []
        if self._grid.rank == 0 and self._lost is None:
            try:
                found = self.answers(kind, whole, samples, steps)
            except ServerLost as error:
                self._lost = str(error)
        if kind == MessageKind.PUSH:
            return self.joined([])  # if the server was lost, the next answer raises
        heads = [(answer.numbers, len(answer.payload)) for answer in found]
        # A server may let workers wait for long, which must not look like a stall of the grid.
        self._lost, heads = self._comm.bcast((self._lost, heads))
        if self._lost is not None:
            raise ServerLost(self._lost)
        answers = []
        for i, (numbers, size) in enumerate(heads):
            payload = found[i].payload if found else torch.empty(size, dtype=torch.uint8)
            payload = payload.to(self._grid.device)
            broadcast(payload, self._grid)
            answers.append(LinkMessage(numbers, payload))
        answer = self.joined(answers)
        self.samples = answer.samples
        return answer._replace(tensors=[self._block(i, t) for i, t in enumerate(answer.tensors)])

    def _whole(self, blocks: Sequence[Tensor | None]) -> list[Tensor | None]:
        whole: list[Tensor | None] = []
        for block, like in zip(blocks, self._like, strict=True):
            if block is not None and isinstance(like, DistTensor):
                part = DistTensor(block.detach(), like.shape, like.cuts, like.grid)
                block = part.full_tensor()
            whole.append(block)
        return whole

    def _block(self, place: int, whole: Tensor | None) -> Tensor | None:
        like = self._like[place]
        if whole is None or not isinstance(like, DistTensor):
            return whole
        return whole[like.box.slices]
