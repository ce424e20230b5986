"""`python -m distconv scale`, as a user calls it with a module of their own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from distconv.__main__ import main
from distconv.planning.machine import LinkTimes
from tests.planning.machines import described
from tests.support.jobs import end_of, start

NET = """
import torch
from parts import tail

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(1, 2, 3, padding=1), *tail())
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(own_modules: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's own, with a module and what that imports; the working directory."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "parts.py").write_text("import torch\ntail = lambda: [torch.nn.Tanh()]\n")
    monkeypatch.chdir(tmp_path)
    described().save("round.json")
    return tmp_path


def scale(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of the command on this number of ranks."""
    program = ROOT / "distconv" / "__main__.py"
    return end_of(start(program, ranks, "scale", *arguments, fresh=False, PYTHONPATH=str(ROOT)))


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command says when it ends with an error."""
    with pytest.raises(SystemExit) as end:
        main(["scale", *options])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_study_of_two_ranks_is_run_predicted_and_drawn(folder: Path) -> None:
    case = ("strong", "./net.py:Net", "--shape", "2,1,16,16", "--ranks", "1,2")
    more = ("--predict-ranks", "4", "--machine", "round.json", "--output", "s.json")
    end = scale(2, *case, *more, "--rounds", "2")
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("strong scaling of ./net.py:Net, 2 rounds") == 1
    assert "height=2" in end.stdout and "height=2,width=2" in end.stdout
    assert "strong scaling of ./net.py:Net" in (folder / "s.report.html").read_text()
    study = json.loads((folder / "s.json").read_text())
    assert [len(c["seconds"]) for c in study["cases"]] == [2, 2, 0]
    assert all(c["predicted"] > 0 for c in study["cases"])


def test_a_study_is_continued_and_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ("weak", "./net.py:Net", "--shape=2,1,16,16", "--ranks=1", "--output=s.json")
    assert main(["scale", *case, "--rounds=2"]) == 0
    first = json.loads((folder / "s.json").read_text())
    capsys.readouterr()
    assert main(["scale", *case, "--rounds=3", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for before, after in zip(first["cases"], again["cases"], strict=True):
        assert after["seconds"][:2] == before["seconds"] and len(after["seconds"]) == 3
    (folder / "t.json").write_text(json.dumps(again))
    # That has no format, as it is not the file of a study.
    assert "not a scaling study" in refusal(capsys, "compare", "s.json", "t.json")
    (folder / "t.json").write_bytes((folder / "s.json").read_bytes())
    assert main(["scale", "compare", "s.json", "t.json"]) == 0
    assert capsys.readouterr().out.count("1.000  quartiles overlap") == 1
    assert "begun with module ./net.py:Net" in refusal(
        capsys, "weak", "torch.nn:Tanh", "--shape=2,1,16,16", "--ranks=1", "--output=s.json"
    )


def test_predictions_alone_take_one_process(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "1,1,16,16", "--predict-ranks", "1,64", "--machine", "round.json"]
    assert main(["scale", "weak", "./net.py:Net", *arguments]) == 0
    assert "sample=64  64x1x16x16" in capsys.readouterr().out
    study = json.loads((folder / "scale-weak.json").read_text())
    assert study["machine"] == "round" and not any(case["measured"] for case in study["cases"])


def test_a_module_that_asks_for_elements_cannot_be_predicted_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "asks.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Tanh):\n"
        "    def forward(self, x):\n"
        "        return x * x.sum().item()\n"
    )
    arguments = ("--shape=1,1,8,8", "--predict-ranks=2", "--machine=round.json")
    assert "Net" in refusal(capsys, "strong", "./asks.py:Net", *arguments)


def test_a_machine_that_cannot_predict_the_cases_is_refused_before_any_is_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    within = {"within": LinkTimes.described(1e-6, 1e10)}
    dataclasses.replace(described(), links=within).save("one-node.json")
    for machine, said in (("none", "no machine file"), ("one-node", "than the 4 of a node")):
        options = ("--ranks=1", "--predict-ranks=4,8", f"--machine={machine}.json")
        assert said in refusal(capsys, "strong", "./net.py:Net", "--shape=1,1,16,16", *options)
        assert not (folder / "scale-strong.json").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        ((), "nothing to study"),
        (("--ranks=1,x",), "not numbers of ranks"),
        (("--ranks=64",), "start it with mpiexec -n 64"),
        (("--predict-ranks=2",), "--predict-ranks needs --machine"),
        (("--ranks=1", "--grids=height=1"), "leave --ranks out"),
        (("--grids=height=-1",), "height=-1 is not an axis with ranks"),
        (("--ranks=1", "--rounds=1"), "at least two --rounds"),
        (("--ranks=1", "--layouts=block:sample"), "block"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(
    folder: Path, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ("strong", "torch.nn:Tanh", "--shape=1,1,8,8")
    assert said in refusal(capsys, *case, *options)


def test_a_shape_that_the_module_refuses_is_told_before_any_case_is_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(capsys, "strong", "./net.py:Net", "--shape=1,2,8,8", "--ranks=1")
    assert "expects 1 channels, but the input (1, 2, 8, 8) has 2" in told
