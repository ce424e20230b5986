"""Links over MPI. Where a rank dies, its launcher ends the job; no link outlives its peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv.transport.link import NUMBERS, Message

_HEAD, _BODY = 1, 2
"""Tags of the numbers, and of the bytes behind them."""


class MPILink:
    """A link to one rank of a communicator, which carries nothing else; see `Link`.

    Parameters
    ----------
    comm: mpi4py's communicator of ranks of the job.
    rank: that of the other end in it.
    peer: the same rank's number in the job.
    """

    def __init__(self, comm: MPI.Intracomm, rank: int, peer: int):
        self._comm, self._rank, self.peer = comm, rank, peer
        self._head = np.empty(NUMBERS + 1, dtype=np.int64)
        self._arriving: MPI.Request | None = comm.Irecv(self._head, rank, _HEAD)
        self._leaving: list[tuple[MPI.Request, Any]] = []

    def send(self, message: Message) -> None:
        """Start to send a message."""
        head = np.array((*message.numbers, message.payload.numel()), dtype=np.int64)
        self._leaving.append((self._comm.Isend(head, self._rank, _HEAD), head))
        if message.payload.numel():
            body = message.payload.numpy()
            self._leaving.append((self._comm.Isend([body, MPI.BYTE], self._rank, _BODY), body))

    def poll(self) -> Message | None:
        """Return the next message if it has arrived, and go on sending."""
        self._leaving = [sent for sent in self._leaving if not sent[0].Test()]
        if self._arriving is None or not self._arriving.Test():
            return None
        *numbers, size = self._head.tolist()
        payload = torch.empty(size, dtype=torch.uint8)
        if size:
            self._comm.Recv([payload.numpy(), MPI.BYTE], self._rank, _BODY)
        self._arriving = self._comm.Irecv(self._head, self._rank, _HEAD)
        return Message(tuple(numbers), payload)

    @property
    def idle(self) -> bool:
        """Return whether all that was sent has left."""
        return not self._leaving

    def close(self) -> None:
        """End the link."""
        if self._arriving is not None and not MPI.Is_finalized():
            self._arriving.Cancel()
            self._arriving.Wait()
        self._arriving = None
