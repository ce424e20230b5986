"""Kinds of devices are named in `distconv/device` alone, which a program's devices pass through."""

from __future__ import annotations

import ast
import ctypes
import io
import re
import tokenize
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from distconv.device import kinds
from distconv.grid.journal import StreamWait, Waiting

ROOT = Path(__file__).parents[2]

NAMES = re.compile(r"cuda|\bhip\b|rocm|\bxpu\b|xccl", re.IGNORECASE)

OF_OTHERS = {
    "distconv/horovod/__init__.py": {"cuda_built", "rocm_built"},
    "distconv/horovod/job.py": {"cuda_built", "rocm_built"},
    "distconv/lbann/dc_tensor.py": {'"cuda"'},
    "distconv/tensor/dispatch.py": {'"is_cuda"'},
}
"""Names that are not ours: Horovod's functions, and properties of torch's tensors."""


def names_of_devices(source: str) -> Iterator[str]:
    """Yield the words of code that name a kind of device; comments and docstrings may."""
    documents = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        wanted = token.type in (tokenize.NAME, tokenize.STRING) and NAMES.search(token.string)
        if wanted and not (
            token.string.startswith(('"""', 'r"""'))
            or (token.type == tokenize.STRING and ast.literal_eval(token.string) in documents)
        ):
            yield token.string


def test_no_kind_of_device_is_named_outside_the_seam() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for folder in ("distconv", "layers")
        for path in (ROOT / folder).rglob("*.py")
        if ROOT / "distconv/device" not in path.parents
        and (names := set(names_of_devices(path.read_text())))
    }
    assert found == OF_OTHERS


def test_a_name_of_a_device_would_be_seen() -> None:
    code = 'def f(x):\n    """On cuda."""\n    return x.device.type == "cuda" and torch.cuda.x\n'
    assert list(names_of_devices(code)) == ['"cuda"', "cuda"]


def test_without_an_accelerator_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds.accelerator() is None and kinds.identities() == ()
    assert not kinds.is_accelerator(torch.device("cpu"))
    assert not kinds.is_accelerator(torch.device("meta"))
    assert kinds.is_accelerator(torch.device("xpu", 1))


@pytest.mark.parametrize(("kind", "found"), [("cuda", "cuda"), ("xpu", "xpu"), ("mps", None)])
def test_accelerators_count_whose_streams_carry_messages(
    monkeypatch: pytest.MonkeyPatch, kind: str, found: str | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert kinds.accelerator() == found


def test_gpus_without_an_identity_are_told_apart_by_host_mask_and_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kinds, "accelerator", lambda: "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    properties = [SimpleNamespace(uuid="a"), SimpleNamespace()]
    module = SimpleNamespace(get_device_properties=properties.__getitem__)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3.1")
    first, second = kinds.identities()
    assert first == "a" and second.endswith("ZE_AFFINITY_MASK=3.1 1")


@pytest.mark.parametrize(("backend", "named"), [("nccl", "NCCL"), ("xccl", "XCCL")])
def test_groups_are_those_of_the_backend_of_the_kind(
    monkeypatch: pytest.MonkeyPatch, backend: str, named: str
) -> None:
    made: list[Any] = []

    class Group:
        class Options:
            def __init__(self, is_high_priority_stream: bool):
                assert is_high_priority_stream

        def __init__(self, *given: Any):
            made.append(given)

    kind = {"nccl": "cuda", "xccl": "xpu"}[backend]
    monkeypatch.setattr(distributed, f"ProcessGroup{named}", Group, raising=False)
    monkeypatch.setattr(distributed, "is_backend_available", lambda name: name == backend)
    assert kinds.why_no_backend(kind) is None
    limit = timedelta(seconds=7)
    kinds.make_group("store", 1, 2, torch.device(kind), limit)
    assert made[0][:3] == ("store", 1, 2) and made[0][3]._timeout == limit


@pytest.mark.parametrize("tells", [True, False])
def test_a_torch_whose_groups_do_not_tell_of_errors_says_so(
    tells: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    of_group = {"get_error": lambda self: None} if tells else {}
    monkeypatch.setattr(distributed, "ProcessGroupXCCL", type("Group", (), of_group), raising=False)
    kinds.warn_where_errors_stay_unknown("xpu")
    assert [str(w.message).split(" of torch")[0] for w in recwarn] == [
        "ProcessGrid: the groups of oneCCL"
    ] * (not tells)


def test_a_torch_without_the_backend_says_so() -> None:
    if not distributed.is_backend_available("nccl"):
        assert kinds.why_no_backend("cuda") == "this torch has no NCCL"
    assert "has no backend for mps" in (kinds.why_no_backend("mps") or "")


class Library:
    """Stands for an MPI with some of the functions that tell of GPUs."""

    def __init__(self, **functions: Any):
        vars(self).update(functions)


def _mpich(number: int, answer: Any) -> int:
    """Stand for MPICH's query on a machine with AMD's GPUs."""
    ctypes.cast(answer, ctypes.POINTER(ctypes.c_int)).contents.value = number == 2
    return 0


@pytest.mark.parametrize(
    ("functions", "amd", "kind", "aware"),
    [
        ({}, False, "cuda", False),
        ({"MPIX_Query_cuda_support": lambda: 1}, False, "cuda", True),
        ({"MPIX_Query_cuda_support": lambda: 0}, False, "cuda", False),
        ({"MPIX_Query_cuda_support": lambda: 1}, True, "cuda", False),
        ({"MPIX_Query_rocm_support": lambda: 1}, True, "cuda", True),
        ({"MPIX_Query_ze_support": lambda: 1}, False, "xpu", True),
        ({"MPIX_GPU_query_support": _mpich}, True, "cuda", True),
        ({"MPIX_GPU_query_support": _mpich}, False, "cuda", False),
        ({"MPIX_GPU_query_support": _mpich}, False, "npu", False),
    ],
)
def test_each_mpi_is_asked_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, functions: Any, amd: bool, kind: str, aware: bool
) -> None:
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
    library: Any = Library(**functions)
    assert kinds.is_gpu_aware(library, kind) is aware
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", value)
        assert kinds.is_gpu_aware(library, kind) is expected


def test_the_version_is_that_of_the_library_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", object, raising=False)
    assert kinds.version_of_library("cuda") == "2.28.9"
    loaded = SimpleNamespace(get_runtime_nccl_version=lambda: (2, 30, 7))
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", loaded)
    assert kinds.version_of_library("cuda") == "2.30.7"


def test_a_thread_asks_an_event_from_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    event: Any = SimpleNamespace(query=lambda: done.append("query") or True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        waiting = Waiting()
        monkeypatch.setattr("distconv.grid.journal.record_event", lambda device: event)
        waiting.of_streams.append(StreamWait(device, [0], 1, None))
        assert waiting.oldest_of_streams() is None
    assert done == [torch.device("cuda", 3), "query", "query"]


def test_what_the_page_says_that_no_test_has_run_is_there() -> None:
    text = (
        (ROOT / "docs/reference/gpus.md").read_text().partition("## What no test on CPUs runs")[2]
    )
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    for files, names in rows:
        sources = [ROOT / name for name in re.findall(r"`([^`]+)`", files)]
        assert all(path.exists() for path in sources)
        code = "\n".join(path.read_text() for path in sources if path.is_file())
        for name in re.findall(r"`(\w+)`", names) if code else ():
            assert re.search(rf"^ *(def|class) {name}\b", code, re.M), name
