"""`python -m distconv calibrate` and `predict`, as started from a folder of one's own."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
from mpi4py import MPI

from distconv.__main__ import main
from distconv.planning import calibration
from distconv.planning.machine import Machine
from tests.planning.machines import described
from tests.support.everywhere import ended_with_one_line

FILE = """
import torch
from parts import Part

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(1, 2, 3, padding=1), Part())
"""
NET = "./net.py:Net", "--shape", "2,1,16,16"


@pytest.fixture
def home(own_modules: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a module in two files, and a described machine."""
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "parts.py").write_text("from torch.nn import ReLU as Part")
    described().save(tmp_path / "round.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parallel(2)
def test_a_machine_is_calibrated_on_all_its_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "--output", str(folder / "machine.json")
    monkeypatch.setattr(calibration, "_BUSY", 0.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert main(["calibrate", "--seconds", "1", *output]) == 0
    busy = [str(w.message) for w in told if "8 bytes take" in str(w.message)]
    assert len(busy) == (MPI.COMM_WORLD.rank == 0)
    if MPI.COMM_WORLD.rank == 0:
        assert "messages within" in capsys.readouterr().out
        machine = Machine.load(folder / "machine.json")
        assert machine.ranks_per_node == 2 and not machine.assumed
        assert set(machine.reductions) == {"all_reduce within", "all_gather within"}
        assert machine.host["conv2d across ranks"].at(0) > 0
        assert {"*", "* across ranks", "* backward", "* across ranks backward"} <= set(machine.host)
        assert "linear" not in machine.host, "a second is too short for all layers"
        assert machine.host["parameter across ranks"].at(0) > 0
        assert machine.skew.sizes[0] == 0 and len(machine.skew.sizes) > 2
        assert {name.split()[0] for name in machine.sources} >= {"links", "packing", "host"}
    else:
        assert capsys.readouterr().out == ""
    MPI.COMM_WORLD.Barrier()


def test_local_operators_are_timed_once_and_kept_with_the_machine(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataclasses.replace(described(), roofline=None, assumed=False).save(home / "machine.json")
    line = ["predict", *NET, "--grid", "height=2", "--json"]
    assert main(line) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["grid"] == {"height": 2} and step["seconds"] > 0
    known = Machine.load(home / "machine.json").operators["2"]
    assert any(name.startswith("aten.convolution.default") for name in known)
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out) == step


def test_a_described_machine_predicts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = *NET, "--machine", "round.json", "--grid", "sample=2,height=4"
    assert main(["predict", *line]) == 0
    said = capsys.readouterr().out
    assert "Net on sample=2,height=4 of round, assumed" in said and "critical path: " in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--grid", "height=2", "--machine", "none.json"), "calibrate --output none.json"),
        (("--grid", "height=2", "--machine", "net.py"), "describes no machine"),
        (("--grid", "height=-1", "--machine", "round.json"), "height=-1"),
        (("--grid", "height=2", "--machine", "round.json", "--dtype", "float16"), "float16"),
    ],
)
def test_what_cannot_be_predicted_is_an_error_in_words(
    home: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    ended_with_one_line(lambda: main(["predict", *NET, *options]), words, capsys)
