"""Elastic averaging with a server that holds the center, and workers that visit it at any time.

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651, algorithm 1.
`ElasticAveraging` is the synchronous form, without a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from distconv.training.checks import check_count
from distconv.training.requests import Client, Connection, Kind


@dataclass(frozen=True)
class AsynchronousElastic:
    """Train workers apart, each tied by a spring to a center that a server holds.

    In every `period`-th step of a worker with parameters x there is a pull: the server moves the
    center by d = alpha (x - center), and the worker moves x by -d, before its optimizer's step. The
    center is the result of the training.

    Raises ValueError if a value is out of its range.

    Parameters
    ----------
    period: the steps of a worker between two pulls.
    alpha: the strength of the springs, above 0 and below 1; by default 0.9 divided by the number of
        clients of a server.
    """

    period: int = 1
    alpha: float | None = None

    def __post_init__(self) -> None:
        check_count("AsynchronousElastic", "period", self.period, 1)
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError(
                f"AsynchronousElastic: alpha={self.alpha!r} is out of range; choose one above 0 "
                "and below 1"
            )

    def rule(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        clients: int,
        above: Connection | None,
    ) -> ElasticRule:
        alpha = 0.9 / clients if self.alpha is None else self.alpha
        client = self.client(parameters, buffers, None, above, 0) if above else None
        return ElasticRule(parameters, alpha, client)

    def client(self, *given: Any) -> ElasticClient:
        return ElasticClient(self, *given)


class ElasticClient(Client):
    """The client's part of `AsynchronousElastic`, tied to the server's center."""

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

    def finish(self) -> None:
        """Pull towards the center, unless no step was taken since the last pull."""
        if not self._pulled:
            self._pull()

    def _pull(self) -> None:
        brought = [p.detach() for p in self.parameters]
        samples, self.samples, self._pulled = self.samples, 0, True
        answer = self.server.ask(Kind.PULL, [*brought, *self.buffers], samples, self.steps)
        for p, pull in zip(self.parameters, answer.tensors, strict=False):
            if pull is not None:
                p.detach().sub_(pull)


class ElasticRule:
    """The server's part of `AsynchronousElastic`: it moves the center when a worker pulls.

    `client` ties this center to the center of another server, of which this server is a client;
    None if there is no other server.
    """

    kinds: tuple[Kind, ...] = (Kind.PULL,)
    waits = False
    optimizer: Any = None
    scheduler: Any = None

    def __init__(self, parameters: Sequence[Parameter], alpha: float, client: ElasticClient | None):
        self._parameters, self._alpha, self._client = parameters, alpha, client

    def update(self, brought: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Move the center towards a client's parameters; return the move, which the client takes.

        `brought` has one entry: the client's parameters, and the samples since its last pull. The
        client subtracts the move from its parameters.
        """
        [(theirs, samples)] = brought
        pull: list[Tensor | None] = []
        for center, x in zip(self._parameters, theirs, strict=True):
            assert x is not None
            moved = (x - center.detach()).mul_(self._alpha)
            center.detach().add_(moved)
            pull.append(moved)
        if self._client is not None:
            self._client.step(samples)
        return pull

    def finish(self) -> None:
        """Pull at the center of the server that this server is a client of, if there is one.

        Nothing is sent if no client has pulled since the last pull.
        """
        if self._client is not None:
            self._client.finish()
