"""Tests on N ranks are started as `mpiexec -n N pytest -m "parallel[match]"`; see Makefile."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from mpi4py import MPI
from torch import distributed

from distconv.device import kinds
from distconv.device.kinds import accelerator
from distconv.grid.process_grid import ProcessGrid
from tests.support.rank_numbers import rank_numbers

torch.set_num_threads(1)
# Blocks of tests are small. Two ranks convolve them as they do users' small ones, other numbers of
# ranks while halos travel, as they do large ones. Tests of one method name it.
if MPI.COMM_WORLD.size != 2:
    kinds.HOST = kinds.HOST._replace(overlapped=0)
    kinds.ACCELERATOR = kinds.ACCELERATOR._replace(overlapped=0)

# Every rank has to draw the same examples: nothing may depend on time, or on earlier runs.
settings.register_profile(
    "default",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "nightly", settings.get_profile("default"), derandomize=False, max_examples=5000
)
# A machine with GPUs is had for minutes, which shrinking would take.
settings.register_profile(
    "gpu", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("default")
# Nor on constants of imported modules: compilers import others on each rank.
providers.is_local_module_file = lambda path: False


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Destroy the default group of torch.distributed that a module of tests has made."""
    before = distributed.is_initialized()
    yield
    if not before and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --gpu: without it no test sees a GPU, with it those marked `gpu` run (`make gpu`)."""
    parser.addoption("--gpu", action="store_true", help="let the tests see GPUs")


def _matches(config: pytest.Config) -> bool:
    """Return whether only tests of as many ranks as there are will run."""
    return "parallel[match]" in config.option.markexpr


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files without a test for this number of ranks, or for GPUs if only those run.

    Such files may import what a machine with GPUs has not.
    """
    if not _matches(config) or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    if "and gpu" in config.option.markexpr and "mark.gpu" not in text:
        return True
    numbers = rank_numbers(text)
    return None if numbers is None or MPI.COMM_WORLD.size in numbers else True


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: Any
) -> list[pytest.Item] | None:
    """Make no items of a test for other numbers of ranks, which every rank would then deselect."""
    if not _matches(collector.config) or not name.startswith("test_"):
        return None
    ranks = [mark.args[0] for mark in getattr(obj, "pytestmark", ()) if mark.name == "parallel"]
    wanted = ranks[0] if ranks else 1
    here = MPI.COMM_WORLD.size
    return None if here in (wanted if isinstance(wanted, list) else [wanted]) else []


SLOWEST = [
    *("training/test_lost_ranks.py", "grid/test_abort.py", "grid/test_stall.py"),
    *("grid/test_torchrun.py", "grid/test_workers.py", "examples/test_methods.py"),
    *("training/test_saved_together.py", "grid/test_interrupt.py", "ops/test_fake_gpu.py"),
    *("examples/test_mesh_torchrun.py", "examples/test_mesh_training.py"),
    *("examples/test_mesh_demo.py", "planning/test_search.py", "test_torch_private.py"),
    *("benchmarks/test_commits.py", "benchmarks/test_gpu_benchmarks.py"),
    *("planning/test_commands.py", "geometry/test_plan.py", "tools/test_command_line.py"),
]
"""Files whose tests on one rank take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let workers begin with the slowest files, so that none is left alone with one at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {Path(__file__).parent / name: place for place, name in enumerate(SLOWEST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Keep garbage collections from looking through all that the imports have made, each time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def same_numbers_on_all_ranks() -> None:
    """Let a test draw the same numbers on all ranks, whatever an earlier one has drawn."""
    # Without a GPU torch.manual_seed keeps each seed, and who gave it, for one that may come.
    torch.default_generator.manual_seed(0)
    if accelerator() and torch.get_device_module().is_initialized():
        torch.get_device_module().manual_seed_all(0)


@pytest.fixture
def first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks count calls and steps as at the start of a program, for a test."""
    journal = ProcessGrid(height=-1).journal
    for known in ("_calls", "_steps", "_counts"):
        monkeypatch.setattr(journal, known, {})


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let rank 0 report; another rank's report is shown when it has seen a failure."""
    if not config.getoption("--gpu"):
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        os.environ |= hidden | {"ONEAPI_DEVICE_SELECTOR": "*:cpu"}
    # Rounded as on the CPU.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    # One GPU is enough to test with.
    config.addinivalue_line("filterwarnings", "ignore:ProcessGrid.* share")
    if MPI.COMM_WORLD.rank:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = io.StringIO()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a failure to a file of the folder TEST_FAILURES, if set: a later test may hang."""
    folder = os.environ.get("TEST_FAILURES")
    if folder and report.failed:
        name = f"failures-{MPI.COMM_WORLD.size}-{MPI.COMM_WORLD.rank}.txt"
        with Path(folder, name).open("a") as file:
            file.write(f"=== {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}\n")


@pytest.fixture
def in_double() -> Iterator[None]:
    """Let a test make parameters and tensors in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules that a test imports, which other tests write under the same names."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield
    for name in ("net", "parts"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return one folder for all ranks."""
    return MPI.COMM_WORLD.bcast(tmp_path)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run on all ranks where it has failed on any."""
    failed = MPI.COMM_WORLD.allreduce(session.testsfailed, MPI.SUM)
    if MPI.COMM_WORLD.rank and session.testsfailed:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.summary_failures()
        sys.stderr.write(reporter._tw._file.getvalue())
    if failed and not session.testsfailed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
