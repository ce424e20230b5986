"""Requests of MPI, and their memory, which is not freed before MPI is done with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distconv.transport.launch import mpi

if TYPE_CHECKING:
    from mpi4py import MPI


_ABANDONED: set[MPIRequest] = set()
"""Requests that nobody waits for any more, with the memory that MPI still works on."""


def release_abandoned() -> None:
    """Let go of the abandoned requests that have completed, and of their memory.

    An exception between the start and the end of an exchange, or of a comparison, leaves such
    requests behind. Their memory must not be used for anything else until MPI is done with it, even
    when the grid is gone.
    """
    for request in tuple(_ABANDONED):
        if mpi().Request.Testall(request.requests):
            _ABANDONED.discard(request)


class MPIRequest:
    """Messages or a reduction under way; it keeps the memory alive that MPI works on.

    Parameters
    ----------
    memory: whatever MPI reads and writes.
    finish: is called when all is complete, for a reduction in memory of its own.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        memory: Any,
        finish: Callable[[], object] | None = None,
    ):
        self.requests, self._memory, self._finish = requests, memory, finish

    def wait(self) -> None:
        """Return when all has arrived, and what was sent may be overwritten."""
        try:
            for request in self.requests:
                request.Wait()
        except mpi().Exception as error:
            raise RuntimeError(
                f"MPI could not complete the messages of an operator ({error}). Where it says that "
                "a message is truncated, the ranks run different operators; DISTCONV_DEBUG=1 names "
                "the first that differs"
            ) from error
        self.requests = []
        if self._finish is not None:
            self._finish()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit Python has taken the names of this module away.
        if self.requests and not at_exit() and not mpi().Is_finalized():
            _ABANDONED.add(self)
