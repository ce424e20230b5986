"""The training run of the examples: what it writes beside checkpoints, and its command line."""

from __future__ import annotations

import csv
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from examples.mesh_tangling.train import main
from examples.trainer.logs import TensorBoard, write_table
from examples.trainer.ranks import boxes_of, needed_boxes, on_one_rank
from examples.trainer.training import typed, without
from tests.support.everywhere import ended_with_one_line, on_rank_zero
from tests.support.mesh_runs import arguments, write_file

WORLD = MPI.COMM_WORLD
EXAMPLES = sorted(
    path.parent.name for path in (Path(__file__).parents[2] / "examples").glob("*/train.py")
)
SHARED = (
    "data validation output grid epochs batch-size optimizer learning-rate seed precision resume "
    "compare-serial tensorboard recipe reference-batch-size warmup-epochs ema lag wire method "
    "servers groups period"
).split()


@pytest.mark.parallel([2, 4])
def test_pictures_have_the_boxes_of_a_sample_and_what_one_rank_makes_of_it() -> None:
    def network() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Conv2d(1, 2, 3, padding=1).double()

    grid = dc.ProcessGrid(sample=-1, height=2)
    model = dc.parallelize(network(), grid)
    with torch.no_grad():
        model.weight.mul_(2)
    whole = torch.randn(1, 1, 7, 5, generator=torch.Generator().manual_seed(0)).double()
    x = dc.distribute_tensor(whole, grid)
    assert boxes_of(x, grid) == [
        (0, (slice(0, 1), slice(0, 1), slice(0, 4), slice(0, 5))),
        (1, (slice(0, 1), slice(0, 1), slice(4, 7), slice(0, 5))),
    ]
    alone, expected = on_one_rank(network, model, x), model(x).full_tensor()
    assert alone is not None
    if grid.rank == 0:
        torch.testing.assert_close(alone(), expected)


@pytest.mark.parametrize(
    ("stride", "rows", "ends"),
    [
        (1, [(0, 3), (3, 6), (6, 9), (9, 11)], [(0, 4), (2, 7), (5, 10), (8, 11)]),
        # Two outputs a rank: output o covers the rows from 2 o - 1 to 2 o + 1.
        (2, [(0, 4), (4, 8), (8, 11)], [(0, 4), (3, 8), (7, 11)]),
    ],
)
def test_pictures_have_the_halo_of_the_opening_convolution(
    stride: int, rows: list[tuple[int, int]], ends: list[tuple[int, int]]
) -> None:
    boxes = [
        (rank, (slice(0, 1), slice(0, 3), slice(*own), slice(0, 5)))
        for rank, own in enumerate(rows)
    ]
    layer = torch.nn.Conv2d(3, 2, 3, stride, padding=1)
    found = needed_boxes(layer, boxes, (1, 3, 11, 5))
    assert [(box[2].start, box[2].stop) for _, box in found] == ends
    assert all(box[3] == slice(0, 5) for _, box in found)


HISTORY: list[dict[str, Any]] = [
    {"step_losses": [4.0, 2.0], "samples_per_second": 8.0, "loss": 1.5, "iou": 0.5},
    {"step_losses": [1.0, 0.5], "samples_per_second": 9.0, "loss": 0.75, "iou": 0.25},
]


def test_the_table_has_a_line_of_numbers_for_each_epoch(tmp_path: Path) -> None:
    write_table(tmp_path / "log.csv", HISTORY)
    with open(tmp_path / "log.csv") as file:
        rows = [{name: float(text) for name, text in row.items()} for row in csv.DictReader(file)]
    assert rows == [
        {
            "epoch": 1, "steps": 2, "training_loss": 3.0, "samples_per_second": 8.0,
            "validation_loss": 1.5, "iou": 0.5,
        },
        {
            "epoch": 2, "steps": 4, "training_loss": 0.75, "samples_per_second": 9.0,
            "validation_loss": 0.75, "iou": 0.25,
        },
    ]  # fmt: skip


class Recorded:
    """A stand-in for the writer of events that keeps what it is given."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.scalars = {"purged from": [(purge_step, 0.0)]}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, value))

    def flush(self) -> None:
        pass


def test_events_go_on_at_the_step_where_a_run_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[Recorded] = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda *a, **k: writers.append(Recorded(*a, **k)) or writers[-1]  # type: ignore
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    TensorBoard(tmp_path, HISTORY[:1]).add(HISTORY[1])
    assert writers[0].scalars == {
        "purged from": [(3, 0.0)],
        "training/loss": [(3, 1.0), (4, 0.5)],
        "validation/samples_per_second": [(4, 9.0)],
        "validation/loss": [(4, 0.75)],
        "validation/iou": [(4, 0.25)],
    }


@pytest.mark.parallel([1, 2])
def test_events_without_tensorboard_are_an_error_with_the_way_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    file = folder / "data.h5"
    on_rank_zero(lambda: write_file(file))
    words = arguments(file, folder / "run", {"height": WORLD.size}, 1, "--tensorboard")
    ended_with_one_line(lambda: main(words), "pip install tensorboard", capsys)


def test_the_next_command_has_each_option_once() -> None:
    words = ["--data", "x.h5", "--grid", "height=2", "--epochs=3", "--augment"]
    assert [*without(words, ("--grid", "--epochs"))] == ["--data", "x.h5", "--augment"]


def test_a_program_in_the_current_folder_is_typed_as_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(Path.cwd() / ".venv" / "bin" / "mpiexec") == ".venv/bin/mpiexec"
    assert typed(Path("/usr/bin/python")) == "/usr/bin/python"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_lines_of_all_examples_have_the_shared_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train = importlib.import_module(f"examples.{name}.train")
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: python -m examples.{name}.train" in said
    assert all(f"--{option} " in said or f"--{option}\n" in said for option in SHARED)
    assert f"mpiexec -n 4 python -m examples.{name}.train" in said
