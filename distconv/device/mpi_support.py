"""Whether an MPI takes pointers to the memory of accelerators, by each vendor's query."""

from __future__ import annotations

import ctypes
import os

import torch

_CRAY = "MPICH_GPU_SUPPORT_ENABLED"
"""Set to 1 to let Cray's MPI accept such pointers."""

_QUERIES = {
    "cuda": "MPIX_Query_cuda_support",
    "hip": "MPIX_Query_rocm_support",
    "xpu": "MPIX_Query_ze_support",
}
"""Functions that return whether an MPI accepts pointers of a kind: Open MPI's, and MPICH's."""

_NUMBERS = {"cuda": 0, "xpu": 1, "hip": 2}
"""The numbers of kinds in MPICH's `MPIX_GPU_query_support`."""


def is_gpu_aware(library: ctypes.CDLL, kind: str) -> bool:
    """Return whether the MPI loaded as `library` takes pointers to memory of this kind of GPU."""
    if os.environ.get(_CRAY):
        return os.environ[_CRAY] == "1"
    vendor = "hip" if kind == "cuda" and torch.version.hip else kind
    query = getattr(library, _QUERIES.get(vendor, ""), None)
    if query is not None:
        return bool(query())
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is None or vendor not in _NUMBERS:
        return False
    answer = ctypes.c_int(0)
    return query(_NUMBERS[vendor], ctypes.byref(answer)) == 0 and bool(answer.value)
