"""Each rank reads its own box of every field, from any source, and nothing else."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

import distconv as dc
from distconv.data import DataError, Dataset, Loader
from tests.support.everywhere import WORLD, fails_everywhere, on_rank_zero
from tests.support.sample_files import FIELDS, SAMPLES, SOURCES, X, Y, Z, write_hdf5

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])

GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"sample": 2}, {"width": 2}],
    4: [{"sample": 2, "height": 2}, {"channel": 2, "width": 2}],
}

pytestmark = pytest.mark.filterwarnings("ignore:.*is stored in chunks")


@every_size
@pytest.mark.parametrize("kind", SOURCES)
def test_every_rank_reads_its_own_box_of_every_field(folder: Path, kind: str) -> None:
    source = SOURCES[kind](folder)
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        data = Dataset(source, grid, inputs=["x"], targets=["y", "z"], dtype=torch.float64)
        assert len(data) == SAMPLES
        needed = 0
        for samples in ([3, 0], [4, 1, 2], [2]):  # even, uneven, and too few for sample=2
            x, y, z = data.batch(samples)
            assert y.grid_layout == dc.Layout.like(x, without="channel")
            for made, values in ((x, X), (y, Y), (z, Z)):
                mine = dc.local_box(made.shape, grid, made.grid_layout).slices
                expected = torch.from_numpy(values[samples][mine])
                torch.testing.assert_close(made.to_local().double(), expected.double())
                own = next(f for f in data.fields.values() if f.shape == values.shape[1:])
                needed += expected.numel() * own.dtype.itemsize
                assert (
                    made.dtype == (torch.float64 if values is not Y else torch.int64)
                    or "big" in kind
                )
        assert data.bytes_read == needed <= data.bytes_fetched


@pytest.mark.parallel([2])
def test_chunks_that_defeat_the_cut_are_told_with_the_numbers(folder: Path) -> None:
    paths = folder / "rows.h5", folder / "samples.h5"
    on_rank_zero(lambda: write_hdf5(paths[0], chunks=(1, 3, 3, 7)))
    on_rank_zero(lambda: write_hdf5(paths[1], chunks=(2, 3, 6, 7)))
    grid = dc.ProcessGrid(height=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitting, crossing = (Dataset(path, grid, inputs="x") for path in paths)
    # Both ranks fetch the whole chunk of two samples for their halves of one.
    assert (fitting.amplification["x"], crossing.amplification["x"]) == (1, 4)
    words = [str(one.message) for one in told]
    assert len(words) == (WORLD.rank == 0)
    if words:
        assert "'x' of samples.h5 is stored in chunks of (2, 3, 6, 7)" in words[0]
        assert (
            "4 times as much. Chunks of (1, 3, 3, 7) would each lie within the block of one rank"
            in words[0]
        )
    crossing.batch([0, 1])
    assert WORLD.allreduce(crossing.bytes_fetched) == 4 * WORLD.allreduce(crossing.bytes_read)


@several
def test_layouts_and_types_are_chosen_by_name() -> None:
    grid = dc.ProcessGrid(height=-1)
    layouts = {"x": dc.Layout(width="height"), "y": dc.Layout()}
    data = Dataset(FIELDS, grid, "x", "y", layout=layouts, dtype={"y": torch.float64})
    x, y = data.batch([0, 2])
    assert x.grid_layout == layouts["x"] and x.dtype == torch.float32
    assert y.grid_layout == layouts["y"] and y.dtype == torch.float64
    assert np.array_equal(x.full_tensor(), X[[0, 2]]) and np.array_equal(y.full_tensor(), Y[[0, 2]])


@several
def test_fields_of_which_nothing_is_said_are_cut_like_the_first() -> None:
    grid = dc.ProcessGrid(sample=WORLD.size // 2, height=2)
    fields = {"x": X, "mask": X[:, :1], "y": Y, "vector": X[:, 0, 0], "z": Z}
    cut = dc.Layout(sample="sample", width="height")
    x, mask, y, vector, z = Dataset(fields, grid, layout=cut).batch([0, 3])
    assert x.grid_layout == mask.grid_layout == dc.Layout.of(x.cuts) and x.cuts[3] == ("height",)
    assert y.grid_layout == dc.Layout.like(x, without="channel")
    assert vector.cuts == (x.cuts[0], ()) and z.cuts == (x.cuts[0],)


@every_size
def test_one_field_is_a_bare_tensor_and_all_are_read_when_none_is_named() -> None:
    grid = dc.ProcessGrid(width=-1)
    assert Dataset(X, grid).batch([1]).shape == (1, 3, 6, 7)
    assert [t.dim() for t in Dataset(FIELDS, grid).batch([1])] == [4, 3, 1]


@every_size
def test_channels_are_scaled_as_in_the_serial_program() -> None:
    mean, deviation = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
    scale = dc.data.Normalize(mean, deviation, limit=20.0)
    extents = {"channel": WORLD.size} if WORLD.size < 4 else {"channel": 2, "width": 2}
    data = Dataset({"x": X}, dc.ProcessGrid(**extents), dtype=torch.float64, transform={"x": scale})
    serial = (X[[4, 1]] - np.reshape(mean, (3, 1, 1))) / np.reshape(deviation, (3, 1, 1))
    assert np.abs(serial).max() > 20
    np.testing.assert_allclose(data.batch([4, 1]).full_tensor(), serial.clip(-20, 20), rtol=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0, 2.0]), "1 means and 2 deviations"),
        (([float("nan")], [1.0]), "mean nan of a channel; expected a finite"),
        (([0.0], [0.0]), "deviation 0.0 of a channel; expected .* above 0"),
    ],
)
def test_what_cannot_scale_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dc.data.Normalize(*arguments)


@every_size
def test_values_that_are_not_finite_are_an_error_on_request() -> None:
    spoiled = X.copy()
    spoiled[3, 2, 5, 6] = np.nan
    grid = dc.ProcessGrid(width=-1)
    assert Dataset(spoiled, grid).batch([3]).isnan().any().item()
    data = Dataset(spoiled, grid, check_finite=True)
    data.batch([0, 4])
    fails_everywhere(lambda: data.batch([0, 3]), r"not finite in samples \[3\]")


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a number": (3, {}, "a source of samples cannot be 3"),
    "no file": ("absent.h5", {}, "absent.h5: no such file"),
    "no match": ("absent/*.h5", {}, "no file matches"),
    "suffix": ("samples.txt", {}, "is not supported"),
    "no field": (FIELDS, {"inputs": "w"}, r"no source for \['w'\]; choose from \['x', 'y', 'z'\]"),
    "twice": (FIELDS, {"inputs": "x", "targets": "x"}, "name a field twice"),
    "named array": (X, {"inputs": "x"}, "ndarray has no fields"),
    "counts": ({"x": X, "z": Z[:3]}, {}, "different numbers of samples: 5 in x, 3 in z"),
    "nothing": (X[:0], {}, "holds no samples"),
    "texts": (np.array(["a", "b"]), {}, "has values of type <U1; expected numbers"),
    "layout": (FIELDS, {"layout": {"w": dc.Layout()}}, r"layout= names \['w'\]"),
    "dimension": (FIELDS, {"layout": dc.Layout(depth="height")}, "partitions 'depth'"),
    "dtype": (X, {"dtype": "float32"}, "is not a torch.dtype"),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_opened_is_one_error_on_all_ranks(kind: str) -> None:
    source, options, message = WRONG[kind]
    grid = dc.ProcessGrid(height=-1)
    fails_everywhere(lambda: Dataset(source, grid, **options), message)


@several
def test_other_data_on_one_rank_are_an_error_on_all() -> None:
    last = WORLD.rank == WORLD.size - 1
    grid = dc.ProcessGrid(width=-1)
    others = "rank 0" if WORLD.size == 2 else "ranks 0-2"
    message = f"shape of the array is .5, 3, 6, 7. on {others} and .4, 3, 6, 7. on rank"
    fails_everywhere(lambda: Dataset(X[:4] if last else X, grid), message)
    fails_everywhere(
        lambda: Dataset(X, grid, dtype=torch.float64 if last else None), "as torch.float64"
    )
    data = Dataset(X, grid)
    fails_everywhere(
        lambda: data.batch([1 if last else 0]), re.escape(f"samples is [0] on {others} and [1] on")
    )


@every_size
def test_a_function_for_the_only_field_needs_no_name() -> None:
    grid = dc.ProcessGrid(width=-1)
    made: Any = Dataset(X, grid, transform=lambda block, _: 2 * block).batch([1])
    assert np.array_equal(made.full_tensor(), 2 * X[[1]])
    fails_everywhere(
        lambda: Dataset(FIELDS, grid, transform=lambda block, _: 2 * block),
        r"is a single function, but there are the fields \['x', 'y', 'z'\]; pass a dictionary",
    )


def test_a_function_that_returns_another_shape_is_an_error() -> None:
    data = Dataset(dc.data.Function(lambda i, box: X[i], 5, (3, 6)), dc.ProcessGrid())
    fails_everywhere(lambda: data.batch([1]), r"returned shape \(3, 6, 7\) .* expected \(3, 6\)")


def test_samples_that_are_not_there_are_an_error() -> None:
    data = Dataset(X, dc.ProcessGrid())
    fails_everywhere(lambda: data.batch([1, 5, -1]), r"no samples \[5, -1\]; choose from 0 to 4")


def test_files_that_hold_several_samples_are_read_one_after_the_other(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", X[:2])
    np.save(tmp_path / "1.npy", X[2:])
    source = dc.data.open_files(tmp_path / "*.npy", None, stacked=True)
    data = Dataset(source, dc.ProcessGrid())
    assert np.array_equal(data.batch([3, 1, 4, 0, 2]), X[[3, 1, 4, 0, 2]])


@pytest.mark.parallel([1, 2])
def test_a_sample_number_that_is_not_whole_is_refused_on_every_rank() -> None:
    data = Dataset(X, dc.ProcessGrid(sample=-1))
    with pytest.raises(DataError, match=r"samples=1\.5 is not a whole number"):
        data.batch([1.5])


@pytest.mark.parallel([2])
@pytest.mark.parametrize("loads", ["loop", "batch"])
def test_labels_that_differ_in_a_middle_sample_are_found_when_they_are_read(loads: str) -> None:
    labels = np.arange(60)
    labels[31] += WORLD.rank
    volumes = np.zeros((60, 1, 4, 4), dtype=np.float32)
    numbers = dc.data.Function(lambda i, box: labels[i], 60, ())
    data = Dataset({"x": volumes, "y": numbers}, dc.ProcessGrid(height=2))
    seen: list[Any] = []

    def read() -> None:
        if loads == "loop":
            seen.extend(Loader(data, batch_size=2))
        else:
            seen.extend(data.batch([i, i + 1]) for i in range(0, 60, 2))

    fails_everywhere(read, "field 'y' is not the same on all ranks: rank 1 differs from rank 0")
    assert len(seen) == 15


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axis", ["sample", "height"])
def test_arrays_of_labels_that_differ_in_a_middle_sample_are_found(axis: str) -> None:
    labels = np.arange(6000)
    labels[3100] += WORLD.rank == WORLD.size - 1
    volumes = np.zeros((6000, 1, 4, 4), dtype=np.float32)
    grid = dc.ProcessGrid(**{axis: -1})
    fails_everywhere(
        lambda: Dataset({"x": volumes, "y": labels[::-1]}, grid), "checksum of y, field 'y' is"
    )


@pytest.mark.parallel([2])
@pytest.mark.parametrize("suffix", [".npy", ".h5", ".zarr", "many"])
def test_other_files_under_one_path_are_found_when_they_are_opened(
    folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = folder / f"node-{WORLD.rank}"
    node.mkdir()
    monkeypatch.chdir(node)
    values = np.random.default_rng(0).random((60, 4, 4))
    values[len(values) // 2 :] += WORLD.rank
    name = f"x{suffix}"
    if suffix == ".npy":
        np.save(name, values)
    elif suffix == ".h5":
        with h5py.File(name, "w") as file:
            file["x"] = values
    elif suffix == ".zarr":
        zarr.save_array(name, values)
    else:
        name = "*.npy"
        for i, sample in enumerate(values):
            np.save(f"x-{i:02d}.npy", sample)
    WORLD.barrier()
    grid = dc.ProcessGrid(height=2)
    fails_everywhere(lambda: Dataset(f"/proc/self/cwd/{name}", grid), "the ranks differ: checksum")


@pytest.mark.parallel([2])
@pytest.mark.parametrize("fields", [True, False])
def test_files_of_one_name_in_several_folders_are_compared_one_by_one(
    folder: Path, fields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = folder / f"node-{WORLD.rank}"
    for i in range(3):
        (node / str(i)).mkdir(parents=True)
        np.save(node / str(i) / "x.npy", np.full((4, 4), float(WORLD.rank if i == 1 else 0)))
    monkeypatch.chdir(node)
    WORLD.barrier()
    here, grid = "/proc/self/cwd", dc.ProcessGrid(height=2)
    named = {str(i): f"{here}/{i}/x.npy" for i in range(3)}
    source, expected = (
        (named, "checksum of x.npy, field '1' is")
        if fields
        else (f"{here}/*/x.npy", "checksum of x.npy, file 2 is")
    )
    fails_everywhere(lambda: Dataset(source, grid), f"the ranks differ: {expected}")


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", ["x.nc", "x.anything", "folder", "*.nc"])
def test_an_hdf5_file_is_known_by_its_first_bytes(folder: Path, name: str) -> None:
    inner = folder / "folder"

    def write() -> None:
        inner.mkdir()
        for path in (folder / "x.nc", folder / "x.anything"):
            with h5py.File(path, "w") as file:
                file["x"] = X
        with h5py.File(inner / "a.nc", "w") as file:
            file["x"] = X[0]
        (folder / "old.cdf").write_bytes(b"CDF\x01" + bytes(100))
        (folder / "x.txt").write_bytes(b"text")

    on_rank_zero(write)
    grid = dc.ProcessGrid(height=-1)
    place = str(folder / name) if "*" not in name else str(inner / name)
    found = Dataset(place, grid, inputs="x").batch([0]).full_tensor()
    assert np.array_equal(found, X[:1])
    for wrong, message in (("old.cdf", "NetCDF file of version 3.*nccopy"), ("x.txt", "'.txt'")):
        fails_everywhere(lambda wrong=wrong: Dataset(folder / wrong, grid), message)
