"""Transport over torch's own process groups: gloo between hosts, NCCL between GPUs.

Each group of ranks has a process group of its own for each purpose, so that sums of one purpose
never meet those of another. Messages of gloo are told apart by tags; those of NCCL meet in the
order in which ranks start them, the same on all. gloo lets the host wait, NCCL the current stream.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from distconv.torch_private import end_batch, gather_flat, start_batch
from distconv.transport.buffers import BufferPool
from distconv.transport.interface import Communicator, Message, Request, Tags
from distconv.transport.sums import Summand
from distconv.transport.torch_groups import (
    ProcessGroup,
    Store,
    TorchCommunicator,
    complete,
    explained,
    gloo_group,
    group_name,
    lent,
    nccl_group,
    start,
)


class TorchRequest:
    """Messages or a reduction under way; it keeps the memory alive that torch works on.

    Parameters
    ----------
    works: what torch.distributed calls a request.
    memory: the tensors that are read and written.
    on_gpu: whether a stream waits, and not the host.
    """

    def __init__(self, works: list[Any], memory: Any, on_gpu: bool = False):
        self.works, self._memory, self._on_gpu = works, memory, on_gpu

    def wait(self) -> None:
        """Return when all has arrived, and what was sent may be overwritten.

        On a GPU that holds for what the current stream is given next.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise explained(error) from error
        self.works, self._memory = [], None

    def __del__(self) -> None:
        # An exception may leave messages behind, which arrive in their memory all the same. gloo
        # does not tell whether they have but to who waits.
        if not self.works or sys.is_finalizing():
            return
        if self._on_gpu:
            with suppress(RuntimeError):
                self.wait()
        else:
            abandoned = TorchRequest(self.works, self._memory)
            self.works = []
            threading.Thread(target=_outlive, args=(abandoned,), daemon=True).start()


def _outlive(request: TorchRequest) -> None:
    """Hold the memory of a request that nobody waits for until it is complete."""
    with suppress(RuntimeError):
        request.wait()
    request.works = []


class TorchTransport:
    """Messages by process groups of torch.distributed; see `Transport`.

    Parameters
    ----------
    comm: the ranks; all of them call it.
    store: by which they and their groups find each other; None for a single rank.
    device: of this rank. Messages between GPUs travel by NCCL, of which each has one rank.
    limit: after which NCCL gives a message up.
    """

    name = "torch"

    def __init__(
        self, comm: Communicator, store: Store | None, device: torch.device, limit: timedelta
    ):
        self._store, self._device, self._limit = store, device, limit
        self.ordered = self._on_gpu = device.type == "cuda"
        self._library = "NCCL" if self._on_gpu else "gloo"
        self._rank, self._tags = comm.rank, Tags()
        self._buffers = BufferPool()
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
        self._messages: ProcessGroup = self._group_of(comm) if comm.size > 1 else None

    def check(self) -> None:
        """Raise what the thread of torch has met with that watches NCCL.

        That thread ends the process some time later.
        """
        for group in self._groups.copy().values():
            # Known to torch 2.7 and newer.
            error = group.get_error().name if hasattr(group, "get_error") else "SUCCESS"
            if error != "SUCCESS":
                raise RuntimeError(f"torch.distributed reports {error} of NCCL")

    def next_tag(self) -> int:
        """Return the tag of the next exchange."""
        return self._tags.next()

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory for a message, of the type of `like`."""
        return like.new_empty(shape) if self._on_gpu else self._buffers.empty(shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange."""
        _copy_own(self._rank, arriving, leaving)
        receives, sends = self._to_others(arriving), self._to_others(leaving)
        group, works = self._messages, list[Any]()
        under_way = TorchRequest(works, (arriving, leaving), self._on_gpu)
        # NCCL has to be given all at once, and no empty batch.
        together = self._on_gpu and bool(receives or sends)
        if together:
            start_batch(group, self._device)
        try:
            for rank, message in receives:
                works.append(group.recv([message], rank, tag))
            for rank, message in sends:
                works.append(group.send([message], rank, tag))
        except RuntimeError as error:
            raise explained(error) from error
        finally:
            if together:
                works[:] = [end_batch(group, self._device)]
        return under_way

    def all_reduce(self, tensor: Tensor, group: Communicator) -> Request:
        """Start adding up a tensor in place over the ranks of `group`."""
        summand = Summand.of(tensor, self._library)
        if group.size == 1 or not tensor.numel():
            return TorchRequest([], None)
        work = start(self._group_of(group).allreduce, [lent(summand.numbers)])
        return summand.arriving(TorchRequest([work], summand.numbers, self._on_gpu))

    def all_gather(self, tensor: Tensor, group: Communicator) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        gathered = tensor.new_empty((group.size, *tensor.shape))
        if group.size == 1:
            gathered[0] = tensor
        elif tensor.numel():
            gather = gather_flat(self._group_of(group))
            complete(gather, _bytes(gathered), _bytes(tensor))
        return gathered

    def broadcast(self, tensor: Tensor, group: Communicator) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        if group.size > 1 and tensor.numel():
            complete(self._group_of(group).broadcast, _bytes(tensor), 0)

    def _to_others(self, messages: Sequence[Message]) -> list[Message]:
        """Return the bytes of the messages that travel."""
        return [(r, _bytes(t)) for r, t in messages if r != self._rank and t.numel()]

    def _group_of(self, comm: Communicator) -> ProcessGroup:
        """Return the process group of some ranks, which they make together at first need."""
        if isinstance(comm, TorchCommunicator) and not self._on_gpu:
            return comm.group
        key = comm.purpose, comm.ranks
        if key not in self._groups:
            name = f"{self._device.type} {group_name(*key)}"
            where = self._store, name, comm.rank, comm.size
            self._groups[key] = (
                nccl_group(*where, self._device, self._limit)
                if self._on_gpu
                else gloo_group(*where)
            )
        return self._groups[key]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a vector of bytes."""
    # A single element is contiguous whatever its stride, which a view would keep.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copy_own(rank: int, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
    """Copy the messages that a rank sends to itself."""
    into = [tensor for other, tensor in arriving if other == rank]
    own = [tensor for other, tensor in leaving if other == rank]
    for target, source in zip(into, own, strict=True):
        _bytes(target).copy_(_bytes(source))
