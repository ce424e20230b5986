"""The volumes of examples/unet3d: boxes make one volume, classes, and the file of all ranks."""

from __future__ import annotations

import random
from pathlib import Path

import h5py
import numpy as np
import pytest

import distconv as dc
from distconv import Box
from examples.unet3d.generate import generate
from examples.unet3d.tomography import BLUR, CLASSES, MARGIN, NOISE, Scene, Solid, draw_scene
from tests.support.everywhere import fails_everywhere

SHAPE = (17, 21, 19)
WHOLE = Box((0, 0, 0), SHAPE)


def ball(radius: float, centre: float, intensity: float) -> Solid:
    return Solid(
        label=1,
        intensity=intensity,
        centre=np.full(3, centre),
        radii=np.full(3, radius),
        turn=np.eye(3),
        waves=np.zeros((3, 3)),
        amplitudes=np.zeros(3),
        phases=np.zeros(3),
    )


def test_boxes_of_a_volume_are_parts_of_it() -> None:
    scene = draw_scene(0, 3, SHAPE)
    image, labels = scene.image(WHOLE), scene.labels(WHOLE)
    draw = random.Random(0)
    for _ in range(20):
        start = tuple(draw.randrange(n) for n in SHAPE)
        stop = tuple(draw.randint(a + 1, n) for a, n in zip(start, SHAPE, strict=True))
        box = Box(start, stop)
        np.testing.assert_allclose(scene.image(box), image[box.slices], atol=1e-12)
        np.testing.assert_array_equal(scene.labels(box), labels[box.slices])


def test_a_ball_has_the_voxels_within_its_radius() -> None:
    scene = Scene((21, 21, 21), ((ball(6.3, 10.0, 1.0), None),), (0, 0))
    distance = np.sqrt(sum(x.astype(float) ** 2 for x in np.ogrid[-10:11, -10:11, -10:11]))
    np.testing.assert_array_equal(scene.labels(Box((0, 0, 0), (21, 21, 21))), distance < 6.3)


def test_the_image_is_blurred_and_noisy_by_what_is_stated() -> None:
    shape = (33, 33, 33)
    scene = Scene(shape, ((ball(9.0, 16.0, 1.0), None),), (4, 2))
    whole = Box((0, 0, 0), shape)
    image, labels = scene.image(whole), scene.labels(whole).astype(float)
    axis = np.exp(-0.5 * (np.arange(-MARGIN, MARGIN + 1) / BLUR) ** 2)
    axis /= axis.sum()
    for dimension in range(3):
        labels = np.apply_along_axis(lambda row: np.convolve(row, axis, "same"), dimension, labels)
    noise = image - labels
    assert noise.std() == pytest.approx(NOISE, rel=0.02)
    assert abs(noise.mean()) < 4 * NOISE / noise.size**0.5
    planes = noise.reshape(len(noise), -1)
    between = np.corrcoef(planes) - np.eye(len(noise))
    assert np.abs(between).max() < 0.2


def test_classes_are_imbalanced_and_larger_volumes_show_more_of_the_same() -> None:
    shares = np.zeros((2, len(CLASSES)))
    for row, side in enumerate((33, 48)):
        for index in range(6):
            labels = draw_scene(1, index, 3 * (side,)).labels(Box((0, 0, 0), 3 * (side,)))
            shares[row] += np.bincount(labels.ravel(), minlength=len(CLASSES)) / labels.size / 6
    assert (shares[:, 3] > 0.002).all() and (shares[:, 3] < 0.03).all()
    assert (shares[:, 2] < 0.2).all() and (shares[:, :2] > 0.3).all()
    np.testing.assert_allclose(shares[0, 2], shares[1, 2], rtol=0.5)


def test_a_scene_depends_on_seed_and_index_alone() -> None:
    first, again, other = (draw_scene(0, index, SHAPE).image(WHOLE) for index in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parallel([1, 2, 3])
def test_the_file_is_the_same_on_any_number_of_ranks(folder: Path) -> None:
    path = folder / "new" / "train.h5"
    grid = dc.ProcessGrid(sample=-1)
    fractions = generate(path, 4, SHAPE, 7, grid)
    assert sum(fractions) == pytest.approx(1)
    with h5py.File(path) as file:
        assert (file["image"].dtype, file["labels"].dtype) == (np.float32, np.uint8)
        assert file["image"].shape == (4, 1, *SHAPE) and file["labels"].shape == (4, *SHAPE)
        assert list(file.attrs["size"]) == list(SHAPE) and file.attrs["seed"] == 7
        for index in range(4):
            scene = draw_scene(7, index, SHAPE)
            expected = scene.image(WHOLE).astype(np.float32)
            np.testing.assert_array_equal(file["image"][index, 0], expected)
            np.testing.assert_array_equal(file["labels"][index], scene.labels(WHOLE))
    assert [found.name for found in path.parent.iterdir()] == ["train.h5"]
    fails_everywhere(lambda: generate(path, 1, SHAPE, 0, grid), "train.h5 exists; remove it")
