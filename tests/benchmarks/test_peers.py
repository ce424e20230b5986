"""Scripts of peers run, and are compared with serial torch; nothing here looks at times."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import distconv.lbann
from benchmarks.measuring.network import Network
from benchmarks.peers.__main__ import CASES, rows
from benchmarks.peers.peer import Task, largest_difference, serial


def tiny(network: Network) -> Network:
    return network._replace(shape=(*network.shape[:2], *(16,) * (len(network.shape) - 2)))


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.measuring.turns.ROUNDS", (2, 2))
    monkeypatch.setattr("benchmarks.measuring.turns.SHORTEST", 0.0)
    monkeypatch.setattr("benchmarks.measuring.turns.ceil", lambda x: 1)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.lbann", raising=False)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parallel([2])
def test_dtensor_is_timed_or_its_error_is_told() -> None:
    found = [cells(row) for row in rows("dtensor", 0.0, list(map(tiny, CASES)))]
    assert [row[1] for row in found] == [case.name for case in CASES]
    assert all("Error: " in row[2] or float(row[3]) < 1e-11 for row in found)


@pytest.mark.parallel([2])
def test_dtensor_of_torch_2_13_raises_for_one_convolution_cut_along_its_width() -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("known of torch 2.13 alone")
    one = Network("one", lambda spatial: torch.nn.Conv2d(4, 4, 3, padding=1), (1, 4, 16, 16))
    (row,) = rows("dtensor", 0.0, [one])
    assert cells(row)[2].startswith("RuntimeError: ")


@pytest.mark.parallel([2])
def test_the_script_for_lbanns_package_runs_on_its_names_here(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "distconv").mkdir()
    names = "DCTensor, DistConvDDP, ParallelStrategy"
    (tmp_path / "distconv" / "__init__.py").write_text(f"from stand_in import {names}\n")
    monkeypatch.setitem(sys.modules, "stand_in", distconv.lbann)
    monkeypatch.setenv("DISTCONV_OF_LBANN", str(tmp_path))
    ours = distconv
    found = [cells(row) for row in rows("lbann", 0.0, list(map(tiny, CASES)))]
    assert sys.modules["distconv"] is ours
    assert len(found) == len(CASES)
    assert all(float(row[3]) < 1e-11 and float(row[4]) < 1e-11 for row in found)


@pytest.mark.parallel([2])
def test_a_peer_that_is_not_installed_has_a_row_that_says_so(monkeypatch) -> None:
    monkeypatch.delenv("DISTCONV_OF_LBANN", raising=False)
    (row,) = rows("lbann", 0.0)
    assert "not installed: DISTCONV_OF_LBANN names no folder" in row


@pytest.mark.parametrize(
    ("name", "package"), [("distdl", "distdl"), ("shardtensor", "physicsnemo")]
)
def test_peers_without_their_packages_have_rows_that_say_so(name: str, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    (row,) = rows(name, 0.0)
    assert "not installed: No module named" in row


@pytest.mark.parallel([2])
def test_jax_has_the_gradients_of_serial_torch_where_it_is_installed() -> None:
    pytest.importorskip("jax")
    found = [cells(row) for row in rows("jax", 0.0, list(map(tiny, CASES)))]
    assert all(float(row[3]) < 1e-11 for row in found)


def test_differences_are_relative_and_infinite_without_a_gradient() -> None:
    step = serial(Task.of(tiny(CASES[0]), torch.float64))
    step.run()
    expected = step.gradients()
    assert largest_difference([g * 2 for g in expected], expected) == 1.0
    assert largest_difference([None, *expected[1:]], expected) == float("inf")
