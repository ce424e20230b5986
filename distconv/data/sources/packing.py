"""Values as files hold them, and as they are meant: the CF conventions of NetCDF files."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distconv.data.sources.interface import Array


class Packing:
    """Numbers that are stored as others: meant = stored * scale_factor + add_offset.

    Those equal to `_FillValue` or `missing_value` are missing: not a number where the result is of
    floating point, and an error in integers. Without such attributes values are as stored.

    Parameters
    ----------
    attributes: of the array in the file.
    name: what errors call the array.

    Raises
    ------
    ValueError
        For attributes that are no numbers, and `_Unsigned`, which is not supported.
    """

    def __init__(self, attributes: Mapping[str, Any], name: str) -> None:
        self.name = name
        found = {key: _numbers(attributes, key, name) for key in _KEYS if key in attributes}
        if str(attributes.get("_Unsigned", "false")).strip("b'\"").lower() != "false":
            raise ValueError(
                f"{name} has the attribute _Unsigned, which is not supported; store it in an "
                "unsigned type"
            )
        self._scale, self._offset = (found[key][0] if key in found else None for key in _KEYS[:2])
        self._missing = [value for key in _KEYS[2:] for value in found.get(key, ())]

    def __bool__(self) -> bool:
        """Return whether values may be others than those stored."""
        return bool(self._missing or self._scale is not None or self._offset is not None)

    def unpacked(self, stored: Any) -> Array:
        """Return the values that are meant. Raises ValueError for missing integers."""
        missing = np.ma.getmaskarray(stored) if np.ma.isMaskedArray(stored) else None
        stored = np.asarray(stored)
        values = stored
        if self._scale is not None:
            values = values * self._scale
        if self._offset is not None:
            values = values + self._offset
        if self._missing and missing is None:
            missing = np.isin(stored, self._missing)
        if missing is None or not missing.any():
            return np.asarray(values)
        if values.dtype.kind not in "fc":
            raise ValueError(
                f"{self.name} has missing values, and those of type {values.dtype} cannot say so; "
                "fill them in, or store them as floating-point numbers"
            )
        return np.where(missing, values.dtype.type(np.nan), values)


def put(out: Array, values: Any, name: str, casting: Any = "safe") -> None:
    """Copy values of the same shape, of a type that `out` can hold. Raises ValueError for others.

    Parameters
    ----------
    casting: which types these are, as numpy calls it; integers have to be in range in any case.
    """
    values = np.asarray(values)
    if values.shape != out.shape or not np.can_cast(values.dtype, out.dtype, casting):
        raise ValueError(
            f"{name} has returned {values.dtype} of shape {values.shape}; expected {out.dtype} of "
            f"shape {out.shape}"
        )
    check_range(values, out.dtype, name)
    out[...] = values


def check_range(values: NDArray[Any], dtype: DTypeLike, name: str) -> None:
    """Raise `ValueError` for integers that another type of integers cannot hold."""
    if values.dtype.kind not in "iu" or np.dtype(dtype).kind not in "iu" or not values.size:
        return
    if not np.can_cast(values.dtype, dtype):
        limits, least, most = np.iinfo(dtype), int(values.min()), int(values.max())
        if least < limits.min or most > limits.max:
            raise ValueError(
                f"{name} has values from {least} to {most}, and {np.dtype(dtype)} holds those from "
                f"{limits.min} to {limits.max}; choose a wider type"
            )


_KEYS = ("scale_factor", "add_offset", "_FillValue", "missing_value")


def _numbers(attributes: Mapping[str, Any], key: str, name: str) -> NDArray[Any]:
    """Return the value, or values, of an attribute, in the type that it has in the file."""
    value = attributes[key]
    if isinstance(value, str):
        # xarray writes those of floating-point arrays into zarr's JSON like this.
        with suppress(ValueError, struct.error):
            value = struct.unpack("<d", b64decode(value, validate=True))
    found = np.atleast_1d(np.asarray(value))
    if found.dtype.kind not in "iuf":
        raise ValueError(f"{name} has the attribute {key}={attributes[key]!r}; expected a number")
    # Integers would overflow in the type of those stored.
    return found if key in _KEYS[2:] or found.dtype.kind == "f" else found.astype(np.float64)
