"""The network, loss and training of examples/fractals, on grids and on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc
from examples.fractals import demo, merit, train
from examples.fractals.generate import generate
from examples.fractals.network import UNet
from examples.fractals.score import class_weights, fractal_loss
from examples.trainer.launch import words
from tests.support.everywhere import ended_with_one_line, on_rank_zero
from tests.support.example_grids import GRIDS, axes

WORLD = MPI.COMM_WORLD
LABELS = dc.Layout.of(((), ("depth",), ("height",), ("width",)))


@pytest.mark.parametrize(("scale", "levels"), [(3, 1), (5, 2), (7, 4)])
def test_the_network_has_a_level_for_each_scale_above_three(scale: int, levels: int) -> None:
    with torch.device("meta"):
        model = UNet(6, scale)
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv3d)]
        norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
        widest = max(m.out_channels for m in convolutions)
        assert len(convolutions) == 2 * (2 * levels + 1) + 1 and len(norms) == 2 * (2 * levels + 1)
        assert widest == 64 * 2**levels and all(m.num_groups == 8 for m in norms)
        side = 2**scale
        assert model(torch.empty(1, 3, side, side, side)).shape == (1, 6, side, side, side)


def test_what_is_upsampled_is_padded_to_its_skip() -> None:
    assert UNet(4, 5, 8)(torch.randn(1, 3, 9, 7, 10)).shape == (1, 4, 9, 7, 10)


@pytest.mark.parallel([2])
def test_local_statistics_are_not_those_of_the_serial_network() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8, 8)
    cut = dc.distribute_tensor(x, dc.ProcessGrid(depth=2))
    exact, local = (UNet(3, 4, 8, statistics) for statistics in ("global", "local"))
    local.load_state_dict(exact.state_dict())
    with torch.no_grad():
        expected = exact(x)
        torch.testing.assert_close(local(x), expected)
        torch.testing.assert_close(exact(cut).full_tensor(), expected, rtol=1e-4, atol=1e-4)
        assert (local(cut).full_tensor() - expected).abs().max() > 0.1


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_deep_levels_that_are_cut_by_channels_train_as_the_serial_network(recompute: bool) -> None:
    torch.manual_seed(0)
    serial = UNet(3, 5, 8).double()
    model = UNet(3, 5, 8, recompute=recompute).double()
    model.load_state_dict(serial.state_dict())
    layouts = model.channel_layouts(2)
    grid = dc.ProcessGrid(depth=2, height=WORLD.size // 2)
    dc.parallelize(model, grid, layouts=layouts, shard_parameters=True)
    x, labels = torch.randn(1, 3, 16, 16, 16).double(), torch.randint(3, (1, 16, 16, 16))
    cut = [dc.distribute_tensor(x, grid), dc.distribute_tensor(labels, grid, LABELS)]
    optimizers = [torch.optim.Adam(m.parameters()) for m in (serial, model)]
    for _ in range(2):
        fractal_loss(serial(x), labels, torch.ones(3)).backward()
        fractal_loss(model(cut[0]), cut[1], torch.ones(3)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dc.full_state_dict(model), serial.state_dict())
    kept = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, dc.DistTensor))
    assert kept > 0.9 * sum(p.numel() for p in serial.parameters()) / 2


def test_channels_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="channels=12 is not a multiple of 8"):
        UNet(3, 4, 12)


def test_weights_are_one_over_the_frequency_of_classes() -> None:
    assert class_weights([0.8, 0.1, 0.1]).tolist() == pytest.approx([3 / 17, 24 / 17, 24 / 17])
    assert class_weights([0.8, 0.0, 0.2]).tolist() == pytest.approx([1 / 3, 4 / 3, 4 / 3])


def test_the_loss_is_weighted_cross_entropy_and_the_dice_loss_of_fractals() -> None:
    labels = torch.randint(0, 3, (2, 3, 4, 5))
    scores = torch.randn(2, 3, 3, 4, 5, dtype=torch.float64)
    weights = torch.tensor([0.2, 1.0, 1.8], dtype=torch.float64)
    probabilities = scores.softmax(1)
    chosen = probabilities.gather(1, labels[:, None])[:, 0]
    w = weights[labels]
    expected = (-(w * chosen.log()).sum() / w.sum()).item() + 1
    for label in (1, 2):
        p, t = probabilities[:, label], (labels == label).double()
        expected -= 0.5 * ((2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)).item()
    assert fractal_loss(scores, labels, weights).item() == pytest.approx(expected, rel=1e-12)
    sure = 50.0 * F.one_hot(labels, 3).movedim(-1, 1).double()
    assert fractal_loss(sure, labels, weights).item() == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = WORLD.bcast(tmp_path_factory.mktemp("data")) / "data.h5"
    generate(path, 4, 4, 3, 0, dc.ProcessGrid(sample=-1))
    return path


def options(data: Path, output: Path, grid: dict[str, int], epochs: int = 1) -> list[str]:
    """A small run in double precision, where grids must agree."""
    return words(
        {
            "data": str(data),
            "validation": str(data),
            "output": str(output),
            "grid": axes(grid),
            "epochs": str(epochs),
            "batch-size": "2",
            "channels": "8",
            "precision": "float64",
        }
    )


@pytest.mark.parallel([4])
def test_every_grid_trains_like_one_rank(data: Path, folder: Path) -> None:
    on_rank_zero(lambda: train.main(options(data, folder / "serial", {}, 2), MPI.COMM_SELF))
    expected = json.loads((folder / "serial" / "metrics.json").read_text())["history"]
    for place, grid in enumerate(GRIDS[4]):
        output = folder / f"grid{place}"
        resume = [] if place else ["--resume", str(output)]
        if resume:
            train.main([*options(data, output, grid, 1), "--compare-serial", "5"])
            found = json.loads((output / "metrics.json").read_text())["compare_serial"]["grid"]
            assert found["loss"] < 1e-10 and found["parameters"] < 1e-8
        train.main([*options(data, output, grid, 2), *resume])
        history = json.loads((output / "metrics.json").read_text())["history"]
        for actual, wanted in zip(history, expected, strict=True):
            assert actual["step_losses"] == pytest.approx(wanted["step_losses"], rel=1e-8)
            for name in train.FractalSegmentation().scores():
                assert actual[name] == pytest.approx(wanted[name], rel=1e-8)
        for name in ("loss.png", "volume.png", "log.csv"):
            assert (output / name).stat().st_size > 0


@pytest.mark.parallel([1, 2])
def test_autocast_and_recomputation_learn_too(data: Path, folder: Path) -> None:
    losses = []
    for place, more in enumerate(([], ["--autocast"], ["--autocast", "--recompute"])):
        arguments = options(data, folder / str(place), GRIDS[WORLD.size][0])
        arguments[arguments.index("--precision") + 1] = "float32"
        train.main([*arguments, *more])
        history = json.loads((folder / str(place) / "metrics.json").read_text())["history"]
        losses.append(history[0]["step_losses"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]
    assert losses[2] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parallel([1, 2])
def test_the_figure_of_merit_counts_until_the_target(data: Path, folder: Path) -> None:
    grid = GRIDS[WORLD.size][0]
    arguments = options(data, folder, grid, 3)
    at = arguments.index("--output")
    del arguments[at : at + 2]
    own = ["--seeds", "2", "--output", str(folder), *arguments]
    merit.main([*own, "--target", "1e-9"])
    rows = json.loads((folder / "merit.json").read_text())
    assert [(row["seed"], row["epochs"], row["steps"]) for row in rows] == [(0, 1, 2), (1, 1, 2)]
    assert all(row["seconds"] > 0 for row in rows)
    written = (folder / "seed-0" / "metrics.json").stat().st_mtime_ns
    merit.main([*own, "--target", "1e-9"])  # nothing is left to do
    assert (folder / "seed-0" / "metrics.json").stat().st_mtime_ns == written
    page = (folder / "merit.md").read_text()
    assert page.splitlines()[-1].startswith("| median | ")
    never = merit.table([rows[0] | {"seconds": None}, rows[1] | {"seconds": None}])
    assert [line.split(" | ")[1] for line in never.splitlines()[2:]] == ["never"] * 3


@pytest.mark.parallel([1, 2])
def test_samples_of_other_classes_and_a_target_in_percent_are_refused(
    data: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "other.h5"
    generate(other, 2, 4, 3, 1, dc.ProcessGrid(sample=-1))
    arguments = options(data, folder / "run", GRIDS[WORLD.size][0])
    arguments[arguments.index("--validation") + 1] = str(other)
    ended_with_one_line(lambda: train.main(arguments), "other.h5 has seed 1", capsys)
    arguments = [*options(data, folder / "run", GRIDS[WORLD.size][0]), "--target", "95"]
    ended_with_one_line(lambda: train.main(arguments), "--target 95 is no Dice", capsys)


@pytest.mark.parallel(2)
def test_the_demo_goes_from_nothing_to_pictures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = demo.VOLUMES | {"scale": "3", "grid": "depth=2", "samples": "2"}
    monkeypatch.setattr(demo, "SAMPLES", {"data": samples, "validation": samples})
    monkeypatch.setattr(demo, "TRAIN", {"channels": "8", "grid": "depth=2", "epochs": "1"})
    losses = []
    for _ in range(2):  # it begins anew, with the samples that there are
        demo.run(folder)
        history = json.loads((folder / "metrics.json").read_text())["history"]
        losses.append([record["loss"] for record in history])
        for name in ("loss.png", "volume.png"):
            assert (folder / name).stat().st_size > 0
        WORLD.Barrier()  # before rank 0 removes what the others read
    if WORLD.rank == 0:
        (folder / "metrics.json").unlink()  # as if the run had been interrupted after its epoch
    monkeypatch.setitem(demo.TRAIN, "epochs", "2")
    WORLD.Barrier()
    demo.run(folder)
    history = json.loads((folder / "metrics.json").read_text())["history"]
    assert len(history) == 2 and losses == 2 * [[history[0]["loss"]]]
