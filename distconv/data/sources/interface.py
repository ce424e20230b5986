"""The interface of sources: samples of one shape and type, of which any box can be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from distconv.geometry.layout import Box

Array = NDArray[Any]

NUMBERS = "biufc"
"""The kinds of types that may be read, as characters of `numpy.dtype.kind`."""


class Coordinate(NamedTuple):
    """Positions along a dimension of an array in a file, such as latitudes.

    Attributes
    ----------
    name: the name of the dimension.
    values: the positions as stored, one for each index.
    attributes: the attributes of the positions in the file, such as units.
    """

    name: str
    values: Array
    attributes: Mapping[str, Any]


class Source(ABC):
    """Base class of sources: samples of one shape and type, of which any box can be read.

    Each rank reads on its own; no method is collective.

    Attributes
    ----------
    name: the name for error messages and reports.
    samples: the number of samples.
    shape: the shape of one sample, without a dimension for the samples.
    dtype: the type of the values, in the byte order of this machine.
    chunks: the extents, samples first, of the chunks that are always read in full; None if any box
        can be read without other elements.
    attributes: the attributes of the array in the file, as numbers, strings, and lists of numbers
        and strings. For images, "affine" is the 4 x 4 matrix from indices to millimetres, as in
        NIfTI, and "spacing" the distance of elements along each spatial dimension, in the "unit".
    coordinates: the positions along dimensions of a NetCDF file, by the index of the dimension;
        dimension 0 is that of the samples.

    Examples
    --------
    >>> class Ramp(dc.data.Source):
    ...     name, samples, shape, dtype = "ramp", 10, (1, 8), np.dtype("float32")
    ...     def read_into(self, out, sample, box):
    ...         out[...] = sample + np.arange(8)[box.slices[-1]]
    >>> data = dc.data.Dataset(Ramp(), dc.ProcessGrid(width=2))
    >>> data.batch([3]).full_tensor()[0, 0]
    tensor([ 3.,  4.,  5.,  6.,  7.,  8.,  9., 10.])
    >>> Ramp().fetched(dc.Box((0, 0), (1, 4)))  # 4 numbers of 4 bytes
    16
    """

    name: str
    samples: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None = None
    attributes: Mapping[str, Any] = MappingProxyType({})
    coordinates: Mapping[int, Coordinate] = MappingProxyType({})

    @abstractmethod
    def read_into(self, out: Array, sample: int, box: Box) -> None:
        """Read a box of one sample into `out`, an array of shape `box.shape` and type `dtype`.

        Raises an exception that names the source and the sample if the box cannot be read.
        """

    def facts(self) -> dict[str, str]:
        """Return facts by name, such as the shape; ranks check that the facts are equal."""
        return {
            f"shape of {self.name}": str((self.samples, *self.shape)),
            f"type of {self.name}": str(self.dtype),
        }

    def first_values(self) -> dict[str, str]:
        """Return a checksum of the middle rows of up to 8 samples, for ranks to compare."""
        number = 0
        for sample in sorted({i * (self.samples - 1) // 7 for i in range(8)}):
            number = crc32(self.middle_row(sample).tobytes(), number)
        return {f"checksum of {self.name}": f"{number:08x}"}

    def middle_row(self, sample: int) -> Array:
        """Return the middle row of a sample along the last dimension, for ranks to compare."""
        lead, last = tuple(n // 2 for n in self.shape[:-1]), self.shape[-1:]
        box = Box((*lead, *(0 for _ in last)), (*(n + 1 for n in lead), *last))
        values = np.empty(box.shape, self.dtype)
        self.read_into(values, sample, box)
        return values

    def varies(self, sample: int) -> bool:
        """Return whether repeated reads of a sample return different values."""
        return False

    def fetched(self, box: Box) -> int:
        """Return the number of bytes fetched to read a box of one sample.

        All chunks that intersect the box count in full; without chunks, the elements of the box.
        """
        if self.chunks is None:
            return box.size * self.dtype.itemsize
        if not box.size:
            return 0
        # Samples are read in any order, so a chunk with several samples is fetched for each.
        touched = [min(self.chunks[0], self.samples)]
        for start, stop, size, chunk in zip(
            box.start, box.stop, self.shape, self.chunks[1:], strict=True
        ):
            touched.append(min(-(-stop // chunk) * chunk, size) - start // chunk * chunk)
        return prod(touched) * self.dtype.itemsize

    def check_numbers(self) -> None:
        """Raise `ValueError` if the values are not numbers, or there are no elements."""
        if self.dtype.kind not in NUMBERS:
            raise ValueError(
                f"{self.name} has values of type {self.dtype}; expected numbers, such as float32"
            )
        if not self.samples or not prod(self.shape):
            raise ValueError(
                f"{self.name} holds no samples: its shape is {(self.samples, *self.shape)}"
            )


@contextmanager
def reading(path: Path, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a package in a `with` block into OSErrors that name `path` and a remedy.

    `kind` is the kind of file, such as "NIfTI file". `errors` are the exception types that a
    damaged file causes.
    """
    try:
        yield
    except PermissionError as error:
        raise PermissionError(f"{path}: no permission to read this file ({error})") from error
    except errors as error:
        raise OSError(f"{path}: not a whole {kind}; create or copy it again ({error})") from error


def import_package(name: str, doing: str, extra: str) -> Any:
    """Import and return the module `name` of an optional package.

    Raises ImportError with the command that installs `extra`, the extra of distconv with the
    package. `doing` begins the message, such as "x.h5: reading HDF5".
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{doing} needs the package {package}; pip install 'distconv[{extra}]'"
        ) from error
