"""Elastic averaging: workers train independently, each pulled towards a common center.

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651. This is the
synchronous form, without a server: every worker keeps a copy of the center, and an all-reduce of
the pulls changes all copies identically.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from distconv.comm.collectives import all_reduce_coalesced, broadcast
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.model.gradient_reduction import reduction_of
from distconv.tensor.base import shards_of
from distconv.training.checks import check_count
from distconv.training.requests import Client, Connection, MessageKind, holding
from distconv.training.server import UpdateRule

_WITHIN_A_SAMPLE = tuple(axis for axis in AXES if axis != "sample")
"""The grid axes over which a sample is partitioned."""


def worker_grid(grid: ProcessGrid) -> ProcessGrid:
    """Return the grid of this rank's worker: the ranks of `grid` that share its samples.

    All ranks of `grid` call it together. A model parallelized on the result is trained by these
    ranks alone, on their own samples.

    Examples
    --------
    >>> grid = dc.ProcessGrid(sample=2)
    >>> print(dc.training.worker_grid(grid))  # one rank is a worker
    ProcessGrid() on 1 rank
    """
    extents: dict[str, Any] = {axis: grid.shape[axis] for axis in _WITHIN_A_SAMPLE}
    peers = grid.topology.peers(grid.rank, _WITHIN_A_SAMPLE)
    ranks = [grid.ranks[peer] for peer in peers]
    return ProcessGrid(ranks, device=grid.device, **extents)


class ElasticAveraging:
    """Pull the models of workers towards a common center. All ranks of `grid` create it together.

    In a step each worker i is pulled towards the center, and the center towards all of them:

        d_i = alpha (x_i - center);  x_i <- x_i - d_i;  center <- center + sum of all d_i

    Call `step` between `backward()` and the optimizer's step: pull and gradient then belong to the
    same weights, as published. The pull does not enter the optimizer's momentum (EAMSGD; with
    nesterov=True the pull is computed at the weights that torch holds, which include the velocity).
    Buffers, such as running statistics, stay each worker's own.

    Raises ValueError on every rank, if the model is not parallelized on the grid of its worker, a
    value is out of its range, or the ranks pass different values.

    Parameters
    ----------
    model: parallelized on `worker_grid(grid)`. Every worker, and the center, begins with the
        parameters and buffers of the first worker.
    grid: the grid of all workers, which are its replicas.
    alpha: the strength of the springs, at most 1 / P_N, beyond which the center would overshoot; by
        default 0.9 / P_N, as published.
    period: the number of steps from one pull to the next.

    Examples
    --------
    >>> grid = dc.ProcessGrid(sample=2)
    >>> own = dc.training.worker_grid(grid)
    >>> model = dc.parallelize(nn.Linear(4, 1), own)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> elastic = dc.training.ElasticAveraging(model, grid, period=2)
    >>> for _ in range(4):
    ...     model(dc.distribute_tensor(torch.randn(2, 4), own)).square().mean().backward()
    ...     elastic.step(); optimizer.step(); optimizer.zero_grad()
    >>> with elastic.center():
    ...     weights = dc.full_state_dict(model)  # the same on both workers
    >>> state = elastic.state_dict()  # for a checkpoint
    >>> elastic.load_state_dict(state)
    """

    def __init__(
        self, model: nn.Module, grid: ProcessGrid, *, alpha: float | None = None, period: int = 1
    ):
        workers = grid.shape["sample"]
        alpha = 0.9 / workers if alpha is None else alpha
        reduction = reduction_of(model)
        if reduction is None or reduction.grid.shape != {**grid.shape, "sample": 1}:
            where = "not parallelized" if reduction is None else f"parallelized on {reduction.grid}"
            raise ValueError(
                f"ElasticAveraging: the model is {where}; parallelize it on worker_grid(grid), the "
                f"part of {grid} that belongs to this worker"
            )
        everyone = grid.all_gather_object((alpha, period))
        if any(theirs != everyone[0] for theirs in everyone):
            raise ValueError(
                f"ElasticAveraging: alpha and period are {', '.join(map(str, everyone))} on the "
                "ranks; pass the same on every rank"
            )
        if not 0 < alpha * workers <= 1 + 1e-9:
            raise ValueError(
                f"ElasticAveraging: alpha={alpha!r} is out of range; choose a number above 0 and "
                f"up to 1 / {workers} for {workers} workers"
            )
        check_count("ElasticAveraging", "period", period, 1)
        self.alpha, self.period = alpha, period
        self._grid = grid
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._steps = 0
        for shard in shards_of((*self._parameters, *model.buffers())):
            broadcast(shard, grid, ("sample",))
        self._center = [p.detach().clone() for p in self._parameters]

    def step(self) -> None:
        """Count a step, and in every `period`-th pull worker and center together. Collective.

        A pull takes one all-reduce over the workers, of each rank's blocks of all parameters.
        """
        self._steps += 1
        if self._steps % self.period:
            return
        pulls = []
        for x, center in self._pairs():
            pulls.append((x - center).mul_(self.alpha))
            x.sub_(pulls[-1])
        totals = all_reduce_coalesced(pulls, self._grid, ("sample",))
        for (_, center), total in zip(self._pairs(), totals, strict=True):
            center.add_(total)

    @contextmanager
    def center(self) -> Iterator[None]:
        """Give the model the center's parameters in a `with` block, to evaluate or save it.

        The worker's parameters are restored afterwards. No communication.
        """
        with holding(shards_of(self._parameters), shards_of(self._center)):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the center's parameters by name, and the number of steps taken.

        Each worker saves the states of its model and optimizer separately. For a sharded parameter
        the result holds this rank's block.
        """
        blocks = (center.clone() for _, center in self._pairs())
        return {"steps": self._steps, "center": dict(zip(self._names, blocks, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the center and the number of steps that `state_dict` returned on this rank.

        Raises ValueError if the saved parameters have other names.
        """
        if list(state["center"]) != self._names:
            raise ValueError(
                f"ElasticAveraging: the saved center has the parameters {list(state['center'])}, "
                f"but the model has {self._names}; load the state of the same model"
            )
        for (_, center), saved in zip(self._pairs(), state["center"].values(), strict=True):
            center.copy_(saved)
        self._steps = int(state["steps"])

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of this rank's block of a parameter and the same block of the center."""
        own = (x.detach() for x in shards_of(self._parameters))
        return zip(own, shards_of(self._center), strict=True)


# Elastic averaging with a server that holds the center, and workers that pull at any time.
#
# Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651, algorithm
# 1. `ElasticAveraging` is the synchronous form, without a server.


@dataclass(frozen=True)
class AsynchronousElastic:
    """Train workers independently, each pulled towards a center that a server holds.

    In every `period`-th step of a worker with parameters x there is a pull: the server moves the
    center by d = alpha (x - center), and the worker moves x by -d, before its optimizer's step. The
    center is the result of the training.

    Raises ValueError if a value is out of its range.

    Parameters
    ----------
    period: the steps of a worker between two pulls.
    alpha: the strength of the springs, above 0 and below 1; by default 0.9 divided by the number of
        clients of a server.

    Examples
    --------
    >>> dc.training.AsynchronousElastic(period=4)
    AsynchronousElastic(period=4, alpha=None)
    """

    period: int = 1
    alpha: float | None = None

    def __post_init__(self) -> None:
        check_count("AsynchronousElastic", "period", self.period, 1)
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError(
                f"AsynchronousElastic: alpha={self.alpha!r} is out of range; choose a number "
                "above 0 and below 1"
            )

    def rule(self, *given: Any) -> ElasticRule:
        """Return the server's part of the algorithm; `given` are arguments of `ElasticRule`."""
        return ElasticRule(self, *given)

    def client(self, *given: Any) -> ElasticClient:
        """Return a client's part of the algorithm; `given` are further attributes of `Client`."""
        return ElasticClient(self, *given)


class ElasticClient(Client):
    """The client's part of `AsynchronousElastic`: a worker pulled towards the server's center."""

    _pulled = True
    """Whether no step has been taken since the last pull."""

    def step(self, samples: int) -> None:
        """Pull in every `period`-th step, take the optimizer's step, and set gradients to None."""
        self.steps += 1
        self.samples += samples
        self._pulled = False
        if self.steps % self.method.period == 0:
            self._pull()
        if self.optimizer is not None:
            self.optimizer.step()
        for p in self.parameters:
            p.grad = None

    def flush(self) -> None:
        """Pull towards the center, unless no step was taken since the last pull."""
        if not self._pulled:
            self._pull()

    def _pull(self) -> None:
        brought = [p.detach() for p in self.parameters]
        samples, self.samples, self._pulled = self.samples, 0, True
        answer = self.server.ask(MessageKind.PULL, [*brought, *self.buffers], samples, self.steps)
        for p, pull in zip(self.parameters, answer.tensors, strict=False):
            if pull is not None:
                p.detach().sub_(pull)


class ElasticRule(UpdateRule):
    """The server's part of `AsynchronousElastic`: it moves the center when a worker pulls.

    If this server is a client of another server, its center is pulled towards the other server's.
    """

    kinds = (MessageKind.PULL,)

    def __init__(
        self,
        method: AsynchronousElastic,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        clients: int,
        above: Connection | None,
    ):
        self._parameters = parameters
        self._alpha = 0.9 / clients if method.alpha is None else method.alpha
        if above is not None:
            self.client = method.client(parameters, buffers, None, above, 0)

    def update(self, brought: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Move the center towards a client's parameters, and return the change of the center.

        `brought` has one entry, as each pull is an update. The client subtracts the change from its
        parameters.
        """
        [(theirs, samples)] = brought
        pull: list[Tensor | None] = []
        for center, x in zip(self._parameters, theirs, strict=True):
            assert x is not None
            moved = (x - center.detach()).mul_(self._alpha)
            center.detach().add_(moved)
            pull.append(moved)
        if self.client is not None:
            self.client.step(samples)
        return pull
