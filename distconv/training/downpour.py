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
from distconv.training.requests import Client, Connection, MessageKind, copy_sent
from distconv.training.server import UpdateRule

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
    optimizer: a function that makes the server's optimizer from its parameters, such as
        `partial(torch.optim.SGD, lr=0.1)`.
    push: the steps of a worker between two sends of its summed gradients.
    fetch: the steps of a worker between two fetches of the server's parameters.
    synchronous: whether the server waits for all active workers, and steps with the mean of their
        gradients, weighted by their samples. `push` and `fetch` must be equal then.
    schedule: a function that makes a scheduler from the server's optimizer, to step with it.

    Examples
    --------
    >>> from functools import partial
    >>> sgd = partial(torch.optim.SGD, lr=0.1)
    >>> dc.training.Downpour(sgd, push=4, fetch=4).push
    4
    >>> synchronous = dc.training.Downpour(sgd, synchronous=True)  # the mean of all workers
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
                f"Downpour: push={self.push} and fetch={self.fetch} differ, but with "
                "synchronous=True all workers wait for each other; pass the same number for both"
            )

    def rule(self, *given: Any) -> DownpourRule:
        """Return the server's part of the algorithm; `given` are arguments of `DownpourRule`."""
        return DownpourRule(self, *given)

    def client(self, *given: Any) -> DownpourClient:
        """Return a client's part of the algorithm; `given` are further attributes of `Client`."""
        return DownpourClient(self, *given)


@dataclass(eq=False)
class DownpourClient(Client):
    """The client's part of `Downpour`; without an `optimizer` only fetches change parameters."""

    def __post_init__(self) -> None:
        self._sums: list[Tensor | None] = [None] * len(self.parameters)

    def step(self, samples: int) -> None:
        """Sum gradients for the next push, push and fetch if due, and set gradients to None.

        In steps without a fetch, the optimizer, if any, steps with the gradients as well. `samples`
        is the number of samples behind the gradients.
        """
        self.steps += 1
        self.samples += samples
        pushes = self.steps % self.method.push == 0
        fetches = self.steps % self.method.fetch == 0
        for i, p in enumerate(self.parameters):
            before = self._sums[i]
            if p.grad is not None and before is not None:
                before.add_(p.grad)
            elif p.grad is not None:
                # The next backward pass would overwrite the memory of the gradient.
                self._sums[i] = p.grad if pushes else p.grad.detach().clone()
        if fetches:
            self._fetch(MessageKind.PUSH_AND_FETCH if pushes else MessageKind.FETCH)
        else:
            if pushes:
                self._ask(MessageKind.PUSH)
            if self.optimizer is not None:
                self.optimizer.step()
        for p in self.parameters:
            p.grad = None

    def flush(self) -> None:
        """Send the gradients summed since the last push, if any."""
        if any(gradient is not None for gradient in self._sums):
            self._fetch(MessageKind.PUSH_AND_FETCH)

    def _fetch(self, kind: MessageKind) -> None:
        answer = self._ask(kind)
        copy_sent(self.parameters, answer[: len(self.parameters)])

    def _ask(self, kind: MessageKind) -> list[Tensor | None]:
        if kind == MessageKind.FETCH:
            return self.server.ask(kind, steps=self.steps).tensors
        brought, samples = [*self._sums, *self.buffers], self.samples
        self._sums, self.samples = [None] * len(self.parameters), 0
        return self.server.ask(kind, brought, samples, self.steps).tensors


class DownpourRule(UpdateRule):
    """The server's part of `Downpour`: it takes the optimizer's steps with workers' gradients.

    If this server is a client of another server, it forwards the gradients to that server, and
    fetches parameters from there.
    """

    kinds = (MessageKind.PUSH, MessageKind.PUSH_AND_FETCH)

    def __init__(
        self,
        method: Downpour,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        clients: int,
        above: Connection | None,
    ):
        self.waits = method.synchronous
        self._parameters = parameters
        self.optimizer = method.optimizer(parameters)
        # A server that fetches from another server in every step takes no steps of its own.
        steps = above is None or method.fetch > 1
        self.scheduler = method.schedule(self.optimizer) if method.schedule and steps else None
        if above is not None:
            self.client = method.client(parameters, buffers, self.optimizer, above, 0)

    def update(self, brought: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Step with one client's gradients, or with the weighted mean of several clients'."""
        for i, p in enumerate(self._parameters):
            p.grad = _mean([(tensors[i], samples) for tensors, samples in brought])
        samples = sum(samples for _, samples in brought)
        if self.client is not None:
            self.client.step(samples)
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for p in self._parameters:
            p.grad = None
        return []


def _mean(gradients: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Return the mean of gradients, each weighted by its samples; None counts as zero."""
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
