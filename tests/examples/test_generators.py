"""Generators of examples: a rank that fails leaves no file, a wrong argument is reported once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distconv as dc
from examples.cosmoflow import generate as cosmoflow
from examples.fractals import generate as fractals
from examples.mesh_tangling import generate as mesh_tangling
from examples.unet3d import generate as unet3d
from tests.support.everywhere import ended_with_one_line, fails_everywhere

DRAWN: dict[str, tuple[ModuleType, str, Callable[[Path, dc.ProcessGrid], Any]]] = {
    "fractals": (fractals, "draw_volume", lambda p, grid: fractals.generate(p, 2, 3, 2, 0, grid)),
    "mesh_tangling": (
        mesh_tangling,
        "draw_flow",
        lambda p, grid: mesh_tangling.generate(p, 2, 16, 0, grid),
    ),
    "unet3d": (unet3d, "draw_scene", lambda p, grid: unet3d.generate(p, 2, (9, 9, 9), 0, grid)),
}
"""Each generator, with its function that draws a sample by seed and number."""


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("example", DRAWN)
def test_a_rank_that_fails_leaves_no_file(
    folder: Path, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, name, generate = DRAWN[example]
    draw = getattr(generator, name)

    def failing(seed: int, index: int, *rest: Any) -> Any:
        if index == 1:
            raise ValueError("no sample")
        return draw(seed, index, *rest)

    monkeypatch.setattr(generator, name, failing)
    grid = dc.ProcessGrid(sample=-1)
    fails_everywhere(lambda: generate(folder / "train.h5", grid), "no sample")
    assert not list(folder.iterdir())


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("generator", "words", "message"),
    [
        (cosmoflow, ["--size", "48"], "invalid choice: 48"),
        (fractals, ["--grid", "channel=2"], "is not an axis"),
        (fractals, ["--output", "train.npz"], "give it a name that ends with .h5"),
        (mesh_tangling, ["--samples", "0"], "'0' is not a positive int"),
        (mesh_tangling, ["--size", "7"], "size=7 zones a side cannot resolve the bubble; choose 8"),
        (unet3d, ["--size", "7"], "is too small for the levels"),
        (unet3d, ["--size", "8,9"], "is no size; write D,H,W"),
    ],
)
def test_a_wrong_argument_is_reported_once(
    folder: Path,
    generator: ModuleType,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--output", str(folder / "a.h5"), *words]
    ended_with_one_line(lambda: generator.main(arguments), message, capsys)
