"""Streams of an accelerator, and requests for which a stream waits and the host does not.

All messages and reductions of a process go through one stream beside the computation's. So a device
works them off in the order in which the host starts them, which is the same on all ranks, whatever
the library is: kernels of two communicators that wait for other ranks never wait for each other.
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
    """Make a stream the current one."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def record_event(device: torch.device) -> torch.Event:
    """Return an event behind all that the current stream of a device has been given."""
    return torch.accelerator.current_stream(device).record_event()


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of an accelerator takes part in the capture of a graph."""
    stream: Any = torch.accelerator.current_stream(device)
    if hasattr(stream, "is_capturing"):
        return bool(stream.is_capturing())
    module = torch.get_device_module(device)  # of older versions of torch
    ask = getattr(module, "is_current_stream_capturing", None)
    return bool(ask and ask())


def number_of_stream(device: torch.device) -> int | None:
    """Return the number of an accelerator's current stream; None on a host.

    Streams themselves are never unequal by `!=`.
    """
    return torch.accelerator.current_stream(device).stream_id if is_accelerator(device) else None


class StreamRequest:
    """Work queued on a side stream, and the tensors that must outlive it.

    The tensors are held until somebody waits. What the current stream is given then comes later,
    and so does whatever gets their memory. (`record_stream` would do as well, but keeps the memory
    out of use for as long as a graph is captured.)
    """

    def __init__(self, stream: torch.Stream, tensors: Iterable[Tensor]):
        self._device, self._event = stream.device, stream.record_event()
        self._tensors = tuple(tensors)

    def wait(self) -> None:
        """Let all that follows on the current stream find it complete; the host goes on."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors = ()

    def __del__(self) -> None:
        # An exception may leave messages behind, which are sent and arrive all the same.
        if self._tensors and not sys.is_finalizing():
            self.wait()


class SideStream:
    """A stream beside the current one, which comes before others where the device has to choose."""

    def __init__(self, device: torch.device):
        self.stream = torch.Stream(device=device, priority=-1)

    def follow(self) -> None:
        """Go on after all that the current stream has been given so far."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))

    def mark(self, tensors: Iterable[Tensor]) -> StreamRequest:
        """Return a request for all that this stream has been given so far, which uses `tensors`."""
        return StreamRequest(self.stream, tensors)
