"""The requests of clients to their server, and how a client asks all shards of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distconv.grid.stall import time_limit
from distconv.grid.whereabouts import user_line
from distconv.training.parcel import Packing, dealt_out
from distconv.transport.link import (
    Link,
    LinkLost,
    LinkSilent,
    Message,
    flush,
    message,
    receive,
)


class Kind(IntEnum):
    """The first number of a message.

    Behind it a client says of which version its parameters are, how many samples it has seen since
    it last said so, and how many steps it has taken. The server says of which version the
    parameters are that it sends, how many samples it has got in all, and to HELLO how many steps of
    this client it knew before.
    """

    HELLO = 1
    """Ask for parameters and buffers, and bring what client and server have to have in common."""
    PUSH = 2
    """Bring gradients and buffers; not answered."""
    FETCH = 3
    """Ask for parameters."""
    PUSH_AND_FETCH = 4
    PULL = 5
    """Bring parameters and buffers, and ask for the pull on the parameters."""
    STATE = 6
    """Ask for parameters and buffers, which the client does not train with."""
    MEET = 7
    """Ask to be answered when all clients that are at work have asked so."""
    DONE = 8
    """Say that nothing more will come; answered when all is taken in."""
    LEAVE = 9
    """Say that this client has failed; not answered."""
    ANSWER = 10
    FAILED = 11
    """Say, in place of an answer, that the server has failed, and why."""
    SAVE = 12
    """Ask as by MEET, and for the server to save its state under the number of steps before."""


_RENEWING = (Kind.HELLO, Kind.FETCH, Kind.PUSH_AND_FETCH, Kind.PULL)
"""The requests after which a client has parameters of the version that the answer tells."""

_AWAITED = {
    Kind.HELLO: "the parameters to begin with",
    Kind.PUSH: "the server to take gradients",
    Kind.FETCH: "parameters",
    Kind.PUSH_AND_FETCH: "the parameters after its gradients",
    Kind.PULL: "the pull on its parameters",
    Kind.STATE: "the parameters and buffers of the server",
    Kind.MEET: "all workers to meet",
    Kind.SAVE: "all workers to meet, and the server to save its state",
    Kind.DONE: "the server to take note of its end",
}
"""What a client waits for, by its request."""

_FAREWELL = 5.0
"""Seconds that a last word may take to leave."""


class ServerLost(RuntimeError):
    """The server of this rank has ended, failed, or kept it waiting for too long.

    Raised on every rank of a worker.
    """


class Answer(NamedTuple):
    """The answer of a server.

    Attributes
    ----------
    tensors: in the order of the model, parameters and then buffers; None for what does not come.
    samples: how many the server has got in all.
    steps: how many of this client the server knew when it came.
    """

    tensors: list[Tensor | None]
    samples: int
    steps: int


class Asking(Protocol):
    """A way to ask a server."""

    def ask(
        self,
        kind: Kind,
        tensors: Sequence[Tensor | None] | None = None,
        samples: int = 0,
        steps: int = 0,
    ) -> Answer:
        """Bring tensors, in the order of the model, and return the answer, if there is to be one.

        Raises
        ------
        ServerLost
            Where the server has ended.
        """


class Shards:
    """Which tensors of a model each shard of its server holds; the same on every rank.

    Parameters are dealt out whole, so that layers keep their norms, to shards of about as many
    bytes; so are buffers.

    Parameters
    ----------
    parameters, buffers: of the model, in its order.
    shards: how many there are.

    Raises
    ------
    ValueError
        Where there are fewer parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], shards: int):
        if len(parameters) < shards:
            raise ValueError(
                f"Team: servers={shards} are more than the {len(parameters)} parameters of the "
                "model, of which each holds some; choose fewer"
            )
        tensors = [*parameters, *buffers]
        self.tensors = len(tensors)
        own, others = (
            dealt_out([t.numel() * t.element_size() for t in some], shards)
            for some in (parameters, buffers)
        )
        self.parts = [
            [*first, *(len(parameters) + i for i in second)]
            for first, second in zip(own, others, strict=True)
        ]
        """For each shard, the places of its tensors, parameters first."""
        self.packings = [Packing([tensors[i] for i in part]) for part in self.parts]

    def joined(self, payloads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what all shards have sent in the order of the model."""
        tensors: list[Tensor | None] = [None] * self.tensors
        for part, packing, payload in zip(self.parts, self.packings, payloads, strict=False):
            if payload.numel():
                for i, tensor in zip(part, packing.unpack(payload), strict=True):
                    tensors[i] = tensor
        return tensors


class Connection:
    """The links of one rank to the shards of its server; see `Asking`."""

    def __init__(self, links: Sequence[Link], shards: Shards, agreed: str):
        self._links, self._shards, self._agreed = links, shards, agreed
        self._limit = time_limit()
        self._versions = [0] * len(links)
        """For each shard, of which version the parameters are that this client has."""

    def ask(
        self,
        kind: Kind,
        tensors: Sequence[Tensor | None] | None = None,
        samples: int = 0,
        steps: int = 0,
    ) -> Answer:
        """Bring tensors, in the order of the model, and return the answer, if there is to be one.

        Raises
        ------
        ServerLost
            Where the server has ended, or has not answered within DISTCONV_TIMEOUT.
        """
        found = self.answers(kind, tensors, samples, steps)
        return joined(found, self._shards)

    def answers(
        self, kind: Kind, tensors: Sequence[Tensor | None] | None, samples: int, steps: int
    ) -> list[Message]:
        """Ask every shard; return its answers as they are, none where there are to be none."""
        until = time.monotonic() + self._limit
        try:
            for j, link in enumerate(self._links):
                head = (kind, self._versions[j], samples, steps)
                link.send(message(head, self._payload(kind, j, tensors)))
            if kind == Kind.PUSH:
                for link in self._links:
                    flush(link, until)
                return []
            found = [receive(link, until) for link in self._links]
        except LinkSilent as error:
            raise ServerLost(self._silence(kind, error)) from error
        except LinkLost as error:
            raise ServerLost(
                f"the server has ended: {error}. Its last state is in the folder that `serve` was "
                "given; start the job again with resume=True"
            ) from error
        for j, answer in enumerate(found):
            if answer.numbers[0] == Kind.FAILED:
                raise ServerLost(bytes(answer.payload.numpy()).decode())
            if kind in _RENEWING:
                self._versions[j] = answer.numbers[1]
        return found

    def _silence(self, kind: Kind, error: LinkSilent) -> str:
        waits_for_workers = kind in (Kind.MEET, Kind.SAVE, Kind.PUSH_AND_FETCH)
        return (
            f"waited for {_AWAITED[kind]} for more than DISTCONV_TIMEOUT={self._limit:g} seconds "
            f"at {user_line()}: {error}. The server hangs"
            + (", or a worker for which all others wait" if waits_for_workers else "")
            + "; or it takes longer than the limit, which DISTCONV_TIMEOUT changes"
        )

    def _payload(self, kind: Kind, j: int, tensors: Sequence[Tensor | None] | None) -> Tensor:
        if kind == Kind.HELLO:
            return in_bytes(self._agreed)
        if tensors is None:
            return in_bytes("")
        return self._shards.packings[j].pack([tensors[i] for i in self._shards.parts[j]])


def leave(above: Sequence[Link], below: Sequence[Link], why: str) -> None:
    """Tell servers that their client has failed, and clients that their server has; hang up."""
    until = time.monotonic() + _FAREWELL
    for links, last in ((above, message((Kind.LEAVE,))), (below, failed(why))):
        for link in links:
            with suppress(LinkLost):
                link.send(last)
                flush(link, until)
            link.close()


def failed(why: str) -> Message:
    """Return the message that a server has failed."""
    return message((Kind.FAILED,), in_bytes(f"the server has failed: {why}"))


def joined(found: Sequence[Message], shards: Shards) -> Answer:
    """Return the answers of all shards as one; of numbers that differ, as counts do, the least."""
    if not found:
        return Answer([None] * shards.tensors, 0, 0)
    samples, steps = (min(answer.numbers[i] for answer in found) for i in (2, 3))
    return Answer(shards.joined([answer.payload for answer in found]), samples, steps)


def in_bytes(text: str) -> Tensor:
    """Return a text as the bytes of a message."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
