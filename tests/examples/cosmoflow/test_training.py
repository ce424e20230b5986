"""The networks, data, training and study of examples/cosmoflow, on grids and on one rank."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from examples.cosmoflow import demo, study, train
from examples.cosmoflow.cosmology import RANGES, draw_cosmology
from examples.cosmoflow.data import Universes, from_range
from examples.cosmoflow.generate import generate
from examples.cosmoflow.network import FORMS, CosmoFlowNet
from examples.cosmoflow.score import score
from examples.trainer.launch import words
from tests.support.everywhere import fails_everywhere, on_rank_zero
from tests.support.example_grids import GRIDS, alone, axes

WORLD = MPI.COMM_WORLD
every_size = pytest.mark.parallel(list(GRIDS))
SIDE = 16


# Networks


def blocks(model: CosmoFlowNet, kind: type[nn.Module]) -> list[nn.Module]:
    return [layer for layer in model.blocks if isinstance(layer, kind)]


@pytest.mark.parametrize(
    ("form", "size", "filters", "head"),
    [
        ("average", 128, [16, 32, 64, 128, 256], [2048, 256, 4]),
        ("average", 512, [16, 32, 64, 128, 256, 256, 256], [2048, 256, 4]),
        ("maximum", 128, [32, 64, 128, 256, 512], [128, 64, 4]),
        ("maximum", 32, [32, 64, 128], [128, 64, 4]),
    ],
)
def test_the_networks_are_the_published_ones(
    form: str, size: int, filters: list[int], head: list[int]
) -> None:
    with torch.device("meta"):
        model = CosmoFlowNet(FORMS[form], size)
        assert [c.out_channels for c in blocks(model, nn.Conv3d)] == filters
        assert [a.out_features for a in model.head if isinstance(a, nn.Linear)] == head
        assert model.head[0].in_features == 4**3 * filters[-1]
        assert len(blocks(model, nn.AvgPool3d if form == "average" else nn.MaxPool3d)) == len(
            filters
        )
        assert model(torch.empty(2, 4, size, size, size)).shape == (2, 4)
        normed = CosmoFlowNet(FORMS[form], size, batch_norm=True)
        assert [n.num_features for n in blocks(normed, nn.BatchNorm3d)] == filters
        assert all(c.bias is None for c in blocks(normed, nn.Conv3d))


@pytest.mark.parametrize("size", [4, 24, 0])
def test_a_size_that_is_no_power_of_two_is_an_error_with_the_way_out(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size}.3 do not fit.*powers of two, from 8"):
        CosmoFlowNet(FORMS["average"], size)


# Data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = WORLD.bcast(tmp_path_factory.mktemp("data")) / "data.h5"
    generate(path, 3, SIDE, 8.0, 2, dc.ProcessGrid(sample=-1))
    return path


@pytest.mark.parallel([1, 2, 3, 4])
def test_the_file_holds_the_universes_of_one_rank(folder: Path) -> None:
    grids = {1: {}, 2: {"depth": 2}, 3: {"sample": 3}, 4: {"sample": 2, "depth": 2}}
    path = folder / "grid.h5"
    generate(path, 3, 8, 4.0, 1, dc.ProcessGrid(**grids[WORLD.size]))
    on_rank_zero(lambda: generate(folder / "alone.h5", 3, 8, 4.0, 1, alone()))
    with h5py.File(path) as made, h5py.File(folder / "alone.h5") as expected:
        assert made["density"].shape == (3, 4, 8, 8, 8) and made["density"].dtype == np.float32
        np.testing.assert_allclose(made["density"], expected["density"], atol=1e-5)
        np.testing.assert_allclose(made["density"][:].mean((2, 3, 4)), 1, atol=1e-6)
        drawn = [[getattr(draw_cosmology(1, i), name) for name in RANGES] for i in range(3)]
        np.testing.assert_array_equal(made["parameters"], drawn)
        logarithm = np.log1p(made["density"][:].astype(float))
        for name, values in (("log_mean", logarithm.mean((0, 2, 3, 4))),
                             ("log_deviation", logarithm.std((0, 2, 3, 4)))):  # fmt: skip
            np.testing.assert_allclose(made.attrs[name], values, rtol=1e-6)
        # Structure grows from one redshift to the next.
        deviations = made["density"][:].std((2, 3, 4))
        assert (np.diff(deviations, axis=1) > 0).all()


@every_size
@pytest.mark.parametrize("parts", [1, 2])
def test_parts_of_universes_are_their_octants_beside_the_same_parameters(
    data: Path, parts: int
) -> None:
    with h5py.File(data) as file:
        density, parameters = file["density"][:], file["parameters"][:]
        mean, deviation = file.attrs["log_mean"], file.attrs["log_deviation"]
    shape = (-1, 1, 1, 1)
    density = (np.log1p(density) - mean.reshape(shape)) / deviation.reshape(shape)
    side = SIDE // parts
    for extents in GRIDS[WORLD.size]:
        universes = Universes(data, dc.ProcessGrid(**extents), torch.float64, parts)
        assert (universes.size, universes.samples) == (side, 3 * parts**3)
        samples = [0, universes.samples - 1]
        x, y = universes.batch(samples)
        corners = [slice(0, side), slice(SIDE - side, SIDE)]
        expected = np.stack([density[u][:, c, c, c] for u, c in zip((0, 2), corners, strict=True)])
        np.testing.assert_allclose(x.full_tensor().numpy(), expected, atol=1e-6)
        whole = y.full_tensor().numpy()
        assert (np.abs(whole) <= 1).all()
        np.testing.assert_allclose(from_range(whole), parameters[[0, 2]], rtol=1e-12)


@pytest.mark.parallel([1, 2])
def test_parts_that_do_not_divide_a_universe_are_an_error(data: Path) -> None:
    grid = dc.ProcessGrid(sample=-1)
    fails_everywhere(lambda: Universes(data, grid, parts=3), "3 parts do not divide a side of 16")


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"density": (2, 4, 8, 8, 8), "parameters": (2, 4)}, "lacks the mean and deviation"),
        ({"density": (2, 4, 8, 8, 4), "parameters": (2, 4)}, r"expected \(4, W, W, W\) and \(4,\)"),
        ({"density": (2, 4, 8, 8, 8)}, "parameters"),
    ],
)
def test_a_file_of_other_things_is_an_error_on_all_ranks(
    folder: Path, datasets: dict[str, tuple[int, ...]], message: str
) -> None:
    if WORLD.rank == 0:
        with h5py.File(folder / "other.h5", "w") as file:
            for name, shape in datasets.items():
                file[name] = np.ones(shape, np.float32)
    WORLD.barrier()
    grid = dc.ProcessGrid(sample=-1)
    fails_everywhere(lambda: Universes(folder / "other.h5", grid), f"other.h5.*{message}")


def test_estimates_of_the_parts_of_a_universe_are_averaged() -> None:
    true = np.repeat([[0.5, -0.5, 0.0, 1.0], [-0.5, 0.5, 0.0, 0.0]], 2, axis=0)
    errors = np.array([[1.0], [-1.0], [0.5], [0.5]])
    found = score(true + errors, true, 2)
    assert found.loss == pytest.approx((1 + 1 + 0.25 + 0.25) / 4)
    assert found.universe_loss == pytest.approx((0 + 0.25) / 2)
    assert found.trivial_loss == pytest.approx((0.25 + 0.25 + 0 + 0.25) / 4)
    assert found.error_omega_m == pytest.approx(0.1 * np.sqrt(2.5 / 4))


@pytest.mark.parallel(2)
def test_more_ranks_along_depth_than_planes_are_an_error(folder: Path) -> None:
    grid = dc.ProcessGrid(depth=2)
    fails_everywhere(
        lambda: generate(folder / "a.h5", 1, 1, 4.0, 0, grid), "leaves ranks without a plane of 1"
    )


# Training


def options(data: Path, output: Path, grid: dict[str, int], form: str) -> list[str]:
    """A small run in double precision, where grids must agree."""
    paths = {"data": str(data), "validation": str(data), "output": str(output)}
    small = {"grid": axes(grid), "epochs": "1", "batch-size": "2", "width": "0.1"}
    return words(paths | small | {"network": form, "precision": "float64"})


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("form", "more", "grids"),
    [("average", [], 2), ("maximum", ["--batch-norm", "--augment", "--parts", "2"], 1)],
)
def test_every_grid_trains_like_one_rank(
    data: Path, folder: Path, form: str, more: list[str], grids: int
) -> None:
    serial = options(data, folder / "serial", {}, form) + more
    on_rank_zero(lambda: train.main(serial, MPI.COMM_SELF))
    expected = json.loads((folder / "serial" / "metrics.json").read_text())["history"]
    for place, grid in enumerate(GRIDS[WORLD.size][:grids]):
        output = folder / f"grid{place}"
        train.main(options(data, output, grid, form) + more)
        history = json.loads((output / "metrics.json").read_text())["history"]
        for actual, wanted in zip(history, expected, strict=True):
            assert actual["step_losses"] == pytest.approx(wanted["step_losses"], rel=1e-8)
            for name in train.CosmoFlow().scores():
                assert actual[name] == pytest.approx(wanted[name], rel=1e-8)
        for name in ("loss.png", "estimates.png", "log.csv"):
            assert (output / name).stat().st_size > 0


@pytest.mark.parallel(2)
@pytest.mark.usefixtures("drawn")
def test_the_demo_goes_from_nothing_to_estimates_and_on_from_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    universes = {"size": "8", "cell": "8", "grid": "depth=2"}
    samples = {"data": universes | {"samples": "3"}, "validation": universes | {"samples": "2"}}
    monkeypatch.setattr(demo, "SAMPLES", samples)
    small = {"grid": "depth=2", "epochs": "1", "batch-size": "2", "width": "0.1"}
    monkeypatch.setattr(demo, "TRAIN", demo.TRAIN | small)
    demo.run(folder)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["history"]) == 1 and 0 <= metrics["waiting_share"] < 1
    said = WORLD.bcast(capsys.readouterr().out)
    pictures = re.findall(rf"^  ({folder}/\S+\.png): ", said, re.MULTILINE)
    assert {Path(p).name for p in pictures} == {"loss.png", "estimates.png"}
    assert all(Path(p).stat().st_size > 0 for p in pictures)
    (command,) = re.findall(
        r"^    \S*mpiexec -n 2 \S*python -m examples.cosmoflow.train (.*)", said, re.M
    )
    train.main(shlex.split(command))
    assert len(json.loads((folder / "metrics.json").read_text())["history"]) == 2


@pytest.mark.parallel([1, 2])
@pytest.mark.usefixtures("drawn")
def test_the_study_compares_sizes_and_goes_on_where_it_was_stopped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(
        output=folder, size=16, cell=8.0, universes=4, validation=2, epochs=1, batch_size=2,
        learning_rate=1e-3, network="average", width=0.1, seeds=1,
    )  # fmt: skip
    study.run(args)
    found = json.loads((folder / "study.json").read_text())
    assert [(row["side"], row["samples"]) for row in found["rows"]] == [(16, 4), (8, 32)]
    assert found["rows"][0]["loss"] == found["rows"][0]["universe_loss"]
    assert found["rows"][1]["loss"][0] >= found["rows"][1]["universe_loss"][0]
    assert (folder / "study.png").stat().st_size > 0
    first = (folder / "side-16-seed-0" / "metrics.json").read_text()
    on_rank_zero((folder / "side-8-seed-0" / "metrics.json").unlink)
    capsys.readouterr()
    study.run(args)
    assert "16^3 cells, seed" not in capsys.readouterr().out
    assert json.loads((folder / "study.json").read_text()) == found
    assert (folder / "side-16-seed-0" / "metrics.json").read_text() == first
