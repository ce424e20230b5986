"""Sources that call code of the program: a function of sample and box, or a torch dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch

from distconv.data.sources.interface import Array, Source
from distconv.data.sources.packing import put
from distconv.geometry.layout import Box

REPEATS = 16
"""The number of extra loads of a sample to detect whether its dataset changes samples at random."""


class Function(Source):
    """A source that calls a function to read a box of a sample.

    Parameters
    ----------
    read: `read(sample, box)` returns the values at `box.slices` of one sample, an array of
        `box.shape`. A background thread calls `read`, on each rank for the rank's blocks, and from
        time to time for a row of any sample, which ranks compare. The values must depend on the
        arguments only, so that the blocks of all ranks form one sample.
    samples: the number of samples.
    shape: the shape of one sample.
    dtype: the type of the values; `read` may return another type of the same kind, such as
        float64.

    Examples
    --------
    >>> def read(sample, box):
    ...     return np.full((1, 64, 64), sample)[box.slices]  # a real one reads box.slices of a file
    >>> source = dc.data.Function(read, samples=10, shape=(1, 64, 64))
    >>> x = dc.data.Dataset(source, dc.ProcessGrid(height=2)).batch([3])
    >>> tuple(x.shape), x.mean().item()
    ((1, 1, 64, 64), 3.0)
    """

    def __init__(
        self,
        read: Callable[[int, Box], Any],
        samples: int,
        shape: Sequence[int],
        dtype: Any = "float32",
    ) -> None:
        self._read = read
        self.name = getattr(read, "__name__", type(read).__name__)
        self.samples, self.shape, self.dtype = int(samples), tuple(shape), np.dtype(dtype)
        self.check_numbers()

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        values = np.asarray(self._read(sample, box))
        if values.shape != box.shape:
            raise ValueError(
                f"{self.name} returned shape {values.shape} for {box} of sample {sample}; "
                f"expected {box.shape}"
            )
        put(out, values, f"{self.name} for sample {sample}", "same_kind")


class Items:
    """A torch dataset whose items hold all fields of a sample, shared by the sources of the fields.

    The last item is kept, so that reading all fields of a sample loads the item once.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._lock = Lock()
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def fields(self) -> list[str | int | None]:
        """Return the field names of an item: keys, indices, or [None] for a single tensor."""
        item = self.item(0)
        if isinstance(item, Mapping):
            return list(item)
        return list(range(len(item))) if isinstance(item, tuple | list) else [None]

    def item(self, sample: int, again: bool = False) -> Any:
        """Return the item of a sample; with `again`, load the item anew and do not keep it."""
        with self._lock:
            if again:  # by a thread beside the one that reads the fields of the kept item
                return self.dataset[sample]
            if self._last is None or self._last[0] != sample:
                self._last = sample, self.dataset[sample]
            return self._last[1]


class ItemSource(Source):
    """A source on one field of a torch dataset. Every rank loads whole items and keeps its block.

    Raises ValueError for a dataset without samples, and for a field that is missing.
    """

    def __init__(self, items: Items, field: str | int | None) -> None:
        self._items, self._field = items, field
        kind = type(items.dataset).__name__
        self.name = kind if field is None else f"field {field!r} of {kind}"
        if not len(items):
            raise ValueError(f"{kind} holds no samples")
        values = self._values(0)
        self.samples, self.shape, self.dtype = len(items), values.shape, values.dtype
        self.chunks = (1, *self.shape)
        self.check_numbers()

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        values = self._values(sample)
        if (values.shape, values.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"{self.name} is {values.shape} of {values.dtype} in sample {sample}, but "
                f"{self.shape} of {self.dtype} in sample 0; expected the same in all samples"
            )
        out[...] = values[box.slices]

    def varies(self, sample: int) -> bool:
        """Return whether several loads of a sample give different values, as random changes do."""
        first, *others = (self._values(sample, again=True).tobytes() for _ in range(1 + REPEATS))
        return any(values != first for values in others)

    def _values(self, sample: int, again: bool = False) -> Array:
        item = self._items.item(sample, again)
        try:
            values = item if self._field is None else item[self._field]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{self.name} is missing in sample {sample}; expected it in every sample"
            ) from error
        return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
