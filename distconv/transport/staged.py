"""A carrier of tensors on GPUs by MPI: through pinned host memory, or directly if MPI can.

MPI does not wait for streams, and must not read memory that a GPU has yet to write. So the host
waits for the GPU before it passes messages to MPI: not when an exchange starts, but at the first
wait for an exchange.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distconv.device.kinds import is_gpu_aware
from distconv.device.streams import SideStream, is_capturing, record_event, using
from distconv.transport.interface import ChainedRequest, Communicator, Message, Request

if TYPE_CHECKING:
    from distconv.transport.mpi import MPICommunicator, MPITransport


class LaunchQueue:
    """The queue of messages and reductions of all grids of a process, not yet passed to MPI.

    A wait for one request starts all queued requests, in order. So ranks may wait in different
    orders: every message that another rank waits for is started, and collectives start in the same
    order on all ranks.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedRequest] = deque()

    def add(self, ready: torch.Event, start: Callable[[], Request]) -> QueuedRequest:
        """Queue a call of `start`, which passes messages to MPI, for after the event `ready`."""
        queued = QueuedRequest(self, ready, start)
        self._waiting.append(queued)
        return queued

    def start_all(self) -> None:
        """Start all queued messages and reductions, in order."""
        while self._waiting:
            self._waiting.popleft().start()


class QueuedRequest:
    """A message or a reduction in a `LaunchQueue`, for which a rank can wait."""

    def __init__(self, queue: LaunchQueue, ready: torch.Event, start: Callable[[], Request]):
        self._queue, self._ready, self._start = queue, ready, start
        self._request: Request | None = None

    def start(self) -> None:
        """Wait for the GPU, then pass the message or reduction to MPI."""
        self._ready.synchronize()
        self._request = self._start()

    def wait(self) -> None:
        """Start everything in the queue, and return when this request is complete."""
        self._queue.start_all()
        assert self._request is not None
        self._request.wait()


class PinnedCopies:
    """Copies between the GPU `device` and pinned host memory, with a stream for each direction."""

    def __init__(self, device: torch.device):
        self._device = device
        self._leaving, self._arriving = SideStream(device), SideStream(device)

    def host(self, like: Tensor) -> Tensor:
        """Return an uninitialised tensor in pinned host memory, of the shape and type of `like`."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def now(self) -> torch.Event:
        """Return an event after all work queued so far on the current stream."""
        if is_capturing(self._device):
            raise RuntimeError(
                "transport 'mpi' makes the host wait for the GPU, which cannot be captured in a "
                "graph; capture steps on a grid with transport='torch'"
            )
        return record_event(self._device)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event]:
        """Start to copy contiguous tensors to the host; return the copies and an event.

        The copies are complete after the event, as is all work queued earlier on the current
        stream.
        """
        leaving = self._leaving.stream
        leaving.wait_event(self.now())
        hosts = [self.host(tensor) for tensor in tensors]
        with using(leaving):
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                # The memory of the tensor must not be reused before the copy.
                tensor.record_stream(leaving)
        return hosts, leaving.record_event()

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start the copies of `pairs` of a host tensor and a GPU tensor, from host to GPU.

        Work queued next on the current stream waits for the copies; the host does not. The caller
        ensures that earlier work on the GPU tensors is complete.
        """
        if not pairs:
            return
        arriving = self._arriving.stream
        with using(arriving):
            for host, tensor in pairs:
                tensor.copy_(host, non_blocking=True)
                tensor.record_stream(arriving)
        self._arriving.mark(()).wait()


_VARIABLE = "DISTCONV_GPU_AWARE_MPI"


class StagedTransport:
    """A carrier of tensors on GPUs by MPI; see `Transport`.

    If `direct`, MPI reads and writes the GPU's memory. Reductions always go through the host, where
    MPI sums.
    """

    name, ordered = "mpi", False

    def __init__(
        self, mpi: MPITransport, copies: PinnedCopies, queue: LaunchQueue, direct: bool = False
    ):
        self._mpi, self._copies, self._queue, self._direct = mpi, copies, queue, direct
        self.next_tag = mpi.next_tag

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        if not (arriving or leaving):
            return ChainedRequest()
        if self._direct:
            start = partial(self._mpi.exchange, arriving, leaving, tag)
            return self._queue.add(self._copies.now(), start)
        hosts, ready = self._copies.to_host([tensor for _, tensor in leaving])
        incoming = [(rank, self._copies.host(tensor)) for rank, tensor in arriving]
        received = self._mpi.exchange(incoming, (), tag)
        messages = [(rank, host) for (rank, _), host in zip(leaving, hosts, strict=True)]
        sent = self._queue.add(ready, partial(self._mpi.exchange, (), messages, tag))
        pairs = [(host, t) for (_, host), (_, t) in zip(incoming, arriving, strict=True)]
        # A wait for the sends waits for `ready`, after which no work uses the tensors to receive.
        return ChainedRequest((sent, received), partial(self._copies.to_device, pairs))

    def all_reduce(self, tensor: Tensor, group: MPICommunicator) -> Request:
        if group.size == 1:
            return ChainedRequest()
        (host,), ready = self._copies.to_host([tensor])
        reduced = self._queue.add(ready, partial(self._mpi.all_reduce, host, group))
        return ChainedRequest([reduced], partial(self._copies.to_device, [(host, tensor)]))

    def all_gather(self, tensor: Tensor, group: MPICommunicator) -> Tensor:
        self._queue.start_all()
        return self._mpi.all_gather(self._on_host(tensor), group).to(tensor.device)

    def broadcast(self, tensor: Tensor, group: MPICommunicator) -> None:
        self._queue.start_all()
        host = self._on_host(tensor)
        self._mpi.broadcast(host, group)
        tensor.copy_(host)

    def _on_host(self, tensor: Tensor) -> Tensor:
        (host,), ready = self._copies.to_host([tensor])
        ready.synchronize()
        return host


def takes_device_memory(comm: Communicator, kind: str) -> bool:
    """Return whether MPI accepts pointers to memory of accelerators of type `kind`, on all ranks.

    Collective over `comm`. The environment variable DISTCONV_GPU_AWARE_MPI, 1 or 0, decides; by
    default MPI is queried. Raises ValueError on all ranks if a rank sets the variable to another
    value.
    """
    answers = comm.allgather(os.environ.get(_VARIABLE) or _asked(kind))
    for rank, answer in enumerate(answers):
        if answer not in ("0", "1"):
            raise ValueError(
                f"{_VARIABLE}={answer!r} on rank {rank}; set it to 1 or 0 on every rank, or unset "
                "it to query MPI"
            )
    return "0" not in answers


def _asked(kind: str) -> str:
    from mpi4py import MPI

    return "1" if is_gpu_aware(ctypes.CDLL(MPI.__file__), kind) else "0"
