"""Requests of clients to a server, and the connection of a client to all ranks of its server."""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from distconv.grid.stall import time_limit
from distconv.grid.words import user_line
from distconv.transport.link import Link, LinkLost, LinkMessage, LinkSilent, message

# `Packing`: tensors of known shapes and types in one message of bytes; some may be missing.


_ALIGNMENT = 16
"""Bytes to which each tensor in a message is aligned, so that it can be used in place."""


class Packing:
    """Pack tensors, some of which may be missing, into one message of bytes, and unpack messages.

    `tensors` are examples of the shapes and types, in order. A message has a tensor, or None, for
    each example.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._kinds = [(t.shape, t.dtype, t.numel() * t.element_size()) for t in tensors]
        self._begin = _aligned(len(tensors))

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return a message: the bytes of the tensors, copied to host memory from any device."""
        size = self._begin
        for (_, _, nbytes), tensor in zip(self._kinds, tensors, strict=True):
            size += _aligned(nbytes) if tensor is not None else 0
        message = torch.zeros(size, dtype=torch.uint8)
        place = self._begin
        for i, tensor in enumerate(tensors):
            if tensor is None:
                continue
            shape, dtype, nbytes = self._kinds[i]
            message[i] = 1
            message[place : place + nbytes].view(dtype).view(shape).copy_(tensor.detach())
            place += _aligned(nbytes)
        return message

    def unpack(self, message: Tensor) -> list[Tensor | None]:
        """Return views of the tensors in a message; raise ValueError if its size is wrong."""
        there = message[: len(self._kinds)].tolist()
        tensors: list[Tensor | None] = []
        place = self._begin
        for present, (shape, dtype, nbytes) in zip(there, self._kinds, strict=True):
            if not present:
                tensors.append(None)
                continue
            if place + nbytes > len(message):
                break
            tensors.append(message[place : place + nbytes].view(dtype).view(shape))
            place += _aligned(nbytes)
        if place != len(message) or len(tensors) != len(self._kinds):
            raise ValueError(f"a message of {len(message)} bytes is none of {len(there)} tensors")
        return tensors


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def dealt_out(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide items among parts of about equal size, and return the indices of each part's items.

    `sizes` has the size of each item, `parts` is the number of parts. Each item, the largest first,
    is assigned to the part with the smallest total so far; among equal parts, to the first.
    """
    totals = [(0, part) for part in range(parts)]
    items: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, part = min(totals)
        items[part].append(place)
        totals[part] = total + sizes[place], part
    return [sorted(part) for part in items]


class MessageKind(IntEnum):
    """The kind of a message between client and server, the first number in the message.

    The further numbers of a request are the version of the client's parameters, the samples since
    its last update, and its number of steps. An update with a training loss also has the bits of
    this float64, and 1. The further numbers of an answer are the version of the parameters sent,
    the samples that the server has received in all, the steps of this client in earlier runs (for
    HELLO), and 1 if validation has ended the training.
    """

    HELLO = 1
    """Ask for parameters and buffers, and send the description that must equal the server's."""
    PUSH = 2
    """Send gradients and buffers; not answered."""
    FETCH = 3
    """Ask for parameters."""
    PUSH_AND_FETCH = 4
    PULL = 5
    """Send parameters and buffers, and ask for the tensors to subtract from the parameters."""
    STATE = 6
    """Ask for parameters and buffers to evaluate or save, not to train with."""
    MEET = 7
    """Ask for an answer once all active clients have sent MEET."""
    DONE = 8
    """Report that this client has finished; answered once the server has handled its updates."""
    LEAVE = 9
    """Report that this client has failed; not answered."""
    ANSWER = 10
    FAILED = 11
    """Report, instead of an answer, that the server has failed, and why."""
    SAVE = 12
    """As MEET, and ask the server to save its state, under the number sent as `steps`."""


_RENEWING = (MessageKind.HELLO, MessageKind.FETCH, MessageKind.PUSH_AND_FETCH, MessageKind.PULL)
"""The requests whose answer has new parameters, so that the client records their version."""

_AWAITED = {
    MessageKind.HELLO: "the parameters to begin with",
    MessageKind.PUSH: "the server to take gradients",
    MessageKind.FETCH: "parameters",
    MessageKind.PUSH_AND_FETCH: "the parameters after its gradients",
    MessageKind.PULL: "the pull on its parameters",
    MessageKind.STATE: "the parameters and buffers of the server",
    MessageKind.MEET: "all workers to arrive",
    MessageKind.SAVE: "all workers to arrive, and the server to save its state",
    MessageKind.DONE: "the server to take note of its end",
}
"""For each kind of request, the event for which a client waits, in words for messages."""

_LOSS, _BITS = struct.Struct("<d"), struct.Struct("<q")

_FAREWELL = 5.0
"""Seconds allowed for sending a last message."""


class ServerLost(RuntimeError):
    """The server has ended, failed, or kept a client waiting for too long.

    Raised on every rank of a worker.
    """


class Answer(NamedTuple):
    """The answer of a server, joined from the answers of all its ranks.

    Attributes
    ----------
    tensors: parameters and then buffers, in the order of the model; None for each tensor that was
        not sent.
    samples: the number of samples that the server has received in all.
    steps: the number of steps that the client took in earlier runs; in an answer to HELLO only.
    """

    tensors: list[Tensor | None]
    samples: int
    steps: int


class ServerParts:
    """The division of a model's tensors over the ranks of a server, the same on every rank.

    One rank holds all elements of a parameter or buffer, so that optimizers can compute the norms
    of layers. Ranks hold about equal numbers of bytes. Raises ValueError if there are fewer
    parameters than ranks.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], ranks: int):
        if len(parameters) < ranks:
            raise ValueError(
                f"Team: servers={ranks} is more than the {len(parameters)} parameters of the "
                "model, and every server holds at least one; choose fewer servers"
            )
        tensors = [*parameters, *buffers]
        self.tensors = len(tensors)
        own = dealt_out([p.nbytes for p in parameters], ranks)
        others = dealt_out([x.nbytes for x in buffers], ranks)
        self.parts = [
            [*first, *(len(parameters) + i for i in second)]
            for first, second in zip(own, others, strict=True)
        ]
        """For each rank of the server, the indices of its tensors, parameters first."""
        self.packings = [Packing([tensors[i] for i in part]) for part in self.parts]

    def joined(self, payloads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return all tensors in the order of the model, None for each tensor that was not sent.

        `payloads` has the message of each rank of the server.
        """
        tensors: list[Tensor | None] = [None] * self.tensors
        for part, packing, payload in zip(self.parts, self.packings, payloads, strict=False):
            if payload.numel():
                for i, tensor in zip(part, packing.unpack(payload), strict=True):
                    tensors[i] = tensor
        return tensors


class Connection:
    """A client's links to the ranks of its server.

    Parameters
    ----------
    links: a link to each rank of the server.
    server_parts: the tensors that each rank of the server holds.
    agreed: a text about model and method, from `described`, which the server compares with its own.
    """

    def __init__(self, links: Sequence[Link], server_parts: ServerParts, agreed: str):
        self._links, self._parts, self._agreed = links, server_parts, agreed
        self._limit = time_limit()
        self.stopped = False
        """Whether the server has answered that validation has ended the training."""
        self._loss, self._weight = 0.0, 0
        """The sum of training losses since the last update, weighted by samples, and the weight."""
        self._versions = [0] * len(links)
        """For each rank of the server, the version of the parameters that this client has."""

    def note(self, loss: float | None, samples: int) -> None:
        """Record a mini-batch's training loss, if not None, to send with the next update."""
        if loss is not None and samples:
            self._loss += loss * samples
            self._weight += samples

    def ask(
        self,
        kind: MessageKind,
        tensors: Sequence[Tensor | None] | None = None,
        samples: int = 0,
        steps: int = 0,
    ) -> Answer:
        """Send a request to the server and return its answer.

        Parameters
        ----------
        kind: the kind of the request.
        tensors: the tensors to send, in the order of the model; None to send none.
        samples: the number of samples since this client's last update.
        steps: the number of this client's steps, or for SAVE the number of the state.

        The answer to a PUSH, which has none, is empty. Raises ServerLost if the server has ended.
        """
        return self.joined(self.answers(kind, tensors, samples, steps))

    def answers(
        self, kind: MessageKind, tensors: Sequence[Tensor | None] | None, samples: int, steps: int
    ) -> list[LinkMessage]:
        """Send a request to every rank of the server, and return their answers.

        The arguments are those of `ask`. Returns [] for a PUSH, which has no answer.
        """
        until = time.monotonic() + self._limit
        loss = () if tensors is None else self._mean_loss()
        try:
            for j, link in enumerate(self._links):
                head = (kind, self._versions[j], samples, steps, *loss)
                with suppress(LinkLost):  # found below, after the server's last message
                    link.send(message(head, self._payload(kind, j, tensors)))
            if kind == MessageKind.PUSH:
                for link in self._links:
                    link.flush(until)
                return []
            found = [link.receive(until) for link in self._links]
        except LinkSilent as error:
            raise ServerLost(self._silence(kind, error)) from error
        except LinkLost as error:
            raise ServerLost(
                f"the server has ended: {error}. Its last state is in the folder passed to "
                "`serve`; start the job again with resume=True"
            ) from error
        for j, answer in enumerate(found):
            if answer.numbers[0] == MessageKind.FAILED:
                raise ServerLost(bytes(answer.payload.numpy()).decode())
            if kind in _RENEWING:
                self._versions[j] = answer.numbers[1]
        return found

    def joined(self, found: Sequence[LinkMessage]) -> Answer:
        """Join the answers of the server's ranks to one `Answer`, with the smallest counts.

        `found` has an answer of each rank of the server, or is empty for a request without an
        answer.
        """
        if not found:
            return Answer([None] * self._parts.tensors, 0, 0)
        samples = min(answer.numbers[2] for answer in found)
        steps = min(answer.numbers[3] for answer in found)
        self.stopped |= any(answer.numbers[4] for answer in found)
        return Answer(self._parts.joined([answer.payload for answer in found]), samples, steps)

    def _mean_loss(self) -> tuple[int, ...]:
        """Return the mean of the recorded losses as numbers of a request, and clear the record.

        Returns () if no loss is recorded.
        """
        loss, weight = self._loss, self._weight
        self._loss, self._weight = 0.0, 0
        if not weight:
            return ()
        (bits,) = _BITS.unpack(_LOSS.pack(loss / weight))
        return bits, 1

    def _silence(self, kind: MessageKind, error: LinkSilent) -> str:
        waits_for_workers = kind in (MessageKind.MEET, MessageKind.SAVE, MessageKind.PUSH_AND_FETCH)
        return (
            f"waited for {_AWAITED[kind]} for more than DISTCONV_TIMEOUT={self._limit:g} seconds "
            f"at {user_line()}: {error}. The server hangs"
            + (", or a worker hangs that all others wait for" if waits_for_workers else "")
            + ", or the limit that DISTCONV_TIMEOUT sets is too short"
        )

    def _payload(
        self, kind: MessageKind, j: int, tensors: Sequence[Tensor | None] | None
    ) -> Tensor:
        if kind == MessageKind.HELLO:
            return in_bytes(self._agreed)
        if tensors is None:
            return in_bytes("")
        return self._parts.packings[j].pack([tensors[i] for i in self._parts.parts[j]])


@dataclass(eq=False)
class Client(ABC):
    """Base class of the client's part of a training algorithm such as `Downpour`.

    Attributes
    ----------
    method: the algorithm with its settings, such as a `Downpour`.
    parameters, buffers: the tensors of the model on this rank.
    optimizer: steps with the client's own gradients; None if only the server changes parameters.
    server: the connection to the server.
    steps: the steps that the client has taken, in earlier runs too.
    """

    method: Any
    parameters: Sequence[Any]
    buffers: Sequence[Tensor]
    optimizer: Optimizer | None
    server: Connection
    steps: int
    samples: int = 0
    """The number of samples since the last update that was sent."""

    @abstractmethod
    def step(self, samples: int) -> None:
        """Take a step with gradients of `samples` samples, and set the gradients to None."""

    @abstractmethod
    def flush(self) -> None:
        """Send outstanding updates to the server."""


def copy_sent(tensors: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Copy values from a message into tensors, except values that were not sent and are None."""
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                tensor.detach().copy_(value)


@contextmanager
def holding(tensors: Sequence[Tensor], values: Sequence[Tensor | None]) -> Iterator[None]:
    """Set `tensors` to `values` in a `with` block, and restore their own values afterwards."""
    own = [tensor.detach().clone() for tensor in tensors]
    copy_sent(tensors, values)
    try:
        yield
    finally:
        copy_sent(tensors, own)


def leave(above: Sequence[Link], below: Sequence[Link], why: str) -> None:
    """Report to servers `above` and clients `below` that this rank has failed; close all links.

    `why` is the reason, which is sent to the clients.
    """
    until = time.monotonic() + _FAREWELL
    for links, last in ((above, message((MessageKind.LEAVE,))), (below, failed(why))):
        for link in links:
            with suppress(LinkLost):
                link.send(last)
                link.flush(until)
            link.close()


def loss_in(request: LinkMessage) -> float | None:
    """Return the training loss in the message of an update; None if it has no loss."""
    bits, there = request.numbers[4:6]
    loss: float = _LOSS.unpack(_BITS.pack(bits))[0]
    return loss if there else None


def failed(why: str) -> LinkMessage:
    """Return the message to clients that their server has failed, with the reason."""
    return message((MessageKind.FAILED,), in_bytes(f"the server has failed: {why}"))


def in_bytes(text: str) -> Tensor:
    """Return a text as the payload of a message, UTF-8 bytes in a tensor."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
