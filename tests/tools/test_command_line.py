"""`python -m distconv`: explain and verify, as launched by a user."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import re
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

import distconv
from distconv.__main__ import COMMANDS as ALL
from distconv.__main__ import main
from distconv.tools import command_line
from distconv.tools.command_line import StatusLine
from tests.planning.machines import described
from tests.support.everywhere import ended_with_one_line
from tests.support.jobs import end_of, forked, started, torchrun
from tests.support.pages import ROOT

WORLD = MPI.COMM_WORLD
Capture = pytest.CaptureFixture[str]
MESH = "examples.mesh_tangling.network:mesh_tangling_1k"


def test_explain_prints_the_plan_of_a_grid_that_is_not_there(capsys: Capture) -> None:
    shape = ("--shape", "64,18,1024,1024")
    assert main(["explain", MESH, *shape, "--grid", "height=64,width=64", "--rank", "65"]) == 0
    said = capsys.readouterr()
    # On a busy machine it says how far it has come.
    assert all(re.fullmatch(r".* \(\d+ s\)", line) for line in said.err.splitlines())
    assert "MeshTanglingNet on rank 65 of ProcessGrid(height=64, width=64)" in said.out
    assert "height 2+1 width 2+1" in said.out and "kept for backward" in said.out


def test_the_command_distconv_finds_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, value = settings["options.entry_points"]["console_scripts"].strip().split(" = ")
    command = importlib.metadata.EntryPoint(name, value, "console_scripts")
    (tmp_path / "own_net.py").write_text("from torch.nn import Tanh")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(
        sys, "argv", [name, "explain", "own_net:Tanh", "--shape", "2,3,9,7", "--grid", "height=2"]
    )
    assert command.load()() == 0
    assert command.name == "distconv"
    assert "Tanh on rank 1 of ProcessGrid(height=2)" in capsys.readouterr().out


@pytest.mark.parallel(2)
def test_verify_ends_with_status_0_when_all_agrees_and_1_when_not(capsys: Capture) -> None:
    case = ("torch.nn:Tanh", "--shape", "2,3,9,7", "--grid", "height=2", "--float64")
    assert main(["verify", *case]) == 0
    assert capsys.readouterr().out.count("all agree") == (WORLD.rank == 0)
    shapes = ("--shape", "2,3,90,70") * 2
    exact = ("--grid", "height=2", "--tolerance", "0")
    assert main(["verify", "torch.nn:MSELoss", *shapes, *exact]) == 1
    assert capsys.readouterr().out.count("first deviation: ") == (WORLD.rank == 0)


COMMANDS = """
import sys
sys.modules["mpi4py"] = None  # as where it cannot be loaded
import torch
from distconv.__main__ import main

tanh = "torch.nn:Tanh", "--shape", "2,3,9,7", "--grid", "height=2"
assert main(["explain", *tanh]) == main(["verify", *tanh]) == 0
study = "--shape", "2,3,9,7", "--ranks", "1,2", "--rounds", "2", "--predict-ranks", "4"
machine = ["--machine", sys.argv[1], "--output", sys.argv[2]]
assert main(["scale", "strong", "torch.nn:Tanh", *study, *machine]) == 0
print("done")
"""


def test_all_commands_run_under_torchrun_without_mpi(tmp_path: Path) -> None:
    path = tmp_path / "commands.py"
    path.write_text(COMMANDS)
    described().save(tmp_path / "machine.json")
    files = [str(tmp_path / name) for name in ("machine.json", "study.json")]
    end = end_of(started([*torchrun(2), *forked(path), *files]))
    assert (end.returncode, end.stdout.count("done")) == (0, 2), end.stderr
    for words in ("kept for backward", "all agree", "strong scaling of torch.nn:Tanh, 2 rounds"):
        assert end.stdout.count(words) == 1, end.stdout


FILE = """
import torch
from parts import Part

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(1, 2, 3, padding=1), Part())
"""


def module_in(folder: Path, part: str) -> str:
    """Write a module and its neighbour into a folder, and return what the command line calls it."""
    (folder / "net.py").write_text(FILE)
    (folder / "parts.py").write_text(part)
    return f"{folder / 'net.py'}:Net"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"distconv {distconv.__version__}\n"
    assert importlib.metadata.version("distconv") == distconv.__version__


@pytest.mark.usefixtures("own_modules")
def test_a_module_is_found_by_its_file_and_finds_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = module_in(tmp_path, "from torch.nn import Tanh as Part")
    case = [net, "--shape", "1,1,8,8", "--grid", "height=2"]
    assert main(["explain", *case]) == 0
    assert "Tanh" in capsys.readouterr().out
    assert main(["explain", *case, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [layer["kind"] for layer in plan["layers"]] == ["Conv2d", "Tanh"]
    assert plan["layers"][0]["halos"][0]["widths"] == {"height": [1, 0]}
    case[-1] = "height=1"
    assert main(["verify", *case, "--json"]) == 0
    verification = json.loads(capsys.readouterr().out)
    assert verification["ok"] and verification["rows"][-1]["layer"] == "input"


@pytest.mark.parallel(2)
def test_layers_are_given_layouts_of_their_own(capsys: Capture) -> None:
    first = WORLD.rank == 0
    case = (MESH, "--shape", "1,18,64,64", "--grid", "height=2")
    layers = ("--layouts", "blocks.0.*:height", "--layouts", "blocks.[1-9]*:channel=height")
    assert main(["explain", *case, *layers]) == 0
    out = capsys.readouterr().out
    assert ("layouts, blocks.1" in out) is ("height -> channel='height'" in out) is first
    assert main(["verify", *case, *layers, "--float64", "--no-backward"]) == 0
    assert capsys.readouterr().out.count("all agree") == first
    with pytest.raises(SystemExit) as end:
        main(["verify", *case, "--layouts", "trunk:sample"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("no module's name matches 'trunk'") == first


def test_no_command_lists_all(capsys: Capture) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"\n    {name}" in shown for name in ALL)


def test_progress_is_told_again_and_again_where_stderr_is_no_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "_SOON", 0.0)
    monkeypatch.setattr(command_line, "_SELDOM", 0.01)
    with StatusLine(begin="begun") as line, StatusLine(first=False) as other:
        said = ""
        while said.count("1 of 2 (0 s)\n") < 2:
            other("of another rank")
            said += capsys.readouterr().err
            line("1 of 2" if "begun (0 s)\n" in said else "begun")
    time.sleep(0.1)
    said += capsys.readouterr().err
    assert "another" not in said and not said.endswith(("2", "s)"))
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "torch.nn:Tanh", "--grid", "height=2"], "start it with mpiexec -n 2"),
        (["verify", "torch.nn:Tanh", "--grid", "heigth=2"], "'heigth=2' is not an axis"),
        (["explain", "torch.nn:Tanh", "--grid", "height=-1"], "give every axis its number"),
        (["explain", "./none.py:A", "--grid", "height=2"], "there is no file 'none.py'"),
        (["explain", "torch.nn:CosineSimilarity", "--grid", "height=2"], "raised TypeError"),
        (["explain", "torch.nn", "--grid", "height=2"], "write package.module:factory"),
        (["explain", "torch.nn.absent:A", "--grid", "height=2"], "no module 'torch.nn.absent'"),
        (["explain", "torch.nn:Tan", "--grid", "height=2"], "no function or class 'Tan'"),
        (["explain", "torch:tensor", "--grid", "height=2"], "torch:tensor raised TypeError"),
        (
            ["explain", "builtins:dict", "--grid", "height=2"],
            "returns a dict, not a torch.nn.Module",
        ),
        (["explain", "torch.nn:Tanh", "--grid", "height=2", "--rank", "2"], "not on a grid of 2"),
        (["explain", "torch.nn:Tanh", "--grid", "width=2", "--layout", "up"], "Write DIMENSION="),
        (["explain", "torch.nn:Tanh", "--grid", "width=2", "--layouts", "a"], "write PATTERN:"),
    ],
)
def test_bad_arguments_are_named_with_the_way_out(arguments, message, capsys) -> None:
    ended_with_one_line(lambda: main([*arguments, "--shape", "1,2,8,8"]), message, capsys)
