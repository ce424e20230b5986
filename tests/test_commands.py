"""`python -m distconv`: explain and verify, as launched by a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_failure import mpiexec

from distconv.__main__ import main

MESH = "examples.mesh_tangling.network:mesh_tangling_1k"


def command(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """The end of the command on this number of ranks; without a launcher for none."""
    foreign = ("PMI", "MPI", "HYD", "OMPI", "PYTEST")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment |= {"OMP_NUM_THREADS": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    launcher = [mpiexec(), "-n", str(ranks)] if ranks else []
    return subprocess.run(
        [*launcher, sys.executable, "-m", "distconv", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
        timeout=60,
    )


def test_explain_prints_the_plan_of_a_grid_that_is_not_there() -> None:
    shape = ("--shape", "64,18,1024,1024")
    end = command("explain", MESH, *shape, "--grid", "height=64,width=64", "--rank", "65")
    assert (end.returncode, end.stderr) == (0, "")
    assert "MeshTanglingNet on rank 65 of ProcessGrid(height=64, width=64)" in end.stdout
    assert "height 2+1 width 2+1" in end.stdout and "kept for backward" in end.stdout


def test_verify_ends_with_status_0_when_all_agrees_and_1_when_not() -> None:
    case = ("torch.nn:Tanh", "--shape", "2,3,9,7", "--grid", "height=2", "--float64")
    end = command("verify", *case, ranks=2)
    assert end.returncode == 0 and end.stdout.count("all agree") == 1, end.stderr
    shapes = ("--shape", "2,3,90,70") * 2
    exact = ("--grid", "height=2", "--tolerance", "0")
    end = command("verify", "torch.nn:MSELoss", *shapes, *exact, ranks=2)
    assert end.returncode == 1 and end.stdout.count("first deviation: ") == 1, end.stderr


def test_layers_are_given_layouts_of_their_own() -> None:
    case = (MESH, "--shape", "1,18,64,64", "--grid", "height=2")
    layers = ("--layouts", "blocks.0.*:height", "--layouts", "blocks.[1-9]*:channel=height")
    end = command("explain", *case, *layers)
    assert (end.returncode, end.stderr) == (0, "")
    assert "height -> channel='height' by layouts" in end.stdout
    end = command("verify", *case, *layers, "--float64", "--no-backward", ranks=2)
    assert end.returncode == 0 and end.stdout.count("all agree") == 1, end.stderr
    end = command("verify", *case, "--layouts", "trunk:sample", ranks=2)
    assert end.returncode == 2 and end.stderr.count("no module's name matches 'trunk'") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "torch.nn:Tanh", "--grid", "height=2"], "start it with mpiexec -n 2"),
        (["verify", "torch.nn:Tanh", "--grid", "heigth=2"], "'heigth=2' is not an axis"),
        (["explain", "torch.nn:Tanh", "--grid", "height=-1"], "give every axis its number"),
        (["explain", "torch.nn", "--grid", "height=2"], "write package.module:factory"),
        (["explain", "torch.nn.absent:A", "--grid", "height=2"], "no module 'torch.nn.absent'"),
        (["explain", "torch.nn:Tan", "--grid", "height=2"], "no function or class 'Tan'"),
        (["explain", "torch:tensor", "--grid", "height=2"], "torch:tensor raised TypeError"),
        (["explain", "builtins:dict", "--grid", "height=2"], "makes a dict, not a torch.nn.Module"),
        (["explain", "torch.nn:Tanh", "--grid", "height=2", "--rank", "2"], "not on a grid of 2"),
        (["explain", "torch.nn:Tanh", "--grid", "width=2", "--layout", "up"], "Write DIMENSION="),
        (["explain", "torch.nn:Tanh", "--grid", "width=2", "--layouts", "a"], "write PATTERN:"),
    ],
)
def test_bad_arguments_are_named_with_the_way_out(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--shape", "1,2,8,8"])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
