"""Values come as they are meant, in the type and shape of what is read, or as an error on all."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

import distconv as dc
from distconv.data import Dataset, Function
from tests.data.test_dataset import GRIDS
from tests.support.everywhere import WORLD, fails_everywhere, on_rank_zero
from tests.support.sample_files import X

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])
STORED = X.astype(np.int16)
NAN = base64.b64encode(struct.pack("<d", np.nan)).decode()

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is stored in chunks"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
]


class Proxy:
    """An array that makes others of what is on the disk, as nibabel and netCDF4 do."""

    def __init__(self, stored: Any, make: Callable[[Any], Any]) -> None:
        self.stored, self.make = stored, make
        self.shape, self.dtype = stored.shape, stored.dtype

    def __getitem__(self, index: Any) -> Any:
        return self.make(self.stored[index])


MADE: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda stored: stored * 0.5 + 0.25,
    "complex": lambda stored: stored * (0.5 + 1j),
    "masked": lambda stored: np.ma.masked_equal(stored * 0.5, 2.0),
    "tensors": lambda stored: torch.as_tensor(stored).double(),
}


@every_size
@pytest.mark.parametrize("kind", MADE)
def test_arrays_have_the_type_of_what_is_read(kind: str) -> None:
    serial = np.ma.filled(MADE[kind](STORED), np.nan)
    for extents in GRIDS[WORLD.size]:
        data = Dataset(Proxy(STORED, MADE[kind]), dc.ProcessGrid(**extents))
        made = data.batch([3, 0, 4]).full_tensor()
        expected = torch.as_tensor(serial)[[3, 0, 4]]
        wanted = expected if expected.is_complex() else expected.float()
        torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)


@every_size
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda stored: stored[..., :1], r"returned int16 of shape .*; expected int16 of shape"),
        (lambda stored: stored * (0.5 if stored.max() > 500 else 1), "float64 .* expected int16"),
        (lambda stored: stored + 1j * (stored.max() > 500), None),
        (lambda stored: np.ma.masked_greater(stored, 500), "missing values, which int"),
    ],
)
def test_arrays_that_change_shape_or_type_are_an_error_on_all_ranks(
    make: Any, message: str | None
) -> None:
    data = Dataset(Proxy(STORED, make), dc.ProcessGrid(width=-1))
    if message is None:
        assert data.batch([0]).is_complex()
    else:
        fails_everywhere(lambda: data.batch([0, 4]), message)


@every_size
def test_functions_return_what_their_type_can_hold() -> None:
    grid = dc.ProcessGrid(width=-1)

    def of(values: Any, dtype: Any = "float32") -> Any:
        return Dataset(Function(lambda i, box: values[i][box.slices], 5, (3, 6, 7), dtype), grid)

    assert np.array_equal(of(X.astype(np.float64)).batch([1]).full_tensor(), X[[1]])
    assert np.array_equal(of(X.astype(np.int64), "int16").batch([1]).full_tensor(), X[[1]])
    fails_everywhere(lambda: of(X * 1j).batch([1]), "complex64 .* expected float32")
    fails_everywhere(lambda: of(X, "int32").batch([1]), "float32 .* expected int32")
    large = X.astype(np.int64) + 2**40
    fails_everywhere(lambda: of(large, "int32").batch([1]), "int32 holds those from .* wider type")


def hdf5(folder: Path, stored: Any, attributes: dict[str, Any]) -> Any:
    def write() -> None:
        with h5py.File(folder / "x.nc.h5", "w") as file:
            file["x"] = stored
            file["x"].attrs.update(attributes)

    on_rank_zero(write)
    return folder / "x.nc.h5"


def zarr_array(
    folder: Path, stored: Any, attributes: dict[str, Any], version: int = 3, **options: Any
) -> Any:
    def plain(value: Any) -> Any:
        value = np.asarray(value)
        return NAN if value.dtype.kind == "f" and np.isnan(value).any() else value.tolist()

    def write() -> None:
        made = zarr.create_array(
            str(folder / "x.zarr"), data=stored, zarr_format=version, **options
        )
        made.attrs.update({name: plain(value) for name, value in attributes.items()})

    on_rank_zero(write)
    return folder / "x.zarr"


PACKED: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "scale": (STORED, {"scale_factor": 0.5, "add_offset": [-3.0]}, X * 0.5 - 3),
    "whole numbers": (STORED, {"scale_factor": 1000}, X * 1000),
    "fill": (
        STORED,
        {"_FillValue": np.int16(4), "missing_value": np.int16([5, 9]), "scale_factor": 2.0},
        np.where(np.isin(X, [4, 5, 9]), np.nan, X * 2),
    ),
    "no number": (X, {"_FillValue": np.float32(np.nan)}, X),
    "floats": (X, {"_FillValue": np.float32(7)}, np.where(X == 7, np.nan, X)),
    "integers": (STORED, {"_FillValue": np.int16(-1)}, STORED),
    "zero": (STORED + 1, {"_FillValue": np.int16(0)}, STORED + 1),
    "range": (
        STORED,
        {"valid_range": np.int16([5, 500]), "_FillValue": np.int16(7), "scale_factor": 0.5},
        np.where((X < 5) | (X > 500) | (X == 7), np.nan, X * 0.5),
    ),
    "limits": (
        X * np.float32(0.1),
        {"valid_min": np.float32(0.7), "valid_max": np.float64(50)},
        np.where((X < 7) | (X > 500), np.nan, X * np.float32(0.1)),
    ),
    "one limit": (X, {"valid_max": np.float32(9)}, np.where(X > 9, np.nan, X)),
    "all valid": (STORED, {"valid_range": np.int16([0, 1000])}, STORED),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("write", [hdf5, zarr_array])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_values_are_unpacked_as_their_attributes_say(
    folder: Path, kind: str, write: Any
) -> None:
    stored, attributes, expected = PACKED[kind]
    source = write(folder, stored, attributes)
    for extents in GRIDS[WORLD.size]:
        made = Dataset(source, dc.ProcessGrid(**extents)).batch([0, 4, 2]).full_tensor().numpy()
        assert np.array_equal(made, expected[[0, 4, 2]].astype(made.dtype), equal_nan=True)
        assert made.dtype == (np.int16 if expected.dtype == np.int16 else np.float32)


@every_size
def test_fill_values_of_zarr_are_missing_only_where_netcdf_has_them_so(folder: Path) -> None:
    grid = dc.ProcessGrid(width=-1)
    for marks, expected in (
        ({}, X * 2),
        ({"_ARRAY_DIMENSIONS": ["t"]}, np.where(X == 4, np.nan, X * 2)),
    ):
        own = folder / str(len(marks))
        on_rank_zero(own.mkdir)
        source = zarr_array(own, STORED, {"scale_factor": 2.0} | marks, 2, fill_value=4)
        made = Dataset(source, grid).batch([0]).full_tensor().numpy()
        assert np.array_equal(made, expected[[0]], equal_nan=True)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"_FillValue": np.int16(4)}, "missing values, which int16 cannot represent"),
        ({"valid_max": np.int16(400)}, "missing values, which int16 cannot represent"),
        ({"valid_range": np.int16([1, 2, 3])}, "a valid_range that is not two numbers"),
        ({"valid_min": 0.5, "scale_factor": 0.5}, "the floating-point limit 0.5 for stored"),
        ({"valid_min": "none"}, "the attribute valid_min='none'; expected a number"),
        ({"scale_factor": "twice"}, "'x' of x.nc.h5 has the attribute scale_factor='twice'"),
        ({"_Unsigned": "true"}, "'x' of x.nc.h5 has the attribute _Unsigned, which is not"),
    ],
)
def test_what_cannot_be_unpacked_is_an_error_by_name(
    folder: Path, attributes: Any, message: str
) -> None:
    source, grid = hdf5(folder, STORED, attributes), dc.ProcessGrid(width=-1)
    fails_everywhere(lambda: Dataset(source, grid).batch([0]), message)


@every_size
@pytest.mark.parametrize(
    ("values", "dtype", "options", "message"),
    [
        (X.astype(np.float64) * 6.76e35, None, {}, r"in samples \[4\], as torch.float32"),
        (X * np.float32(130.1), torch.float16, {}, r"in samples \[4\], as torch.float16"),
        (X, None, {"transform": lambda block, box: 1 / (block - 600)}, r"samples \[4\], as torch"),
    ],
)
def test_values_that_are_not_finite_once_converted_are_an_error(
    values: Any, dtype: Any, options: Any, message: str
) -> None:
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        data = Dataset(values, grid, dtype=dtype, check_finite=True, **options)
        data.batch([0, 3])
        fails_everywhere(lambda data=data: data.batch([3, 4]), message)


@every_size
def test_integers_that_a_type_cannot_hold_are_an_error() -> None:
    grid = dc.ProcessGrid(width=-1)
    large = X.astype(np.uint64)
    large[4, 2, 5, 6] = 2**63
    data = Dataset({"x": large}, grid)
    assert data.batch([3]).dtype == torch.int64
    fails_everywhere(lambda: data.batch([4]), "x has values from .*9223372036854775808, and int64")
    narrow = Dataset({"x": STORED}, grid, dtype={"x": torch.int8})
    assert np.array_equal(narrow.batch([0]).full_tensor(), STORED[[0]])
    fails_everywhere(lambda: narrow.batch([0, 1]), "int8 holds those from -128 to 127")


@several
def test_an_imaginary_part_is_not_dropped() -> None:
    grid = dc.ProcessGrid(width=-1)
    waves = {"x": X * (1 + 2j)}
    assert np.array_equal(Dataset(waves, grid).batch([1]).full_tensor(), X[[1]] * (1 + 2j))
    fails_everywhere(
        lambda: Dataset(waves, grid, dtype={"x": torch.float32}), "would discard the imaginary part"
    )


@every_size
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_numbers_become_integers_where_nothing_is_lost(dtype: torch.dtype) -> None:
    whole = np.minimum(X, 1).astype(np.float32)
    grids = [dc.ProcessGrid(**extents) for extents in GRIDS[WORLD.size]]
    for grid in grids:
        made = Dataset({"x": whole}, grid, dtype={"x": dtype}).batch([4, 1])
        assert made.dtype == dtype
        assert np.array_equal(made.full_tensor(), whole[[4, 1]])
    for wrong in (0.5, -3.0 if dtype != torch.int64 else 1e30, np.nan):
        lossy = whole.copy()
        lossy[4, 2, 5, 6] = wrong
        for grid in grids:
            data = Dataset({"x": lossy}, grid, dtype={"x": dtype})
            data.batch([1])
            fails_everywhere(
                lambda data=data: data.batch([4, 1]), "values of float32 that .* cannot"
            )
