"""A server: it holds parameters, handles requests of clients, and decides when to answer them.

It knows nothing of links and ranks: each call gets a request and returns the answers to send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from distconv.training.history import History, TrainingLoss
from distconv.training.parcel import Packing
from distconv.training.requests import Connection, Kind, loss_in
from distconv.transport.link import Message, message

Due = list[tuple[int, Message]]
"""Clients, each with the answer to send now."""


class MalformedRequest(ValueError):
    """A client has sent bytes that are no request; nothing was changed by them."""


@dataclass
class Report:
    """The course of a training with a server, as `serve` returns it.

    Attributes
    ----------
    updates: the number of changes of the parameters.
    samples: the number of samples behind these updates.
    staleness: a histogram of the age of updates: how many were computed with parameters that n
        other updates had changed since, by n.
    requests: the number of updates that each client has sent, by the client's number.
    lost: the reason for dropping a client, by the client's number.
    history: the losses in the course of the training.
    stopped: the reason for which validation has ended the training; None if it has not.
    """

    updates: int = 0
    samples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)
    lost: dict[int, str] = field(default_factory=dict)
    history: History = field(default_factory=History)
    stopped: str | None = None

    def __str__(self) -> str:
        mean = sum(n * k for n, k in self.staleness.items()) / max(1, self.staleness.total())
        lines = [f"{self.updates} updates by {self.samples} samples, staleness {mean:.2f} in mean"]
        most = max(self.staleness.values(), default=1)
        for n in sorted(self.staleness):
            count = self.staleness[n]
            lines.append(f"  {n:4d} {'#' * max(1, round(40 * count / most))} {count}")
        lines += [f"  client {client} was dropped: {why}" for client, why in self.lost.items()]
        lines += [f"  stopped: {self.stopped}"] if self.stopped else []
        return "\n".join(lines)


class Rule(Protocol):
    """The server's part of a training algorithm, such as `Downpour`, that changes parameters."""

    kinds: tuple[Kind, ...]
    """The requests that carry updates."""
    optimizer: Any
    """The server's optimizer, or None."""
    scheduler: Any
    """The scheduler of the optimizer, or None."""
    waits: bool
    """Whether an update waits for requests of all active clients, or each request is one."""

    def update(self, brought: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Change the parameters by updates from one or more clients.

        `brought` has for each client its tensors, parameters or gradients and then buffers, and the
        number of samples behind them. Returns the tensors to send to a client that asked for a
        PULL, in place of the parameters.
        """

    def finish(self) -> None:
        """Send outstanding updates to the server of which this one is a client, if there is one."""


class Server:
    """The state of one rank of a server: its tensors, and the requests that wait for an answer.

    It decides when to answer a request; the caller sends the answers.

    Parameters
    ----------
    parameters, buffers: the tensors that this rank holds.
    rule: the server's part of the algorithm.
    clients: the number of clients, which are numbered from 0.
    agreed: the text about model and method that each client must send in its HELLO.
    above: the connection to another server of which this server is a client; None if there is none.
    save: saves the state of this rank under a number that the clients choose.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        rule: Rule,
        clients: int,
        *,
        agreed: str = "",
        above: Connection | None = None,
        save: Callable[[int], object] = lambda number: None,
    ):
        self._parameters, self._buffers = parameters, buffers
        self._packing = Packing([*parameters, *buffers])
        self._rule, self._agreed, self._above, self._save = rule, agreed, above, save
        self.active = set(range(clients))
        """The active clients."""
        self._met: list[int] = []
        self._numbers: set[int] = set()
        """The numbers under which the clients that have met want the state to be saved."""
        self._pending: dict[int, tuple[Kind, list[Tensor | None], int, float | None]] = {}
        """Requests, by client, for an update that waits for requests of other clients."""
        self.steps: Counter[int] = Counter()
        """The number of steps of each client whose updates were handled."""
        self.report = Report()

    @property
    def stopped(self) -> bool:
        """Return whether validation has ended the training; updates are ignored then."""
        above = self._above is not None and self._above.stopped
        return above or self.report.stopped is not None

    def handle(self, client: int, request: Message) -> Due:
        """Handle a client's request. Return the answers to send now, each with its client's number.

        An answer may be for a client that has waited for this one. Raises MalformedRequest for a
        message that is no request, and ValueError if clients train another model, or save under
        different numbers.
        """
        kind = self._kind(request)
        if kind in self._rule.kinds:
            return self._take(client, kind, request)
        if kind == Kind.HELLO:
            self._check(client, request)
            return [(client, self._answer(self._state(), client))]
        if kind == Kind.FETCH:
            return [(client, self._answer(self._own()))]
        if kind == Kind.STATE:
            return [(client, self._answer(self._state()))]
        if kind in (Kind.MEET, Kind.SAVE):
            self._met.append(client)
            self._numbers |= {request.numbers[3]} if kind == Kind.SAVE else set()
            return self._settled()
        if kind == Kind.DONE:
            self.active.discard(client)
            return [(client, self._answer()), *self._settled()]
        raise MalformedRequest(f"a {kind.name}, which this method does not know")

    def _kind(self, request: Message) -> Kind:
        """Return the kind of a request; raise MalformedRequest if its numbers make no sense."""
        number, version, samples, steps, *_ = request.numbers
        known = number in set(Kind)
        if not known or not 0 <= version <= self.report.updates or samples < 0 or steps < 0:
            raise MalformedRequest(f"the numbers {request.numbers} are those of no request")
        return Kind(number)

    def drop(self, client: int, why: str) -> Due:
        """Go on without a client that was lost, and return the answers that waited for it alone.

        `why` is the reason, for the report.
        """
        if client in self.active:
            self.active.discard(client)
            self.report.lost[client] = why
        self._pending.pop(client, None)
        return self._settled()

    def _take(self, client: int, kind: Kind, request: Message) -> Due:
        _, version, samples, steps, *_ = request.numbers
        try:
            tensors = self._packing.unpack(request.payload)
        except ValueError as error:
            raise MalformedRequest(str(error)) from error
        if self.stopped:  # the parameters that were validated last are the result
            return self._replies([(client, kind)], [None for _ in self._parameters])
        self._average_buffers(tensors[len(self._parameters) :])
        self.report.requests[client] += 1
        self.report.staleness[self.report.updates - version] += 1
        self.steps[client] = max(self.steps[client], steps)
        parameters = tensors[: len(self._parameters)]
        self._pending[client] = kind, parameters, samples, loss_in(request)
        return self._settled()

    def _settled(self) -> Due:
        """Do the updates and meetings for which all clients are ready, and return their answers."""
        due: Due = []
        working = self.active.difference(self._met)
        if self._pending and (not self._rule.waits or working <= self._pending.keys()):
            due += self._update()
        if self._met and self.active.issubset(self._met):
            self._meet()
            due += [(client, self._answer()) for client in self._met if client in self.active]
            self._met.clear()
        return due

    def _meet(self) -> None:
        """Wait for clients of the other servers to meet, and save the state if clients asked to."""
        if len(self._numbers) > 1:
            numbers = ", ".join(map(str, sorted(self._numbers)))
            raise ValueError(f"workers save under the numbers {numbers}; give all the same")
        for number in self._numbers:
            self._rule.finish()
            if self._above is not None:
                self._above.ask(Kind.SAVE, steps=number)
            self._save(number)
        if self._above is not None and not self._numbers:
            self._above.ask(Kind.MEET)
        self._numbers.clear()

    def _update(self) -> Due:
        """Apply all pending updates as one; return answers to clients that asked for parameters."""
        pending, self._pending = self._pending, {}
        # In the order of the clients, so that sums do not depend on the order of arrival.
        ordered = sorted(pending.items())
        if self._above is not None:
            for _, (_, _, samples, loss) in ordered:
                self._above.note(loss, samples)
        pull = self._rule.update([(tensors, samples) for _, (_, tensors, samples, _) in ordered])
        report = self.report
        report.updates += 1
        report.samples += sum(samples for _, (_, _, samples, _) in ordered)
        report.history.training += [
            TrainingLoss(report.updates, report.samples, report.history.seconds, loss, client)
            for client, (_, _, _, loss) in ordered
            if loss is not None
        ]
        return self._replies([(client, kind) for client, (kind, *_) in ordered], pull)

    def _replies(self, asked: Sequence[tuple[int, Kind]], pull: Sequence[Tensor | None]) -> Due:
        """Return answers to clients that asked for parameters, or for the pull on theirs."""
        due = []
        for client, kind in asked:
            if kind == Kind.PULL:
                due.append((client, self._answer([*pull, *(None for _ in self._buffers)])))
            elif kind == Kind.PUSH_AND_FETCH:
                due.append((client, self._answer(self._own())))
        return due

    def _average_buffers(self, theirs: Sequence[Tensor | None]) -> None:
        """Move the server's buffers towards those of a client by 1 / (number of active clients).

        Of integers, the larger one of each pair is kept.
        """
        for own, other in zip(self._buffers, theirs, strict=True):
            if other is None:
                continue
            if own.is_floating_point():
                own.lerp_(other, 1 / max(1, len(self.active)))
            else:
                torch.maximum(own, other, out=own)

    def _own(self) -> list[Tensor | None]:
        return [*self._parameters, *(None for _ in self._buffers)]

    def _state(self) -> list[Tensor | None]:
        if self._above is not None:
            return self._above.ask(Kind.STATE).tensors
        return [*self._parameters, *self._buffers]

    def _answer(self, tensors: list[Tensor | None] | None = None, client: int = -1) -> Message:
        report = self.report
        counts = report.updates, report.samples, self.steps[client]
        numbers = (Kind.ANSWER, *counts, self.stopped)
        return message(numbers, None if tensors is None else self._packing.pack(tensors))

    def _check(self, client: int, request: Message) -> None:
        theirs = bytes(request.payload.numpy()).decode(errors="replace")
        if theirs != self._agreed:
            raise ValueError(
                f"client {client} trains {theirs!r}, the server serves {self._agreed!r}; build the "
                "same model and method on every rank"
            )
