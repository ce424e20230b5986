"""The network, loss, training and inference of examples/unet3d, on grids and on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from mpi4py import MPI
from torch import nn

import distconv as dc
from examples.segmenting.dice import count, dice_coefficients
from examples.trainer.launch import words
from examples.unet3d import demo, segment, train
from examples.unet3d.data import made_volume
from examples.unet3d.generate import generate
from examples.unet3d.network import UNet3d
from examples.unet3d.score import segmentation_loss
from tests.support.everywhere import ended_with_one_line, on_rank_zero
from tests.support.example_grids import GRIDS, alone, axes

WORLD = MPI.COMM_WORLD
every_size = pytest.mark.parallel(list(GRIDS))
SIZE = (9, 8, 11)
LARGE = (19, 17, 13)


def test_the_network_has_the_published_number_of_weights() -> None:
    # 19 069 955 parameters as published, of which 2336 are biases before norms and 3 the last.
    model = UNet3d(channels=3, classes=3)
    kinds = (nn.Conv3d, nn.ConvTranspose3d)
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    assert sum(layer.weight.numel() for layer in layers) == 19_069_955 - 2_336 - 3
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm3d)]
    assert sum(norm.num_features for norm in norms) == 2_336


@pytest.mark.parametrize("size", [(8, 8, 8), (9, 8, 11), (13, 15, 1)])
def test_any_size_has_scores_for_each_voxel(size: tuple[int, int, int]) -> None:
    model = UNet3d(width=1 / 16)
    assert model(torch.randn(2, 1, *size)).shape == (2, 4, *size)


def test_the_loss_is_cross_entropy_and_one_minus_the_mean_dice_coefficient() -> None:
    labels = torch.randint(0, 4, (2, 3, 4, 5))
    sure = 50.0 * F.one_hot(labels, 4).movedim(-1, 1).double()
    assert segmentation_loss(sure, labels).item() == pytest.approx(0, abs=1e-6)
    even = torch.zeros(2, 4, 3, 4, 5, dtype=torch.float64)
    counts = torch.bincount(labels.reshape(-1), minlength=4).double()
    dice = ((0.5 * counts + 1) / (0.25 * labels.numel() + counts + 1)).mean()
    expected = np.log(4) + 1 - dice.item()
    assert segmentation_loss(even, labels).item() == pytest.approx(expected, rel=1e-12)


def test_dice_coefficients_are_those_of_sets() -> None:
    truth = torch.tensor([0, 0, 0, 1, 1, 2]).reshape(1, 1, 1, 6)
    guess = torch.tensor([0, 0, 1, 1, 2, 2]).reshape(1, 1, 1, 6)
    assert dice_coefficients(count(guess, truth, 4)) == pytest.approx([0.8, 0.5, 2 / 3, 1.0])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = WORLD.bcast(tmp_path_factory.mktemp("data")) / "data.h5"
    generate(path, 3, SIZE, 0, dc.ProcessGrid(sample=-1))
    return path


def options(data: Path, output: Path, grid: dict[str, int], epochs: int = 1) -> list[str]:
    """A small run in double precision, where grids must agree."""
    return ["--augment"] + words(
        {
            "data": str(data),
            "validation": str(data),
            "output": str(output),
            "grid": axes(grid),
            "epochs": str(epochs),
            "batch-size": "2",
            "width": "0.07",
            "precision": "float64",
        }
    )


@pytest.mark.parallel([4])
def test_every_grid_trains_and_segments_like_one_rank(data: Path, folder: Path) -> None:
    on_rank_zero(lambda: train.main(options(data, folder / "serial", {}, 2), MPI.COMM_SELF))
    expected = json.loads((folder / "serial" / "metrics.json").read_text())["history"]
    whole = made_volume(5, 0, LARGE, alone(), torch.float64)
    serial = segment.load_network(folder / "serial", alone()).double()
    with torch.no_grad():
        labels = serial(whole.batch([0])[0]).argmax(1).full_tensor()
    for place, grid in enumerate(GRIDS[WORLD.size]):
        output = folder / f"grid{place}"
        resume = [] if place else ["--resume", str(output)]
        if resume:
            train.main(options(data, output, grid, 1))
        train.main([*options(data, output, grid, 2), *resume])
        history = json.loads((output / "metrics.json").read_text())["history"]
        for actual, wanted in zip(history, expected, strict=True):
            assert actual["step_losses"] == pytest.approx(wanted["step_losses"], rel=1e-8)
            for name in train.Segmentation().scores():
                assert actual[name] == pytest.approx(wanted[name], rel=1e-8)
        for name in ("loss.png", "slices.png", "log.csv"):
            assert (output / name).stat().st_size > 0
        # The large volume lies in one sample, which only the other axes cut.
        spatial = {axis: n for axis, n in grid.items() if axis != "sample"} | {"depth": -1}
        volume = made_volume(5, 0, LARGE, dc.ProcessGrid(**spatial), torch.float64)
        torch.set_default_dtype(torch.float64)
        try:
            found = segment.segment(output, volume, folder / f"{place}.zarr", output / "large.png")
        finally:
            torch.set_default_dtype(torch.float32)
        saved = zarr.open_array(str(folder / f"{place}.zarr"), mode="r")
        assert saved.shape == (1, *LARGE) and saved.dtype == np.uint8
        assert (saved[:] == labels.numpy()).mean() > 0.999
        assert set(found) == {"background", "body", "organ", "lesion"}
        assert (output / "large.png").stat().st_size > 0


@pytest.mark.parallel(2)
@pytest.mark.usefixtures("drawn")
def test_the_demo_goes_from_nothing_to_a_segmentation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = {"size": "9,8,11", "samples": "2"}
    monkeypatch.setattr(demo, "SAMPLES", {"data": samples, "validation": samples})
    small = {"grid": "depth=2", "epochs": "1", "batch-size": "2", "width": "0.07"}
    monkeypatch.setattr(demo, "TRAIN", demo.TRAIN | small)
    monkeypatch.setattr(demo, "SEGMENT", {"size": "13", "grid": "depth=2"})
    for _ in range(2):  # it begins anew, with the samples that there are
        demo.run(folder)
        metrics = json.loads((folder / "metrics.json").read_text())
        assert len(metrics["history"]) == 1
        assert zarr.open_array(str(folder / "segmentation.zarr"), mode="r").shape == (1, 13, 13, 13)
        for name in ("loss.png", "slices.png", "segmentation.png"):
            assert (folder / name).stat().st_size > 0


@every_size
def test_each_rank_makes_its_own_box_of_a_volume() -> None:
    whole = made_volume(1, 2, LARGE, alone(), torch.float64)
    expected = [x.full_tensor() for x in whole.batch([0])]
    for grid in GRIDS[WORLD.size]:
        volume = made_volume(1, 2, LARGE, dc.ProcessGrid(**grid), torch.float64)
        image, labels = volume.batch([0])
        torch.testing.assert_close(image.full_tensor(), expected[0])
        assert torch.equal(labels.full_tensor(), expected[1])
        parts = grid.get("depth", 1) * grid.get("height", 1) * grid.get("width", 1)
        if parts > 1:
            assert max(WORLD.allgather(volume.bytes_read)) < 5 * np.prod(LARGE)


@pytest.mark.parallel([1, 2])
def test_segmenting_without_a_checkpoint_is_reported_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"checkpoint": str(folder / "none"), "output": str(folder / "a.zarr")}
    ended_with_one_line(
        lambda: segment.main(words(arguments)), "none/metrics.json: no such file", capsys
    )
