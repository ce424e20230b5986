"""Samples on a grid: which boxes of a mini-batch this rank needs, and reading them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from distconv.data.errors import DataError, check_alike, together
from distconv.data.layouts import batch_cuts, check_names
from distconv.data.sources.interface import Source
from distconv.data.sources.opening import Field, open_sources
from distconv.geometry.layout import Box, Cuts, Layout, rank_box
from distconv.grid.interface import Grid
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.dist_tensor import DistTensor

Transform: TypeAlias = Callable[[Tensor, Box], Tensor]
"""A function of a block of a mini-batch and the box where it lies, to a block of the same shape."""

Batch: TypeAlias = Any
"""A DistTensor where the samples have one field, and a tuple of them where they have several."""

_TOO_MUCH = 2.0
"""How many times the bytes of a sample the ranks may fetch for it before it is told."""

_WIDER = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}
"""The types in which torch computes with unsigned numbers, which it hardly does in their own."""


@dataclass
class Blocks:
    """This rank's blocks of one mini-batch, read and not yet a DistTensor."""

    samples: list[int]
    tensors: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _FieldOnGrid:
    """One field of the samples, as it lies on the grid."""

    source: Source
    cuts: Cuts
    dtype: torch.dtype
    transform: Transform | None

    def box(self, samples: int, grid: Grid) -> Box:
        """Return the box of a mini-batch of so many samples that this rank holds."""
        return rank_box((samples, *self.source.shape), self.cuts, grid.topology, grid.rank)


class Dataset:
    """Samples of which each rank reads its own boxes. Opening it is collective.

    Parameters
    ----------
    source: where the samples are:
        a path of an HDF5 file, a zarr folder, or a `.npy` file, samples first;
        a folder of such files, or a pattern ("train/*.h5"), one sample in each;
        an array, or a `Source`, such as `Function(read, samples, shape)`;
        a torch dataset with `__len__` and `__getitem__`, of which every rank loads whole items;
        or a dictionary with one of these for each name.
    grid: the process grid.
    inputs, targets: the names of the fields of a sample, one or several each: datasets of a file,
        keys of a dictionary, or what items are indexed with. All there are, when neither is given.
    layout: the layout of mini-batches of the first field, or of several in a dictionary by name;
        every dimension over the axis of its own name when not given. Of the other fields, those
        with as many dimensions are cut alike, those that have its dimensions but the channel
        (labels beside a volume) alike without it, and others (vectors, numbers) by samples only.
    dtype: the type of the tensors: one for all floating-point fields, or a dictionary by name.
        torch's default for floating-point fields when not given; other fields stay as they are.
    transform: by name, what is done to this rank's block of a mini-batch once it is read and
        converted: `transform(block, box)`, such as `Normalize`. It runs in a background thread, and
        has to commute with cutting.
    check_finite: whether values that are not finite are an error.

    Attributes
    ----------
    grid: the grid.
    samples: the number of samples, also `len(dataset)`.
    bytes_read: bytes this rank has read so far, in the types of the source.
    bytes_fetched: the same with the whole of each chunk of which a part was read.
    amplification: for each field, the bytes of chunks that all ranks fetch for a sample, over those
        that they need.

    Raises
    ------
    DataError
        On every rank, for a source that is missing, truncated or mis-shaped on any, or is not the
        same on all.
    """

    def __init__(
        self,
        source: Any,
        grid: ProcessGrid,
        inputs: str | int | Sequence[str | int] | None = None,
        targets: str | int | Sequence[str | int] | None = None,
        *,
        layout: Layout | Mapping[Any, Layout] | None = None,
        dtype: torch.dtype | Mapping[Any, torch.dtype] | None = None,
        transform: Mapping[Any, Transform] | None = None,
        check_finite: bool = False,
    ) -> None:
        self.grid = grid
        self.bytes_read = self.bytes_fetched = 0
        self._counting = Lock()
        self._check_finite = check_finite
        names = [*_listed(inputs), *_listed(targets)]

        def opened() -> dict[Field, _FieldOnGrid]:
            if len(set(names)) < len(names):
                raise ValueError(f"inputs and targets name a field twice: {names}")
            sources = open_sources(source, names)
            check_names(sources, dtype=dtype, transform=transform)
            _check_samples(sources)
            cuts = batch_cuts({name: own.shape for name, own in sources.items()}, layout, grid)
            return {
                name: _FieldOnGrid(
                    own,
                    cuts[name],
                    _tensor_type(own, dtype, name),
                    (transform or {}).get(name),
                )
                for name, own in sources.items()
            }

        self._fields = together(grid, opened)
        facts = together(grid, self._facts)
        check_alike(grid, facts, "Give all ranks the same data, in the same way.")
        self.samples = next(iter(self._fields.values())).source.samples
        self.amplification = self._compare_chunks()

    def __len__(self) -> int:
        return self.samples

    @property
    def fields(self) -> dict[Field, Source]:
        """Return the source of each field, in the order of a mini-batch."""
        return {name: own.source for name, own in self._fields.items()}

    def batch(self, samples: Sequence[int]) -> Batch:
        """Read one mini-batch. Collective: all ranks ask for the same samples.

        Returns the fields in order, each a DistTensor of shape (len(samples), *shape of a sample);
        a bare one where there is only one field. Raises DataError on every rank where one cannot
        read its box.
        """
        check_alike(self.grid, {"samples": str(list(samples))}, "Ask for the same on all ranks.")
        return self.assemble(together(self.grid, lambda: self.read(samples)))

    def read(self, samples: Sequence[int]) -> Blocks:
        """Read this rank's blocks of a mini-batch. Not collective, and fit for a thread."""
        wrong = [i for i in samples if not 0 <= i < self.samples]
        if wrong:
            raise ValueError(f"there are no samples {wrong}; there are {self.samples}, from 0")
        fields = list(self._fields.values())
        boxes = [own.box(len(samples), self.grid) for own in fields]
        arrays = [np.empty(b.shape, f.source.dtype) for f, b in zip(fields, boxes, strict=True)]
        # Sample by sample, as the fields of one may have to be fetched together.
        for place, sample in enumerate(samples):
            for own, box, values in zip(fields, boxes, arrays, strict=True):
                if values.size and box.start[0] <= place < box.stop[0]:
                    in_sample = Box(box.start[1:], box.stop[1:])
                    own.source.read_into(values[place - box.start[0], ...], sample, in_sample)
                    self._count(own.source, in_sample)
        blocks = Blocks(list(map(int, samples)))
        for own, box, values in zip(fields, boxes, arrays, strict=True):
            if self._check_finite:
                _raise_unless_finite(own.source, values, blocks.samples[box.slices[0]])
            blocks.tensors.append(self._converted(own, values, box))
        return blocks

    def assemble(self, blocks: Blocks) -> Batch:
        """Make DistTensors of the blocks that every rank has read of one mini-batch.

        All ranks call it for the same samples. No communication: what a rank holds follows from
        the grid.
        """
        batch = tuple(
            DistTensor(
                block.to(self.grid.device, non_blocking=True),
                (len(blocks.samples), *own.source.shape),
                own.cuts,
                self.grid,
            )
            for own, block in zip(self._fields.values(), blocks.tensors, strict=True)
        )
        return batch if len(batch) > 1 else batch[0]

    def _converted(self, own: _FieldOnGrid, values: np.ndarray, box: Box) -> Tensor:
        """Return what was read as a tensor, transformed; in pinned memory for a GPU."""
        if values.dtype.name in _WIDER:
            values = values.astype(np.int64)
        block = torch.from_numpy(values).to(own.dtype)
        if own.transform is not None:
            shape, block = block.shape, own.transform(block, box)
            if block.shape != shape:
                raise ValueError(
                    f"the transform of {own.source.name} returns {tuple(block.shape)} for a block "
                    f"of {tuple(shape)}; expected the same shape"
                )
        return block.pin_memory() if self.grid.device.type == "cuda" else block

    def _count(self, source: Source, box: Box) -> None:
        with self._counting:
            self.bytes_read += box.size * source.dtype.itemsize
            self.bytes_fetched += source.fetched(box)

    def _facts(self) -> dict[str, str]:
        facts: dict[str, str] = {}
        for name, own in self._fields.items():
            facts |= own.source.facts()
            facts[f"field {name!r}"] = f"{own.source.name} as {own.dtype} in {Layout.of(own.cuts)}"
        return facts

    def _compare_chunks(self) -> dict[Field, float]:
        """Find out what chunks cost on this grid, and tell where it is much. Collective."""
        grid = self.grid
        boxes = {
            name: rank_box(own.source.shape, own.cuts[1:], grid.topology, grid.rank)
            for name, own in self._fields.items()
        }
        mine = [
            (own.source.fetched(boxes[name]), boxes[name].size * own.source.dtype.itemsize)
            for name, own in self._fields.items()
        ]
        totals = np.array(grid.all_gather_object(mine), dtype=float).sum(0)
        found = {
            name: fetched / needed
            for name, (fetched, needed) in zip(self._fields, totals.tolist(), strict=True)
        }
        for (name, own), (fetched, needed) in zip(self._fields.items(), totals, strict=True):
            if grid.rank == 0 and found[name] >= _TOO_MUCH:
                best = tuple(map(min, own.source.chunks or (), (1, *boxes[name].shape)))
                warnings.warn(
                    f"{own.source.name} is fetched in pieces of {own.source.chunks}: to have the "
                    f"{needed:,.0f} bytes of a sample for each replica, the ranks of {grid} fetch "
                    f"{fetched:,.0f}, {found[name]:.3g} times as much. Pieces of {best} would lie "
                    "within their boxes",
                    stacklevel=3,
                )
        return found


def _listed(names: str | int | Sequence[str | int] | None) -> list[str | int]:
    if names is None:
        return []
    return [names] if isinstance(names, str | int) else list(names)


def _check_samples(sources: Mapping[Field, Source]) -> None:
    counts = {own.name: own.samples for own in sources.values()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{n} in {name}" for name, n in counts.items())
        raise ValueError(f"the fields have different numbers of samples: {listed}")


def _tensor_type(own: Source, dtype: Any, name: Field) -> torch.dtype:
    chosen = dtype.get(name) if isinstance(dtype, Mapping) else dtype
    if chosen is not None and (own.dtype.kind == "f" or isinstance(dtype, Mapping)):
        if not isinstance(chosen, torch.dtype):
            raise TypeError(f"dtype={chosen!r} of {own.name} is not a torch.dtype")
        return chosen
    if own.dtype.kind == "f":
        return torch.get_default_dtype()
    if own.dtype.name in _WIDER:
        return _WIDER[own.dtype.name]
    return torch.from_numpy(np.empty(0, own.dtype)).dtype


def _raise_unless_finite(source: Source, values: np.ndarray, samples: Sequence[int]) -> None:
    if source.dtype.kind not in "fc" or np.isfinite(values).all():
        return
    bad = [i for i, sample in zip(samples, values, strict=True) if not np.isfinite(sample).all()]
    raise DataError(f"{source.name} holds values that are not finite in samples {bad}")
