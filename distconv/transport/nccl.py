"""A carrier of GPU tensors by NCCL, through cupy: the host starts one kernel per exchange.

All communicators of a process send and sum on one side stream, which first waits for the current
stream. A request's `wait` lets the current stream wait for the side stream; the host never waits.
Messages have no tags: NCCL matches messages by the order in which ranks start them, which is the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from distconv.device.kinds import address_of, bindings, on_device
from distconv.device.streams import SideStream
from distconv.transport.interface import Communicator, Message, Request, Summand

_TYPES = {
    getattr(torch, name): f"NCCL_{name.upper()}"
    for name in ("float32", "float64", "int8", "uint8", "int32", "int64")
}


class NCCLTransport:
    """A carrier between GPUs, of which each rank has its own; see `StreamTransport`."""

    name, ordered = "nccl", True

    def __init__(self, comm: Communicator, device: torch.device, side: SideStream):
        self.device, self._side = device, side
        self._nccl, self._address = bindings(), address_of(side.stream)
        self._communicators: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._messages = self._communicator(comm)

    def check(self) -> None:
        for communicator in self._communicators.copy().values():
            communicator.check_async_error()

    def close(self, abort: bool) -> None:
        for key, communicator in self._communicators.copy().items():
            with suppress(RuntimeError):
                (communicator.abort if abort else communicator.destroy)()
            self._communicators.pop(key, None)

    def next_tag(self) -> int:
        return 0  # NCCL does not use tags

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        nccl, comm, stream = self._nccl, self._messages, self._address
        self._follow(comm)
        nccl.groupStart()
        try:
            for rank, t in leaving:
                comm.send(t.data_ptr(), t.nbytes, nccl.NCCL_UINT8, rank, stream)
            for rank, t in arriving:
                comm.recv(t.data_ptr(), t.nbytes, nccl.NCCL_UINT8, rank, stream)
        except BaseException:
            with suppress(Exception):
                nccl.groupEnd()  # an open group would include all later calls
            raise
        nccl.groupEnd()
        return self._side.mark(tensor for _, tensor in (*arriving, *leaving))

    def all_reduce(self, tensor: Tensor, group: Communicator) -> Request:
        summand = Summand.of(tensor, "NCCL")
        numbers = summand.numbers
        nccl, comm, address = self._nccl, self._communicator(group), numbers.data_ptr()
        what = numbers.numel(), getattr(nccl, _TYPES[numbers.dtype]), nccl.NCCL_SUM
        self._follow(comm)
        comm.allReduce(address, address, *what, self._address)
        return summand.arriving(self._side.mark([numbers]))

    def all_gather(self, tensor: Tensor, group: Communicator) -> Tensor:
        gathered = tensor.new_empty((group.size, *tensor.shape))
        nccl, comm = self._nccl, self._communicator(group)
        self._follow(comm)
        addresses = tensor.data_ptr(), gathered.data_ptr()
        comm.allGather(*addresses, tensor.nbytes, nccl.NCCL_UINT8, self._address)
        self._side.mark([tensor, gathered]).wait()
        return gathered

    def broadcast(self, tensor: Tensor, group: Communicator) -> None:
        nccl, comm, address = self._nccl, self._communicator(group), tensor.data_ptr()
        self._follow(comm)
        comm.broadcast(address, address, tensor.nbytes, nccl.NCCL_UINT8, 0, self._address)
        self._side.mark([tensor]).wait()

    def _follow(self, communicator: Any) -> None:
        """Let the stream of messages wait for all work queued on the current stream.

        Raises an earlier error of NCCL on `communicator`, such as a lost connection.
        """
        communicator.check_async_error()
        self._side.follow()

    def _communicator(self, group: Communicator) -> Any:
        """Return NCCL's communicator for `group`. Collective over `group` at the first call."""
        key = group.purpose, group.ranks
        if key not in self._communicators:
            name = group.bcast(self._nccl.get_unique_id() if group.rank == 0 else None)
            with on_device(self.device):
                made = self._nccl.NcclCommunicator(group.size, name, group.rank)
            self._communicators[key] = made
        return self._communicators[key]
