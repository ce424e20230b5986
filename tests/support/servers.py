"""A server and its clients in one process: requests are taken in as they are sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distconv.training.requests import Connection, MessageKind, ServerParts
from distconv.training.server import Server
from distconv.transport.link import LinkMessage


class Direct:
    """A link to a server in the same process; see `Link`."""

    def __init__(self, peer: int, servers: InProcess):
        self.peer, self._servers = peer, servers
        self.arrived: deque[LinkMessage] = deque()

    def send(self, message: LinkMessage) -> None:
        """Let the server take in a message at once."""
        self._servers.give(self._servers.shards[0].handle(self.peer, message))

    def receive(self, until: float) -> LinkMessage:
        """Return the answer, which is there already where the server does not wait for others."""
        return self.arrived.popleft()

    def flush(self, until: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class InProcess:
    """A server of one shard with its own parameters, and its clients.

    Parameters
    ----------
    make: makes the model.
    above: another one, of which this one is a client.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        method: Any,
        clients: int,
        above: InProcess | None = None,
    ):
        self.make, self.method = make, method
        self.model = make()
        parameters, buffers = list(self.model.parameters()), list(self.model.buffers())
        asked = None if above is None else above.connection()
        rule = method.rule(parameters, buffers, clients, asked)
        self.shards = [Server(parameters, buffers, rule, clients, agreed="", above=asked)]
        self.rule = rule
        self._links: list[Direct] = []

    @property
    def server(self) -> Server:
        """Return the only shard."""
        return self.shards[0]

    def give(self, due: Sequence[tuple[int, LinkMessage]]) -> None:
        """Hand out answers."""
        for client, answer in due:
            self._links[client].arrived.append(answer)

    def connection(self) -> Connection:
        """Return the way of the next client to this server."""
        link: Any = Direct(len(self._links), self)
        self._links.append(link)
        tensors = list(self.model.parameters()), list(self.model.buffers())
        return Connection([link], ServerParts(*tensors, 1), "")

    def client(self, optimizer: Callable[[Any], Any] | None = None) -> tuple[nn.Module, Any]:
        """Return the model of the next client, with the server's parameters, and its steps."""
        model, connection = self.make(), self.connection()
        own = [*model.parameters(), *model.buffers()]
        with torch.no_grad():
            for tensor, value in zip(own, connection.ask(MessageKind.HELLO).tensors, strict=True):
                assert isinstance(value, Tensor)
                tensor.copy_(value)
        steps = optimizer(model.parameters()) if optimizer else None
        parameters, buffers = list(model.parameters()), list(model.buffers())
        return model, self.method.client(parameters, buffers, steps, connection, 0)
