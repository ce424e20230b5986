"""Scaled and missing values in files, by the CF conventions of NetCDF."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distconv.data.sources.interface import Array


class ScaleAndOffset:
    """The conversion of stored values: value = stored * scale_factor + add_offset.

    A stored value is missing if it is equal to `_FillValue` or `missing_value`, outside
    `valid_range`, below `valid_min` or above `valid_max`. Missing values become NaN in a
    floating-point result, and are an error in integers. Without any of these attributes, values
    are unchanged.

    Parameters
    ----------
    attributes: the attributes of the array in the file.
    name: the name of the array for error messages.

    Raises ValueError for attributes that are not numbers, and for `_Unsigned`, which is not
    supported.
    """

    def __init__(self, attributes: Mapping[str, Any], name: str) -> None:
        self.name = name
        found = {
            key: _numeric_attribute(attributes, key, name) for key in _KEYS if key in attributes
        }
        if str(attributes.get("_Unsigned", "false")).strip("b'\"").lower() != "false":
            raise ValueError(
                f"{name} has the attribute _Unsigned, which is not supported; store it in an "
                "unsigned type"
            )
        self._scale, self._offset = (found[key][0] if key in found else None for key in _KEYS[:2])
        self._missing = [value for key in _KEYS[2:4] for value in found.get(key, ())]
        if len(found.get("valid_range", (0, 0))) != 2:
            raise ValueError(f"{name} has a valid_range that is not two numbers")
        least, most = found.get("valid_range", (None, None))
        self._least = found["valid_min"][0] if "valid_min" in found else least
        self._most = found["valid_max"][0] if "valid_max" in found else most

    def __bool__(self) -> bool:
        """Return whether the attributes scale values or mark values as missing."""
        limits = self._least, self._most
        return bool(self._missing) or any(
            x is not None for x in (self._scale, self._offset, *limits)
        )

    def unpacked(self, stored: Any) -> Array:
        """Convert `stored` values. Raises ValueError for missing values in an integer result."""
        missing: Any = np.ma.getmaskarray(stored) if np.ma.isMaskedArray(stored) else None
        stored = np.asarray(stored)
        values = stored
        if self._scale is not None:
            values = values * self._scale
        if self._offset is not None:
            values = values + self._offset
        if missing is None:
            missing = np.isin(stored, self._missing) if self._missing else False
            for limit, beyond in ((self._least, np.less), (self._most, np.greater)):
                if limit is not None:
                    missing = missing | beyond(stored, self._as_stored(limit, stored.dtype))
        if not np.any(missing):
            return np.asarray(values)
        if values.dtype.kind not in "fc":
            raise ValueError(
                f"{self.name} has missing values, which {values.dtype} cannot represent; replace "
                "them, or store the array as floating-point numbers"
            )
        return np.where(missing, values.dtype.type(np.nan), values)

    def _as_stored(self, limit: Any, dtype: np.dtype[Any]) -> Any:
        """Return a limit, such as `valid_min`, for comparison with stored values of type `dtype`.

        The limit is converted to a floating-point `dtype`, and is unchanged for integers. Raises
        ValueError for a floating-point limit of scaled integers.
        """
        if dtype.kind == "f":
            return limit.astype(dtype)
        if limit.dtype.kind == "f" and (self._scale is not None or self._offset is not None):
            raise ValueError(
                f"{self.name} has the floating-point limit {limit} for stored {dtype}; give "
                "valid_range, valid_min and valid_max in the stored type"
            )
        return limit


def put(out: Array, values: Any, name: str, casting: Any = "safe") -> None:
    """Copy `values` into `out`.

    `casting` is numpy's name for the allowed type conversions. `name` is the name of the source,
    for error messages. Raises ValueError for another shape, a conversion that is not allowed, and
    integers outside the range of `out`.
    """
    values = np.asarray(values)
    if values.shape != out.shape or not np.can_cast(values.dtype, out.dtype, casting):
        raise ValueError(
            f"{name} returned {values.dtype} of shape {values.shape}; expected {out.dtype} of "
            f"shape {out.shape}"
        )
    check_range(values, out.dtype, name)
    out[...] = values


def check_range(values: NDArray[Any], dtype: DTypeLike, name: str) -> None:
    """Raise `ValueError` if `values` are integers outside the range of the integer type `dtype`.

    Other types are not checked. `name` is the name of the source, for error messages.
    """
    if values.dtype.kind not in "iu" or np.dtype(dtype).kind not in "iu" or not values.size:
        return
    if not np.can_cast(values.dtype, dtype):
        limits, least, most = np.iinfo(dtype), int(values.min()), int(values.max())
        if least < limits.min or most > limits.max:
            raise ValueError(
                f"{name} has values from {least} to {most}, and {np.dtype(dtype)} holds those from "
                f"{limits.min} to {limits.max}; choose a wider type"
            )


_KEYS = (
    *("scale_factor", "add_offset"),
    *("_FillValue", "missing_value", "valid_range", "valid_min", "valid_max"),
)


def user_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an array in a file that can be written to another file.

    Left out are the attributes that `ScaleAndOffset` applies, the links to dimensions, and
    attributes that are not numbers, strings, or lists of numbers and strings.
    """
    kept = {}
    for key, value in attributes.items():
        value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        with suppress(TypeError, ValueError):
            kept[key] = json.loads(json.dumps(value))
    with suppress(KeyError, TypeError, ValueError):
        kept["affine"] = np.reshape(kept["affine"], (4, 4)).tolist()
    hidden = {*_KEYS, "_ARRAY_DIMENSIONS", *OF_HDF5}
    return {key: value for key, value in kept.items() if key not in hidden}


OF_HDF5 = (
    "CLASS",
    "NAME",
    "DIMENSION_LIST",
    "REFERENCE_LIST",
    "_Netcdf4Dimid",
    "_Netcdf4Coordinates",
)
"""Attributes by which HDF5 and NetCDF link an array to its dimensions in the same file."""


def _numeric_attribute(attributes: Mapping[str, Any], key: str, name: str) -> NDArray[Any]:
    """Return the values of the attribute `key` as a 1-D array; raise ValueError if not numbers.

    `name` is the name of the array, for error messages.
    """
    value = attributes[key]
    if isinstance(value, str):
        # xarray stores floating-point attributes in zarr's JSON as base64 of 8 bytes.
        with suppress(ValueError, struct.error):
            value = struct.unpack("<d", b64decode(value, validate=True))
    found = np.atleast_1d(np.asarray(value))
    if found.dtype.kind not in "iuf":
        raise ValueError(f"{name} has the attribute {key}={attributes[key]!r}; expected a number")
    # Scaling by integers would overflow in the stored type.
    return found if key in _KEYS[2:] or found.dtype.kind == "f" else found.astype(np.float64)
