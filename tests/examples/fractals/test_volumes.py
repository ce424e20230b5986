"""The volumes of examples/fractals: systems, boxes of a volume, and the file of all ranks."""

from __future__ import annotations

import random
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import distconv as dc
from distconv import Box
from examples.fractals.generate import generate
from examples.fractals.systems import (
    FACTORS,
    INSTANCES,
    LEAST_VARIANCE,
    cloud,
    contracts,
    draw_class,
    instance_of,
    middle_and_extent,
    probabilities,
)
from examples.fractals.volumes import COLOUR, Volume, draw_volume, image_of
from tests.support.example_grids import GRIDS

WORLD = MPI.COMM_WORLD
WHOLE = Box((0, 0, 0), (16, 16, 16))


def sierpinski() -> np.ndarray:
    """Four maps to half the size, towards the corners of a tetrahedron with a right angle."""
    maps = np.zeros((4, 3, 4))
    maps[:, :, :3] = 0.5 * np.eye(3)
    maps[1:, :, 3] = 0.5 * np.eye(3)
    return maps


def test_a_cloud_lies_on_the_attractor_of_its_system() -> None:
    points = np.concatenate(list(cloud(sierpinski(), 200, (0,))))
    assert len(points) == 200 * 64
    # The binary digits of the coordinates of the tetrahedron's points have no 1 in common.
    digits = np.floor(points * 2**8).astype(int)
    x, y, z = digits.T
    assert not ((x & y) | (y & z) | (x & z)).any()
    shares = [(points[:, axis] >= 0.5).mean() for axis in range(3)]
    assert shares == pytest.approx([0.25] * 3, abs=0.02)


def test_maps_are_chosen_in_proportion_to_their_determinants() -> None:
    maps = sierpinski()
    maps[0, :, 2] *= -3
    assert probabilities(maps) == pytest.approx([3 / 6, 1 / 6, 1 / 6, 1 / 6])
    halves = np.concatenate(list(cloud(maps * [1, 1, 1, 0] + 0.5 * maps * [0, 0, 0, 1], 300, (1,))))
    assert np.isfinite(halves).all()


def test_systems_that_expand_in_the_mean_square_are_told_from_others() -> None:
    maps = sierpinski()
    assert contracts(maps)
    maps[0, :, :3] *= 3.9  # chosen 59 times of 62, with a norm of 1.95
    assert not contracts(maps)


def test_instances_scale_one_of_the_numbers_of_all_maps() -> None:
    assert INSTANCES == 145 and 1.0 not in FACTORS and (FACTORS[0], FACTORS[-1]) == (0.4, 1.6)
    maps = draw_class(0, 0)
    np.testing.assert_array_equal(instance_of(maps, 0), maps)
    found = set()
    for number in range(1, INSTANCES):
        changed = instance_of(maps, number) / maps
        ((row, column),) = {tuple(place) for place in np.argwhere(changed != 1)[:, 1:]}
        factors = changed[:, row, column]
        assert np.ptp(factors) < 1e-12
        found.add((row, column, round(factors[0], 6)))
    assert len(found) == INSTANCES - 1


def test_classes_contract_with_all_instances_and_are_spread_out() -> None:
    for category in range(3):
        maps = draw_class(5, category)
        assert 2 <= len(maps) <= 8
        assert all(contracts(instance_of(maps, number)) for number in range(INSTANCES))
        middle, extent = middle_and_extent(5, category, 0)
        points = np.concatenate(list(cloud(maps, 500, (1, 2, 3))))
        assert ((points - middle) / extent).var() > 0.8 * LEAST_VARIANCE


def test_boxes_of_a_volume_are_parts_of_it() -> None:
    volume = draw_volume(0, 3, 4, 5)
    labels = volume.labels(WHOLE)
    assert labels.any()
    draw = random.Random(0)
    for _ in range(20):
        start = tuple(draw.randrange(16) for _ in range(3))
        box = Box(start, tuple(draw.randint(a + 1, 16) for a in start))
        np.testing.assert_array_equal(volume.labels(box), labels[box.slices])


def test_later_instances_lie_over_earlier_ones_and_have_one_colour() -> None:
    first, second, both = (
        Volume(4, 0, instances).labels(WHOLE)
        for instances in (((0, 0),), ((1, 0),), ((0, 0), (1, 0)))
    )
    assert set(np.unique(first)) == {0, 1} and set(np.unique(second)) == {0, 2}
    np.testing.assert_array_equal(both, np.where(second, second, first))
    image = image_of(both)
    np.testing.assert_array_equal(image[:, both > 0].T, [COLOUR] * int((both > 0).sum()))
    assert not image[:, both == 0].any()


def test_an_instance_lies_alike_at_all_scales() -> None:
    coarse = Volume(4, 0, ((0, 7),)).labels(WHOLE) > 0
    fine = Volume(5, 0, ((0, 7),)).labels(Box((0, 0, 0), (32, 32, 32))) > 0
    pooled = fine.reshape(16, 2, 16, 2, 16, 2).any((1, 3, 5))
    # Four times as many points find some that the coarse one lacks, and hardly the other way.
    assert (coarse & ~pooled).sum() < 0.05 * coarse.sum() and pooled.sum() < 2 * coarse.sum()


def test_a_volume_depends_on_seed_and_number_alone() -> None:
    first, again, other = (draw_volume(0, index, 4, 5) for index in (1, 1, 2))
    np.testing.assert_array_equal(first.labels(WHOLE), again.labels(WHOLE))
    assert first != other


@pytest.mark.parallel(list(GRIDS))
def test_the_file_is_the_same_on_every_grid(folder: Path) -> None:
    for place, axes in enumerate(GRIDS[WORLD.size]):
        path = folder / f"{place}.h5"
        fractions = generate(path, 3, 4, 5, 7, dc.ProcessGrid(**axes), first=2)
        assert sum(fractions) == pytest.approx(1)
        counts = np.zeros(6)
        with h5py.File(path) as file:
            assert (file["image"].dtype, file["labels"].dtype) == (np.uint8, np.uint8)
            assert (file.attrs["scale"], file.attrs["seed"], file.attrs["first"]) == (4, 7, 2)
            for index in range(3):
                labels = draw_volume(7, 2 + index, 4, 5).labels(WHOLE)
                counts += np.bincount(labels.ravel(), minlength=6)
                np.testing.assert_array_equal(file["labels"][index], labels)
                np.testing.assert_array_equal(file["image"][index], image_of(labels))
        assert fractions == pytest.approx(counts / counts.sum())
