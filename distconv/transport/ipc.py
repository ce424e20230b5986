"""Memory of GPUs that the processes of a node reach by CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

_GRANULE = 2 * 2**20
"""Handles stand for whole pieces of this size, of which nothing else may be a part."""


def share_memory(node: MPI.Intracomm, nbytes: int, head: Sequence[int]) -> list[int | None]:
    """Return the addresses, in this process, of memory of each rank of `node` on its current GPU.

    Collective over `node`. Each rank has `nbytes` bytes, which begin with the 32-bit numbers
    `head`, until its process ends. None stands for a rank whose memory cannot be shared, or reached
    from here.
    """
    from cupy.cuda import runtime

    base: int = runtime.malloc(-(-nbytes // _GRANULE) * _GRANULE)
    numbers = np.array(head, np.uint32)
    runtime.memcpy(base, numbers.ctypes.data, numbers.nbytes, runtime.memcpyHostToDevice)
    runtime.deviceSynchronize()
    handles = node.allgather(_tried(runtime, runtime.ipcGetMemHandle, base))
    handles[node.rank] = None  # which only others can open
    flags = runtime.cudaIpcMemLazyEnablePeerAccess
    bases = [
        handle and _tried(runtime, runtime.ipcOpenMemHandle, handle, flags) for handle in handles
    ]
    bases[node.rank] = base
    return bases


def _tried(runtime: Any, function: Callable[..., Any], *args: object) -> Any:
    """Return the result of a function of CUDA; None where the call is not possible here."""
    try:
        return function(*args)
    except runtime.CUDARuntimeError:
        return None
