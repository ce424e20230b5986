"""A server: it holds parameters, takes in what clients bring, and decides whom to answer when.

It knows nothing of links and ranks: a request comes in, and the answers that are due go out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from distconv.training.parcel import Packing
from distconv.training.requests import Asking, Kind
from distconv.transport.link import Message, message

Due = list[tuple[int, Message]]
"""Clients, and the answers that they are to get now."""


@dataclass
class Report:
    """The course of training as a server has seen it.

    Attributes
    ----------
    updates: how often the parameters have changed.
    samples: how many the updates stand for.
    staleness: how many updates have come with how many others in between, since the client had got
        the parameters that it belongs to.
    requests: how many updates each client has brought, by its number at this server.
    lost: the clients that have been dropped, and why.
    """

    updates: int = 0
    samples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)
    lost: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        mean = sum(n * k for n, k in self.staleness.items()) / max(1, self.staleness.total())
        lines = [f"{self.updates} updates by {self.samples} samples, staleness {mean:.2f} in mean"]
        most = max(self.staleness.values(), default=1)
        for n in sorted(self.staleness):
            count = self.staleness[n]
            lines.append(f"  {n:4d} {'#' * max(1, round(40 * count / most))} {count}")
        lines += [f"  client {client} was dropped: {why}" for client, why in self.lost.items()]
        return "\n".join(lines)


class Rule(Protocol):
    """The part of a method that a server takes: it takes in what clients bring."""

    kinds: tuple[Kind, ...]
    """The requests that bring something."""
    optimizer: Any
    """The server's optimizer, or None."""
    scheduler: Any
    """That of the optimizer, or None."""
    waits: bool
    """Whether an update takes what all clients at work bring; otherwise each makes one."""

    def update(self, brought: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Change the parameters by what clients have brought, each with its samples.

        Return what the client gets that has asked for a PULL, in place of the parameters.
        """

    def finish(self) -> None:
        """Bring the server above, where there is one, what it has not got yet."""


class Server:
    """One shard of a server.

    Parameters
    ----------
    parameters, buffers: what this shard holds, in the order of the model.
    places: of these in the messages of this shard, where they are mixed.
    rule: the method.
    clients: how many there are; they are known by numbers from 0.
    agreed: what a client has to say in its HELLO.
    above: the server of which this one is a client, where there is one.
    save: saves the state of this shard under a number that the clients give.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        rule: Rule,
        clients: int,
        *,
        agreed: str = "",
        above: Asking | None = None,
        save: Callable[[int], object] = lambda number: None,
    ):
        self._parameters, self._buffers = parameters, buffers
        self._packing = Packing([*parameters, *buffers])
        self._rule, self._agreed, self._above, self._save = rule, agreed, above, save
        self.active = set(range(clients))
        """The clients at work."""
        self._met: list[int] = []
        self._numbers: set[int] = set()
        """Those under which the clients that have met want the state to be saved."""
        self._pending: dict[int, tuple[Kind, list[Tensor | None], int]] = {}
        """Requests to an update that waits for those of others, by client."""
        self.steps: Counter[int] = Counter()
        """The number of steps of each client that have been taken in."""
        self.report = Report()

    def handle(self, client: int, request: Message) -> Due:
        """Take in a request, and return the answers that are due.

        Raises
        ------
        ValueError
            Where a client trains another model, or by another method, or where clients want the
            state to be saved under different numbers.
        """
        kind = Kind(request.numbers[0])
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
        raise ValueError(f"client {client} asks for {kind.name}, which this method does not know")

    def drop(self, client: int, why: str) -> Due:
        """Go on without a client; return the answers that the others have waited for."""
        if client in self.active:
            self.active.discard(client)
            self.report.lost[client] = why
        self._pending.pop(client, None)
        return self._settled()

    def _take(self, client: int, kind: Kind, request: Message) -> Due:
        _, version, samples, steps, *_ = request.numbers
        tensors = self._packing.unpack(request.payload)
        self._average_buffers(tensors[len(self._parameters) :])
        self.report.requests[client] += 1
        self.report.staleness[self.report.updates - version] += 1
        self.steps[client] = max(self.steps[client], steps)
        self._pending[client] = kind, tensors[: len(self._parameters)], samples
        return self._settled()

    def _settled(self) -> Due:
        """Do what has waited for clients that now need not be waited for any more."""
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
        """Meet the clients of other servers, and save the state where that is asked for."""
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
        """Take in what is pending, and answer those who have asked for parameters."""
        pending, self._pending = self._pending, {}
        # In the order of the clients, so that sums do not depend on who comes first.
        ordered = sorted(pending.items())
        pull = self._rule.update([(tensors, samples) for _, (_, tensors, samples) in ordered])
        self.report.updates += 1
        self.report.samples += sum(samples for _, (_, _, samples) in ordered)
        due = []
        for client, (kind, _, _) in ordered:
            if kind == Kind.PULL:
                due.append((client, self._answer([*pull, *(None for _ in self._buffers)])))
            elif kind == Kind.PUSH_AND_FETCH:
                due.append((client, self._answer(self._own())))
        return due

    def _average_buffers(self, theirs: Sequence[Tensor | None]) -> None:
        """Move the buffers towards those of a client, by its share; take over whole numbers."""
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
        numbers = (Kind.ANSWER, self.report.updates, self.report.samples, self.steps[client])
        return message(numbers, None if tensors is None else self._packing.pack(tensors))

    def _check(self, client: int, request: Message) -> None:
        theirs = bytes(request.payload.numpy()).decode()
        if theirs != self._agreed:
            raise ValueError(
                f"client {client} trains {theirs!r}, the server serves {self._agreed!r}; build the "
                "same model and method on every rank"
            )
