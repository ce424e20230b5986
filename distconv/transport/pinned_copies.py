"""Copies between a GPU and pinned memory of the host, on streams beside that of the computation.

torch keeps pinned memory for later, and gives none away that a copy under way still uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class PinnedCopies:
    """Copies from and to one GPU, each way on a stream of its own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._leaving = torch.cuda.Stream(device, priority=-1)
        self._arriving = torch.cuda.Stream(device, priority=-1)

    def host(self, like: Tensor) -> Tensor:
        """Return pinned memory for a contiguous tensor."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def now(self) -> torch.cuda.Event:
        """Return an event after all that the current stream has been given so far."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "transport 'mpi' lets the host wait for the GPU, which no graph of CUDA can hold; "
                "capture steps on a grid with transport='nccl'"
            )
        return torch.cuda.current_stream(self._device).record_event()

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Start copies of contiguous tensors.

        They have been made when the event has happened, as has all that the current stream has been
        given before.
        """
        self._leaving.wait_event(self.now())
        hosts = [self.host(tensor) for tensor in tensors]
        with torch.cuda.stream(self._leaving):
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                # Nobody else may get its memory before.
                tensor.record_stream(self._leaving)
        return hosts, self._leaving.record_event()

    def to_device(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy from the host into tensors, for which the current stream waits, not the host.

        All that has used the memory of the tensors before is done by then.
        """
        with torch.cuda.stream(self._arriving):
            for host, tensor in pairs:
                tensor.copy_(host, non_blocking=True)
                tensor.record_stream(self._arriving)
        torch.cuda.current_stream(self._device).wait_stream(self._arriving)
