"""What stands in for the parts of a GPU is called as the real thing: by the same parameters.

Of torch this is tested with each torch, with or without GPUs; of cupy where it can be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

from tests.support import nccl, recorded, sanitizer, streams
from tests.support.signatures import accepts, overloads

NCCL_OF_TORCH: Any = getattr(distributed, "ProcessGroupNCCL", distributed.ProcessGroupGloo)
"""torch's NCCL, or where it has none another of its backends, of the same base class."""

OF_TORCH: dict[str, tuple[type, Any]] = {
    "process group": (nccl.ProcessGroup, NCCL_OF_TORCH),
    "work": (nccl.Work, distributed.Work),
    "stream": (streams.Stream, torch.cuda.Stream),
    "watched stream": (sanitizer.Stream, torch.cuda.Stream),
    "watched event": (sanitizer.Event, torch.cuda.Event),
    "graph": (recorded.RecordedGraph, getattr(torch.accelerator, "Graph", torch.cuda.CUDAGraph)),
}
"""Stand-ins, and classes of torch. Its streams of any device say less of their parameters."""


OWN = {"launched", "_follow", "_message", "_bytes", "keep", "pause"}
"""Methods of the stand-ins that the real classes do not have."""


def different(stand_in: type, real: Any) -> dict[str, Any]:
    """Return the methods of a stand-in that the real class lacks, or has with other parameters."""
    methods = {
        name: method
        for name, method in vars(stand_in).items()
        if callable(method) and not name.startswith("__") and name not in OWN
    }
    assert methods
    return {
        name: found
        for name, method in methods.items()
        if (found := _difference(method, getattr(real, name, None)))
    }


def _difference(method: Callable[..., Any], real: Any) -> Any:
    if real is None:
        return "missing"
    (given,) = overloads(method)
    known = overloads(real)
    return None if any(accepts(overload, given) for overload in known) else (given, known)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_TORCH)
def test_stand_ins_have_the_signatures_of_torch(name: str) -> None:
    stand_in, real = OF_TORCH[name]
    found = different(stand_in, real)
    if NCCL_OF_TORCH is distributed.ProcessGroupGloo:
        found.pop("get_error", None)
    if not hasattr(torch.cuda.Stream, "is_capturing"):
        found.pop("is_capturing", None)
    assert found == {}


@pytest.mark.gpu
def test_stand_ins_have_the_signatures_of_cupy() -> None:
    real = pytest.importorskip("cupy.cuda.nccl")
    if not overloads(real.NcclCommunicator.allReduce):
        pytest.skip("this cupy does not say its parameters")
    assert different(nccl.Communicator, real.NcclCommunicator) == {}
    for stand_in, function in (
        (nccl.group_start, real.groupStart),
        (nccl.group_end, real.groupEnd),
    ):
        assert _difference(stand_in, function) is None


def test_a_stand_in_with_another_signature_is_noticed() -> None:
    class Batches:
        def _start_coalescing(self, device: torch.device) -> None: ...
        def _end_coalescing(self) -> None: ...
        def send(self, tensors: Any, rank: int) -> None: ...
        def post(self) -> None: ...

    wrong = different(Batches, distributed.ProcessGroupGloo)
    assert list(wrong) == ["_start_coalescing", "send", "post"]
    assert wrong["_start_coalescing"] == ({"device": False}, [{}])


def test_parameters_are_read_from_the_docstrings_of_cython() -> None:
    class BuiltIn:
        __name__ = "allReduce"
        __doc__ = "NcclCommunicator.allReduce(self, intptr_t sendbuf, size_t count, int op=0)\n"

    function: Any = BuiltIn()
    assert overloads(function) == [{"sendbuf": False, "count": False, "op": True}]
