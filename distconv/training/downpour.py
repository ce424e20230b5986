"""Downpour: workers send gradients to a server that steps, and fetch its parameters.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from distconv.training.checks import check_count
from distconv.training.requests import Client, Connection, Kind

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]


@dataclass(frozen=True)
class Downpour:
    """Downpour: a server steps with the gradients of workers whenever they arrive.

    A worker computes its gradients at parameters that are some updates old. With n equal workers
    the delay acts as a momentum of 1 - 1/n (Mitliagkas et al., "Asynchrony begets momentum",
    arXiv:1605.09774), so choose less momentum.

    Raises ValueError if a period is out of its range.

    Parameters
    ----------
    optimizer: makes the server's optimizer of its parameters, such as `partial(torch.optim.SGD,
        lr=0.1)`.
    push: the steps of a worker between two sends of its summed gradients.
    fetch: the steps of a worker between two fetches of the server's parameters.
    synchronous: whether the server waits for all active workers, and steps with the mean of their
        gradients, weighted by their samples. `push` and `fetch` must be equal then.
    schedule: makes a scheduler of the server's optimizer, which steps with it.
    """

    optimizer: MakeOptimizer = field(repr=False)
    push: int = 1
    fetch: int = 1
    synchronous: bool = False
    schedule: Callable[[Optimizer], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("Downpour", "push", self.push, 1)
        check_count("Downpour", "fetch", self.fetch, 1)
        if self.synchronous and self.push != self.fetch:
            raise ValueError(
                f"Downpour: push={self.push} and fetch={self.fetch} differ, and all workers wait "
                "for each other with synchronous=True; give both the same"
            )

    def rule(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        clients: int,
        above: Connection | None,
    ) -> DownpourRule:
        return DownpourRule(self, parameters, buffers, above)

    def client(self, *given: Any) -> DownpourClient:
        return DownpourClient(self, *given)


@dataclass(eq=False)
class DownpourClient(Client):
    """The client's part of `Downpour`; without an `optimizer` only fetches change parameters."""

    def __post_init__(self) -> None:
        self._sums: list[Tensor | None] = [None] * len(self.parameters)

    def step(self, samples: int) -> None:
        """Add the gradients of `samples` samples to the sums to send, and set them to None."""
        self.steps += 1
        self.samples += samples
        pushes, fetches = (
            self.steps % period == 0 for period in (self.method.push, self.method.fetch)
        )
        for i, p in enumerate(self.parameters):
            before = self._sums[i]
            if p.grad is not None:
                if before is not None:
                    self._sums[i] = before.add_(p.grad)
                else:
                    # Reductions will overwrite their memory in the next backward pass.
                    self._sums[i] = p.grad if pushes else p.grad.detach().clone()
        if fetches:
            kind = Kind.PUSH_AND_FETCH if pushes else Kind.FETCH
            self._fetch(kind)
        else:
            if pushes:
                self._ask(Kind.PUSH)
            if self.optimizer is not None:
                self.optimizer.step()
        for p in self.parameters:
            p.grad = None

    def finish(self) -> None:
        """Send the gradients summed since the last push, if any."""
        if any(gradient is not None for gradient in self._sums):
            self._fetch(Kind.PUSH_AND_FETCH)

    def _fetch(self, kind: Kind) -> None:
        answer = self._ask(kind)
        for p, value in zip(self.parameters, answer, strict=False):
            if value is not None:
                p.detach().copy_(value)

    def _ask(self, kind: Kind) -> list[Tensor | None]:
        if kind == Kind.FETCH:
            return self.server.ask(kind, steps=self.steps).tensors
        brought, samples = [*self._sums, *self.buffers], self.samples
        self._sums, self.samples = [None] * len(self.parameters), 0
        return self.server.ask(kind, brought, samples, self.steps).tensors


class DownpourRule:
    """The server's part of `Downpour`: it takes the optimizer's steps with workers' gradients.

    A server that is itself a client of another server sends the gradients on, and fetches
    parameters from it.
    """

    kinds: tuple[Kind, ...] = (Kind.PUSH, Kind.PUSH_AND_FETCH)
    optimizer: Any
    scheduler: Any

    def __init__(
        self,
        method: Downpour,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        above: Connection | None,
    ):
        self.waits = method.synchronous
        self._parameters = parameters
        self.optimizer = method.optimizer(parameters)
        # Under a server from which it fetches in every step, it takes no steps of its own.
        steps = above is None or method.fetch > 1
        self.scheduler = method.schedule(self.optimizer) if method.schedule and steps else None
        self._client = (
            method.client(parameters, buffers, self.optimizer, above, 0) if above else None
        )

    def update(self, brought: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Step with one client's gradients, or with the weighted mean of several clients'.

        `brought` has for each client its gradients, and the number of samples behind them: their
        weight.
        """
        for i, p in enumerate(self._parameters):
            p.grad = _mean([(tensors[i], samples) for tensors, samples in brought])
        samples = sum(samples for _, samples in brought)
        if self._client is not None:
            self._client.step(samples)
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for p in self._parameters:
            p.grad = None
        return []

    def finish(self) -> None:
        """Send the gradients summed since the last push to another server.

        Nothing is sent unless this server is a client of another one.
        """
        if self._client is not None:
            self._client.finish()


def _mean(gradients: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Return the mean of gradients, each weighted by its samples; a missing one is zero."""
    if len(gradients) == 1:
        return gradients[0][0]
    there = [(g, n) for g, n in gradients if g is not None]
    samples = sum(n for _, n in gradients)
    if not there:
        return None
    mean = there[0][0] * (there[0][1] / samples)
    for g, n in there[1:]:
        mean.add_(g, alpha=n / samples)
    return mean
