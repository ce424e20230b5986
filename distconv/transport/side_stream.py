"""A stream of a GPU beside that of the computation, and how the two wait for each other."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor


class StreamRequest:
    """All that a stream beside the current one has been given so far, and the tensors it uses.

    The tensors are held until somebody waits. What the current stream is given then comes later,
    and so does whatever gets their memory. (`record_stream` would do as well, but keeps the memory
    out of use for as long as a graph is captured.)
    """

    def __init__(self, stream: torch.cuda.Stream, tensors: Iterable[Tensor]):
        self._device, self._event = stream.device, stream.record_event()
        self._tensors = tuple(tensors)

    def wait(self) -> None:
        """Let all that follows on the current stream find it complete; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()

    def __del__(self) -> None:
        # An exception may leave messages behind, which are sent and arrive all the same.
        if self._tensors and not sys.is_finalizing():
            self.wait()


class SideStream:
    """A stream of its own, which comes before others where the GPU has to choose."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device, priority=-1)

    @property
    def address(self) -> int:
        """Return the address by which other libraries know the stream."""
        address: int = self.stream.cuda_stream
        return address

    def follow(self) -> None:
        """Go on after all that the current stream has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self, tensors: Iterable[Tensor]) -> StreamRequest:
        """Return a request for all that this stream has been given so far, which uses `tensors`."""
        return StreamRequest(self.stream, tensors)
