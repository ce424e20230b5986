"""A server: it holds parameters, handles requests of clients, and decides when to answer.

`Server` does not communicate with its clients: each call gets a request and returns the answers to
send.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from distconv.data.checkpoint import (
    checkpoints_in,
    load_checkpoint,
    newest_whole,
    save_checkpoint,
    step_of,
)
from distconv.training.history import History, TrainingLoss
from distconv.training.requests import Client, Connection, MessageKind, Packing, copy_sent, loss_in
from distconv.training.team import SERVER_FOLDER
from distconv.transport.link import LinkMessage, message

Due = list[tuple[int, LinkMessage]]
"""Pairs of a client's number and the answer to send to this client now."""


class MalformedRequest(ValueError):
    """A client has sent bytes that are not a request. The state of the server is unchanged."""


@dataclass
class Report:
    """The course of a training with a server, as `serve` returns it.

    Attributes
    ----------
    updates: the number of changes of the parameters.
    samples: the number of samples behind these updates.
    staleness: a histogram of the age of updates: for each n, the number of updates that were
        computed with parameters which n other updates had changed since.
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


class UpdateRule(ABC):
    """The server's part of a training algorithm, such as `Downpour`, that changes parameters.

    Attributes
    ----------
    kinds: the kinds of requests that carry updates.
    optimizer, scheduler: the server's optimizer and its scheduler, or None.
    waits: whether an update waits for requests of all active clients; otherwise each request is an
        update.
    client: this server as a client of another server; None without another server.
    """

    kinds: tuple[MessageKind, ...]
    optimizer: Any = None
    scheduler: Any = None
    waits = False
    client: Client | None = None

    @abstractmethod
    def update(self, brought: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Change the parameters by updates from one or more clients.

        `brought` has, for each client, its parameters or gradients and the number of samples behind
        them. Returns the tensors to send, instead of the parameters, to a client whose request was
        a PULL.
        """

    def flush(self) -> None:
        """Send outstanding updates to the other server of which this server is a client, if any."""
        if self.client is not None:
            self.client.flush()


class Server:
    """The state of one rank of a server: its tensors, and the requests that wait for an answer.

    A server decides when to answer a request; the caller sends the answers.

    Parameters
    ----------
    parameters, buffers: the tensors that this rank holds.
    rule: the server's part of the algorithm.
    clients: the number of clients, which are numbered from 0.
    agreed: the text about model and method that each client must send in its HELLO.
    above: the connection to another server of which this server is a client; None if there is none.

    Attributes
    ----------
    tensors: the parameters, and then the buffers.
    save: a function that saves the state of this rank under a number that the clients choose.
    active: the active clients.
    steps: the number of steps of each client whose updates were handled.
    report: the course of the training so far.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        rule: UpdateRule,
        clients: int,
        *,
        agreed: str = "",
        above: Connection | None = None,
    ):
        self._parameters, self._buffers = parameters, buffers
        self.tensors = [*parameters, *buffers]
        self._packing = Packing(self.tensors)
        self._rule, self._agreed, self.above = rule, agreed, above
        self.save: Callable[[int], object] = lambda number: None
        self.active = set(range(clients))
        self._met: list[int] = []
        self._numbers: set[int] = set()
        """The numbers under which the clients that have met want the state to be saved."""
        self._pending: dict[int, tuple[MessageKind, list[Tensor | None], int, float | None]] = {}
        """Requests, by client, for an update that waits for requests of other clients."""
        self.steps: Counter[int] = Counter()
        self.report = Report()

    @property
    def stopped(self) -> bool:
        """Return whether validation has ended the training; updates are ignored then."""
        above = self.above is not None and self.above.stopped
        return above or self.report.stopped is not None

    def handle(self, client: int, request: LinkMessage) -> Due:
        """Handle a client's request. Return the answers to send now, each with its client's number.

        Some answers may be for clients that have waited for this client. Raises MalformedRequest
        for a message that is not a request, and ValueError if clients train another model, or save
        under different numbers.
        """
        kind = self._kind(request)
        if kind in self._rule.kinds:
            return self._note_update(client, kind, request)
        if kind == MessageKind.HELLO:
            self._check(client, request)
            return [(client, self._answer(self._state(), client))]
        if kind == MessageKind.FETCH:
            return [(client, self._answer(self._own()))]
        if kind == MessageKind.STATE:
            return [(client, self._answer(self._state()))]
        if kind in (MessageKind.MEET, MessageKind.SAVE):
            self._met.append(client)
            if kind == MessageKind.SAVE:
                self._numbers.add(request.numbers[3])
            return self._due_answers()
        if kind == MessageKind.DONE:
            # A worker that has ended: no rank waits for it from now on.
            self.active.discard(client)
            return [(client, self._answer()), *self._due_answers()]
        raise MalformedRequest(f"a {kind.name}, which this method does not support")

    def _kind(self, request: LinkMessage) -> MessageKind:
        """Return the kind of a request; raise MalformedRequest if its numbers are out of range."""
        number, version, samples, steps, *_ = request.numbers
        known = number in set(MessageKind)
        if not known or not 0 <= version <= self.report.updates or samples < 0 or steps < 0:
            raise MalformedRequest(f"the numbers {request.numbers} are those of no request")
        return MessageKind(number)

    def drop(self, client: int, why: str) -> Due:
        """Remove a lost client, and return the answers that had waited only for this client.

        `why` is the reason, for the report.
        """
        if client in self.active:
            self.active.discard(client)
            self.report.lost[client] = why
        self._pending.pop(client, None)
        return self._due_answers()

    def _note_update(self, client: int, kind: MessageKind, request: LinkMessage) -> Due:
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
        return self._due_answers()

    def _due_answers(self) -> Due:
        """Run updates and meetings whose clients have all sent requests; return the answers.

        A meeting is a barrier of all active clients, for requests of MEET or SAVE.
        """
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
        """Save the state if clients asked for it, and wait until clients of other servers meet.

        Raises ValueError if clients asked to save under different numbers.
        """
        if len(self._numbers) > 1:
            numbers = ", ".join(map(str, sorted(self._numbers)))
            raise ValueError(
                f"workers save under the numbers {numbers}; pass the same number in all workers"
            )
        for number in self._numbers:
            self._rule.flush()
            if self.above is not None:
                self.above.ask(MessageKind.SAVE, steps=number)
            self.save(number)
        if self.above is not None and not self._numbers:
            self.above.ask(MessageKind.MEET)
        self._numbers.clear()

    def _update(self) -> Due:
        """Apply all pending updates as one; return answers to clients that asked for parameters."""
        pending, self._pending = self._pending, {}
        # In the order of the clients, so that sums do not depend on the order of arrival.
        ordered = sorted(pending.items())
        if self.above is not None:
            for _, (_, _, samples, loss) in ordered:
                self.above.note(loss, samples)
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

    def _replies(
        self, asked: Sequence[tuple[int, MessageKind]], pull: Sequence[Tensor | None]
    ) -> Due:
        """Return the answers to clients that asked for parameters, or by PULL for `pull`."""
        due = []
        for client, kind in asked:
            if kind == MessageKind.PULL:
                due.append((client, self._answer([*pull, *(None for _ in self._buffers)])))
            elif kind == MessageKind.PUSH_AND_FETCH:
                due.append((client, self._answer(self._own())))
        return due

    def _average_buffers(self, theirs: Sequence[Tensor | None]) -> None:
        """Interpolate the server's buffers towards a client's by 1 / (number of active clients).

        Buffers of integers become the elementwise maximum of both.
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
        if self.above is not None:
            return self.above.ask(MessageKind.STATE).tensors
        return list(self.tensors)

    def _answer(self, tensors: list[Tensor | None] | None = None, client: int = -1) -> LinkMessage:
        report = self.report
        counts = report.updates, report.samples, self.steps[client]
        numbers = (MessageKind.ANSWER, *counts, self.stopped)
        return message(numbers, None if tensors is None else self._packing.pack(tensors))

    def _check(self, client: int, request: LinkMessage) -> None:
        theirs = bytes(request.payload.numpy()).decode(errors="replace")
        if theirs != self._agreed:
            raise ValueError(
                f"client {client} trains {theirs!r}, but the server serves {self._agreed!r}; "
                "build the same model and method on every rank"
            )


# The checkpoints of servers: each rank of a server saves its tensors in a folder of its own.


@dataclass(eq=False)
class ServerCheckpoints:
    """The checkpoints of one rank of a server: of its tensors, its optimizer, and its counts.

    Checkpoints are saved in `folder`; None to save nothing. The state is saved every `save_every`
    updates, or if `save_every` is None, when workers ask for it.
    """

    part: nn.Module
    rule: UpdateRule
    server: Server
    folder: Path | None
    save_every: int | None
    keep: int
    history: Path | None
    """The file for the history of losses; None to write none."""
    _saved: tuple[int, int] = field(default=(-1, 0), init=False)
    """The numbers of updates and validations in the last checkpoint."""

    def save_if_due(self) -> None:
        """Save the state if `save_every` updates were made since the last checkpoint."""
        if (
            self.save_every
            and self.server.report.updates - max(self._saved[0], 0) >= self.save_every
        ):
            self.save()

    def save(self) -> None:
        """Save the state under the number of updates unless saved already; write the history."""
        if self.folder is not None and self.save_every and self._counts() != self._saved:
            self._save(self.folder, self.server.report.updates)
        self.write_history()

    def save_under(self, number: int) -> None:
        """Save the state under a number that the workers chose.

        Raises ValueError if the server has no folder, or saves every `save_every` updates.
        """
        if self.folder is None or self.save_every:
            raise ValueError(
                f"Worker.save({number}): the server saves "
                + ("nothing" if self.folder is None else f"in every {self.save_every}-th update")
                + "; call serve with a folder and save_every=None"
            )
        self._save(self.folder, number)
        self.write_history()

    def write_history(self) -> None:
        """Write the history of losses to its file, if there are losses."""
        report = self.server.report
        if self.history is not None and (report.history.training or report.history.validation):
            report.history.write(self.history, report.stopped)

    def _save(self, folder: Path, number: int) -> None:
        report = self.server.report
        save_checkpoint(
            folder,
            self.part,
            self.rule.optimizer,
            self.rule.scheduler,
            step=number,
            keep=self.keep,
            extra={
                "updates": report.updates,
                "samples": report.samples,
                "staleness": dict(report.staleness),
                "steps": dict(self.server.steps),
                "history": report.history.state_dict(),
            },
        )
        self._saved = self._counts()

    def _counts(self) -> tuple[int, int]:
        report = self.server.report
        return report.updates, len(report.history.validation)

    def begin(self, resume: bool | str | os.PathLike[str]) -> None:
        """Load the saved state to `resume`, or else raise FileExistsError if there is one.

        `resume` is True for the last state in the folder, or the path of a checkpoint. The history
        file of another run, which left no checkpoint, is renamed. If this server is a client of
        another server, its tensors become the other server's.
        """
        if resume:
            self._load(None if resume is True else Path(resume))
        else:
            self._check_new()
        if self.history is not None and self.history.exists() and not self.server.report.updates:
            names = (self.history.with_stem(f"{self.history.stem}-{n}") for n in count(1))
            self.history.rename(next(name for name in names if not name.exists()))
        if self.server.above is not None:
            copy_sent(self.server.tensors, self.server.above.ask(MessageKind.HELLO).tensors)

    def _check_new(self) -> None:
        """Raise `FileExistsError` if the folder holds checkpoints, which belong to another run."""
        saved = [] if self.folder is None else checkpoints_in(self.folder)
        if saved and step_of(saved[0]) > 0:
            raise FileExistsError(
                f"serve: {saved[0]} belongs to another run; resume that run by resume=True, "
                "choose another folder, or remove the file"
            )

    def _load(self, chosen: Path | None) -> None:
        """Load the checkpoint at the path `chosen`, or else the last one in the folder, if any.

        Raises ValueError if there is no folder, and DataError if the checkpoint cannot be read, or
        is of another model or optimizer.
        """
        path = chosen or self.folder
        if path is None:
            raise ValueError("serve: resume=True needs folder=, where the state was saved")
        rule, server = self.rule, self.server
        missing_ok = chosen is None
        found = load_checkpoint(
            path, self.part, rule.optimizer, rule.scheduler, missing_ok=missing_ok
        )
        if found is not None:
            server.report.updates = found.extra["updates"]
            server.report.samples = found.extra["samples"]
            server.report.staleness = Counter(found.extra["staleness"])
            server.steps = Counter(found.extra["steps"])
            server.report.history.load_state_dict(found.extra["history"])
            self._saved = self._counts()


def server_state(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the last state that a server saved, joined from all its ranks, as a state_dict.

    Raises FileNotFoundError if there is none.

    Examples
    --------
    >>> from functools import partial
    >>> team = dc.training.Team()
    >>> method = dc.training.Downpour(partial(torch.optim.SGD, lr=0.1))
    >>> net = nn.Linear(4, 1)
    >>> if team.serves:
    ...     report = dc.training.serve(team, net, method, folder="run")
    ...     state = dc.training.server_state("run")  # the plain state_dict
    ... else:
    ...     model = dc.parallelize(net, team.grid)
    ...     with dc.training.Worker(team, model, method) as worker:
    ...         model(dc.distribute_tensor(torch.ones(2, 4), team.grid)).mean().backward()
    ...         worker.step(samples=2)
    """
    state: dict[str, Tensor] = {}
    for place in sorted(filter(Path.is_dir, Path(folder).glob(SERVER_FOLDER.format(rank="*")))):
        _, content = newest_whole(place, True, {})
        if content:
            stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            state |= stored["model"]
    if not state:
        raise FileNotFoundError(
            f"{folder} holds no state of a server; pass the folder that was passed to `serve`"
        )
    return state
