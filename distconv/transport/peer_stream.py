"""A stream, beside that of the computation, on which a rank writes to other ranks' memory."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch

from distconv.transport.semaphores import make_semaphores
from distconv.transport.side_stream import SideStream


class PeerStream(SideStream):
    """A stream that copies between addresses of GPUs, and waits for semaphores there.

    Parameters
    ----------
    device: this rank's GPU, the current one.
    """

    def __init__(self, device: torch.device):
        from cupy.cuda import runtime

        super().__init__(device)
        self._runtime: Any = runtime
        self._semaphores = make_semaphores()
        # Other ranks wait for what it has been given, also when this one has nothing left to do. It
        # writes to their memory, which is there until MPI ends: after this, for all together.
        atexit.register(self.stream.synchronize)

    def acquire(self, semaphore: int) -> None:
        """Wait until the semaphore at an address is released, and take it."""
        self._semaphores.acquire(self.address, semaphore)

    def release(self, semaphore: int) -> None:
        """Release the semaphore at an address, after all that comes before on the stream."""
        self._semaphores.release(self.address, semaphore)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes between addresses."""
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, self.address)

    def run(self, work: Callable[[], object]) -> None:
        """Compute with tensors."""
        with torch.cuda.stream(self.stream):
            work()
