"""Links over MPI. Where a rank dies, its launcher ends the job; no link outlives its peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv.transport.link import NUMBERS, Message

_HEAD, _BODY = 1, 2
"""Tags of the integers, and of the bytes after them."""

_KEPT: list[Any] = []
"""Messages under way of ended links: MPI may still use their memory."""


class MPILink:
    """A link to one rank over a communicator of its own; see `Link`.

    Parameters
    ----------
    comm: mpi4py's communicator of ranks of the job.
    rank: the rank of the other end in it.
    peer: the same rank's number in the job.
    """

    def __init__(self, comm: MPI.Intracomm, rank: int, peer: int):
        self._comm, self._rank, self.peer = comm, rank, peer
        self._head = np.empty(NUMBERS + 1, dtype=np.int64)
        self._payload = torch.empty(0, dtype=torch.uint8)
        self._head_arriving: MPI.Request | None = comm.Irecv(self._head, rank, _HEAD)
        self._body_arriving: MPI.Request | None = None
        self._leaving: list[tuple[MPI.Request, Any]] = []
        self._closed = False

    def send(self, message: Message) -> None:
        head = np.array((*message.numbers, message.payload.numel()), dtype=np.int64)
        self._leaving.append((self._comm.Isend(head, self._rank, _HEAD), head))
        if message.payload.numel():
            body = message.payload.numpy()
            self._leaving.append((self._comm.Isend([body, MPI.BYTE], self._rank, _BODY), body))

    def poll(self) -> Message | None:
        self._leaving = [sent for sent in self._leaving if not sent[0].Test()]
        if self._closed:
            return None
        if self._head_arriving is not None:
            if not self._head_arriving.Test():
                return None
            self._head_arriving = None
            size = int(self._head[-1])
            self._payload = torch.empty(size, dtype=torch.uint8)
            if size:
                body = [self._payload.numpy(), MPI.BYTE]
                self._body_arriving = self._comm.Irecv(body, self._rank, _BODY)
        if self._body_arriving is not None and not self._body_arriving.Test():
            return None
        self._body_arriving = None
        message = Message(tuple(self._head[:-1].tolist()), self._payload)
        self._head_arriving = self._comm.Irecv(self._head, self._rank, _HEAD)
        return message

    @property
    def idle(self) -> bool:
        return not self._leaving

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._head_arriving is not None and not MPI.Is_finalized():
            self._head_arriving.Cancel()
            self._head_arriving.Wait()
            self._head_arriving = None
        _KEPT.extend(self._leaving)
        if self._body_arriving is not None:
            _KEPT.append((self._body_arriving, self._payload))
