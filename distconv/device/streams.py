"""Streams of an accelerator, and requests for which a stream waits while the host goes on.

All messages and reductions of a process go through one side stream. A device so processes them in
the order in which the host starts them, the same on all ranks for any library: kernels of two
communicators that wait for other ranks never wait for each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from distconv.device.kinds import is_accelerator


@contextmanager
def using(stream: torch.Stream) -> Iterator[None]:
    """Make `stream` torch's current stream within the context."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def record_event(device: torch.device) -> torch.Event:
    """Return an event after all work queued so far on a device's current stream."""
    return torch.accelerator.current_stream(device).record_event()


def has_passed(event: torch.Event, device: torch.device) -> bool:
    """Return whether a device has done all work before `event`, for any thread of this process.

    The thread's current device becomes `device`: asking from another would claim memory there.
    """
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    return event.query()


def is_capturing(device: torch.device) -> bool:
    """Return whether an accelerator's current stream is being captured into a graph."""
    stream: Any = torch.accelerator.current_stream(device)
    if hasattr(stream, "is_capturing"):
        return bool(stream.is_capturing())
    module = torch.get_device_module(device)  # of older versions of torch
    ask = getattr(module, "is_current_stream_capturing", None)
    return bool(ask and ask())


def number_of_stream(device: torch.device) -> int | None:
    """Return the number of an accelerator's current stream, to compare; None on a host.

    Stream objects themselves cannot be compared by `!=`, which is always false.
    """
    return torch.accelerator.current_stream(device).stream_id if is_accelerator(device) else None


class StreamRequest:
    """Work queued on a side stream, and the tensors that must outlive it.

    It holds the tensors until `wait`; work queued on the current stream afterwards runs later, also
    work on their memory. (`record_stream` would do as well, but keeps the memory out of use during
    the capture of a graph.)
    """

    def __init__(self, stream: torch.Stream, tensors: Iterable[Tensor]):
        self._device, self._event = stream.device, stream.record_event()
        self._tensors = tuple(tensors)

    def wait(self) -> None:
        """Let work queued next on the current stream wait for this work; the host continues."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors = ()

    def __del__(self) -> None:
        # An exception may leave messages behind, which are sent and arrive all the same.
        if self._tensors and not sys.is_finalizing():
            self.wait()


class SideStream:
    """A stream of higher priority beside the current one, for messages and copies."""

    def __init__(self, device: torch.device):
        self.stream = torch.Stream(device=device, priority=-1)

    def follow(self) -> None:
        """Let this stream wait for all work queued so far on the current stream."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))

    def mark(self, tensors: Iterable[Tensor]) -> StreamRequest:
        """Return a request for all work queued so far on this stream, which uses `tensors`."""
        return StreamRequest(self.stream, tensors)
