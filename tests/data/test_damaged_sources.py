"""What is missing, truncated or changed in a source is one error on all ranks, which then go on."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

import distconv as dc
from distconv.data import Dataset, Loader
from tests.support.everywhere import WORLD, fails_everywhere, on_rank_zero
from tests.support.sample_files import SOURCES, X

both = pytest.mark.parallel([1, 2])

pytestmark = pytest.mark.filterwarnings("ignore:.*is stored in chunks")


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@both
@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("hdf5", "all.h5", "all.h5: not a whole HDF5 file; create or copy it again"),
        ("npy", "x.npy", "x.npy: not a whole .npy file of numbers"),
        ("zarr 3", "all.zarr/x/zarr.json", "all.zarr: not a whole zarr folder|no dataset 'x'"),
    ],
)
def test_a_truncated_file_is_told_when_it_is_opened(
    folder: Path, kind: str, name: str, message: str
) -> None:
    source = SOURCES[kind](folder)
    on_rank_zero(lambda: halve(folder / name))
    grid = dc.ProcessGrid(width=-1)
    fails_everywhere(lambda: Dataset(source, grid, inputs="x"), message)


@both
@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("hdf5", "all.h5", "all.h5: "),
        ("npy", "x.npy", "x.npy: changed while it was read, from .* bytes"),
        ("npy files", "x/3.npy", "3.npy: not a whole .npy file"),
        ("hdf5 files", "sample-3.h5", "sample-3.h5: not a whole HDF5 file"),
        ("zarr 2", "all.zarr/x/3.0.0.0", "'x' of all.zarr: cannot read sample 3"),
        ("zarr 3", "all.zarr/x/c/3/0/0/0", "'x' of all.zarr: cannot read sample 3"),
    ],
)
@pytest.mark.parametrize("cache", [None, "memory"])
def test_what_is_truncated_later_is_told_when_it_is_read(
    folder: Path, kind: str, name: str, message: str, cache: str | None
) -> None:
    data = Dataset(SOURCES[kind](folder), dc.ProcessGrid(width=-1), inputs="x", cache=cache)
    WORLD.barrier()
    on_rank_zero(lambda: halve(folder / name))
    fails_everywhere(lambda: list(Loader(data, batch_sampler=[[0], [3]])), message)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("hdf5", "all.h5"), ("npy", "x.npy"), ("npy files", "x/3.npy"), ("hdf5 files", "sample-3.h5")],
)
@pytest.mark.parametrize("cut", ["sample", "width"])
def test_a_file_that_is_overwritten_in_place_within_an_epoch_is_told(
    folder: Path, kind: str, name: str, cut: str
) -> None:
    data = Dataset(SOURCES[kind](folder), dc.ProcessGrid(**{cut: -1}), inputs="x")
    path = folder / name
    later = path.stat().st_mtime_ns + 10**9

    def overwrite() -> None:
        with open(path, "r+b") as file:
            content = file.read()
            file.seek(len(content) - 4)
            file.write(bytes(4))
        # The clocks of file systems may be too coarse for a test.
        os.utime(path, ns=(later, later))

    assert np.array_equal(data.batch([3, 0]).full_tensor(), X[[3, 0]])
    on_rank_zero(overwrite)
    message = f"{path.name}: changed while it was read, from (.*) to \\1 bytes, .* s later"
    fails_everywhere(lambda: list(Loader(data, batch_sampler=[[3], [3, 3]])), message)


@both
def test_files_that_are_opened_again_are_still_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distconv.data.sources.files._OPEN", 1)
    data = Dataset(SOURCES["npy files"](folder), dc.ProcessGrid(width=-1), inputs="x")
    data.batch([3, 1])
    on_rank_zero(lambda: os.utime(folder / "x" / "3.npy", ns=(0, 10**9)))
    fails_everywhere(lambda: data.batch([3]), "3.npy: changed while it was read")
    assert np.array_equal(data.batch([1, 2]).full_tensor(), X[[1, 2]])


@both
def test_a_locked_hdf5_file_is_not_called_damaged(folder: Path) -> None:
    SOURCES["hdf5"](folder)
    with open(folder / "all.h5", "rb") as file:
        on_rank_zero(lambda: fcntl.flock(file, fcntl.LOCK_EX))
        grid = dc.ProcessGrid(height=-1)
        fails_everywhere(
            lambda: Dataset(folder / "all.h5", grid, inputs="x"),
            "all.h5: another program has the file open for writing",
        )
        WORLD.barrier()


@both
def test_a_file_that_has_gone_is_named_and_others_are_still_read(folder: Path) -> None:
    data = Dataset(SOURCES["npy files"](folder), dc.ProcessGrid(width=-1), inputs="x")
    on_rank_zero((folder / "x" / "3.npy").unlink)
    fails_everywhere(lambda: data.batch([1, 3]), "3.npy: no such file")
    assert np.array_equal(data.batch([1, 2]).full_tensor(), X[[1, 2]])


@both
def test_samples_of_another_shape_on_one_rank_are_an_error_on_all(folder: Path) -> None:
    data = Dataset(SOURCES["npy files"](folder), dc.ProcessGrid(width=-1), inputs="x")
    on_rank_zero(lambda: np.save(folder / "x" / "2.npy", X[2, :, :4]))
    fails_everywhere(lambda: data.batch([0, 2]), r"2.npy: its samples are \(3, 4, 7\)")
