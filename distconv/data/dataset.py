"""`Dataset`: samples of which each rank reads its own blocks, mini-batch by mini-batch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distconv.comm.checksums import Checked, unequal
from distconv.data.augment import Augmentations, Change, Move
from distconv.data.cache import Arrivals, Arriving, Cache, Loaded
from distconv.data.errors import check_alike, check_replicas, together
from distconv.data.fields import (
    FieldOnGrid,
    HaloBlock,
    Transform,
    Values,
    batch_cuts,
    check_names,
    given_shapes,
    halo_of,
    prepare,
    tensor_type,
)
from distconv.data.sources.interface import Source
from distconv.data.sources.opening import Field, facts_of, open_sources
from distconv.data.views import View
from distconv.geometry.layout import Box, Layout, cutting_axes
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.base import whole_numbers
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import in_sample_format

Batch: TypeAlias = Any
"""One mini-batch: a DistTensor, or a `HaloBlock` for a field with a halo; a tuple for several
fields."""

_TOO_MUCH = 2.0
"""The ratio of bytes fetched to bytes needed of a sample from which `Dataset` warns."""


@dataclass
class Blocks:
    """This rank's blocks of one mini-batch: for each field a tensor in host memory, and its box.

    `samples` are the sample numbers of the mini-batch on all ranks. `rows` has a sample number and
    a row of each field of this sample, for ranks to compare; None for no comparison.
    """

    samples: list[int]
    tensors: list[Tensor] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    rows: tuple[int, list[Checked]] | None = None


class Dataset:
    """Samples of which each rank reads its own blocks. Creating a `Dataset` is collective.

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
        keys of a dictionary, or indices into items. All fields when neither is given.
    layout: the layout of mini-batches of the first field, or a dictionary of layouts by field; by
        default every dimension is partitioned over the axis of its own name. A field without a
        layout is partitioned like the first field if it has as many dimensions, or the first
        field's shape without channels (labels of a volume); other fields over samples only.
    dtype: the type of the tensors: one for all floating-point fields, or a dictionary by field.
        torch's default for floating-point fields when not given; other fields keep their type.
    transform: a function `transform(block, box)` of this rank's block of a mini-batch, read and
        converted, such as `Normalize`; several in a dictionary by field. The function runs in a
        background thread, and must commute with partitioning.
    check_finite: whether values that are not finite are an error, both as read and once converted.
    halo: the number of elements by which a block grows on both sides of each spatial dimension (of
        the first field: all dimensions after the channels). One number, one for each dimension,
        or a dictionary by field. Fields with the first field's spatial extents are then
        `HaloBlock`s, plain tensors with neighbouring elements, in place of DistTensors.
    halo_border: the halo beyond the sample: none ("clip"), zeros ("zeros"), or the elements at the
        other end of the sample ("periodic").
    augment: random changes of each sample, such as `Flip()` and `Noise(0.1)`, the same on any grid.
        Elements are moved alike in all fields with the first field's spatial extents; values are
        changed after `transform`.
    augment_seed: the seed of the random numbers of `augment`, which also depend on the epoch and
        the sample.
    cache: "memory" to keep the blocks of each sample on the ranks that first read the sample, and
        to send the blocks if other ranks need the sample in a later mini-batch; or a folder on a
        disk of each node, to keep the blocks in. No sample is then read twice; the mini-batches are
        the same.
    cache_limit: the largest number of bytes that each rank keeps, checked before reading. None for
        no limit.

    Attributes
    ----------
    grid: the grid.
    samples: the number of samples, also `len(dataset)`.
    bytes_read: bytes this rank has read so far, in the types of the source.
    bytes_fetched: bytes of all chunks of the source of which this rank has read any part.
    cache: the kept samples, or None; `cache.bytes_received` counts bytes from other ranks.
    amplification: for each field, the bytes of chunks that all ranks fetch for a sample, divided by
        the bytes that the ranks need.

    Raises
    ------
    DataError
        On every rank, for a source that is missing, truncated or mis-shaped on any rank, or that
        differs between ranks.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> volumes = np.zeros((10, 1, 33, 32), "float32")  # or a path, such as "train.h5"
    >>> data = dc.data.Dataset(volumes, grid)
    >>> len(data), tuple(data.batch([0, 5]).shape)
    (10, (2, 1, 33, 32))
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
        transform: Transform | Mapping[Any, Transform] | None = None,
        check_finite: bool = False,
        halo: int | Sequence[int] | Mapping[Any, int | Sequence[int]] = 0,
        halo_border: str = "clip",
        augment: Sequence[Move | Change] = (),
        augment_seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | None = None,
    ) -> None:
        self.grid = grid
        self.bytes_read = self.bytes_fetched = 0
        self._counting = Lock()
        self._check_finite = check_finite
        self._cached = "not" if cache is None else "in memory" if cache == "memory" else "in files"
        names = [*_listed(inputs), *_listed(targets)]

        def opened() -> dict[Field, FieldOnGrid]:
            _check_arguments(names, augment_seed)
            sources = open_sources(source, names)
            transforms = _by_name(transform, sources)
            check_names(
                sources,
                dtype=dtype,
                transform=transforms,
                halo=halo,
                augment={name: None for one in augment for name in getattr(one, "fields", ())},
            )
            _check_samples(sources)
            augmentations = Augmentations(tuple(augment), augment_seed)
            how = augmentations, layout, dtype, transforms, halo, halo_border
            return _fields_on_grid(sources, grid, *how)

        self._fields = together(grid, opened)
        facts = together(grid, self._facts)
        check_alike(grid, facts, "Pass the same data and arguments on all ranks.")
        self.samples = next(iter(self._fields.values())).source.samples
        self.amplification = self._compare_chunks()
        self.cache: Cache | None = None
        if cache is not None:
            given = self.on_grid, grid, self._read_into
            self.cache = together(grid, lambda: Cache(*given, os.fspath(cache), cache_limit))

    def __len__(self) -> int:
        return self.samples

    @property
    def on_grid(self) -> list[FieldOnGrid]:
        """Return all fields with partitioning and conversions, in the order of a mini-batch."""
        return list(self._fields.values())

    @property
    def fields(self) -> dict[Field, Source]:
        """Return the source of each field, in the order of a mini-batch."""
        return {name: own.source for name, own in self._fields.items()}

    def batch(self, samples: Sequence[int], epoch: int = 0) -> Batch:
        """Read and return one mini-batch. Collective: all ranks pass the same samples.

        Returns the fields in order, each a DistTensor of shape (len(samples), *shape of a sample),
        or a `HaloBlock`; no tuple if there is only one field. Raises DataError on every rank
        if any rank cannot read its block.

        Parameters
        ----------
        samples: the sample numbers, from 0.
        epoch: the epoch, on which the random changes of samples depend.

        Examples
        --------
        >>> samples = np.arange(40.0).reshape(10, 1, 4)  # sample i begins with 4 i
        >>> data = dc.data.Dataset(samples, dc.ProcessGrid(width=2))
        >>> data.batch([7, 2]).full_tensor()[:, 0, 0]
        tensor([28.,  8.])
        """
        facts = {"samples": str(list(samples)), "epoch": str(epoch)}
        check_alike(self.grid, facts, "Request the same samples on all ranks.")
        if self.cache is None:
            return self._checked(together(self.grid, lambda: self.read(samples, epoch)))
        cache = self.cache
        (arrivals,) = together(self.grid, lambda: cache.plan([self.numbers(samples)]))
        loaded = together(self.grid, lambda: cache.load(arrivals))
        values = self.exchange(samples, epoch, arrivals, loaded)()
        return self._checked(together(self.grid, lambda: self.converted(values)))

    def _checked(self, blocks: Blocks) -> Batch:
        check_replicas(self.grid, self.held(blocks))
        return self.assemble(blocks)

    def held(self, blocks: Blocks) -> list[Checked]:
        """Return this rank's block of each field with its name and axes, to compare replicas."""
        return [
            Checked(f"field {own.name!r}", block, cutting_axes(own.cuts))
            for own, block in zip(self.on_grid, blocks.tensors, strict=True)
        ]

    def rows(self, sample: int) -> tuple[int, list[Checked]]:
        """Read the middle row of each field of `sample`; return `sample` and rows to compare."""
        return sample, [
            Checked(f"field {name!r} of sample {sample}", torch.from_numpy(own.middle_row(sample)))
            for name, own in self.fields.items()
        ]

    def compare_rows(self, sample: int, rows: list[Checked]) -> None:
        """Raise DataError on every rank if the `rows` of a sample differ. Collective.

        Rows of a torch dataset that changes samples at random may differ.
        """
        if unequal(rows, self.grid):
            sources = self.fields.values()
            varies = together(self.grid, lambda: any(x.varies(sample) for x in sources))
            if not any(self.grid.all_gather_object(varies)):
                check_replicas(self.grid, rows)

    @property
    def cut_over(self) -> list[tuple[str, ...]]:
        """Return each distinct tuple of grid axes over which a field is partitioned."""
        return list(dict.fromkeys(cutting_axes(own.cuts) for own in self.on_grid))

    def exchange(
        self, samples: Sequence[int], epoch: int, arrivals: Arrivals, loaded: Loaded
    ) -> Arriving:
        """Start to send a mini-batch from the ranks that cache its samples. Collective.

        Returns a function that waits for the messages and returns the elements that this rank
        needs.

        Parameters
        ----------
        arrivals: the samples new to the cache, from `Cache.plan`.
        loaded: this rank's boxes of the new samples, from `Cache.load`.
        """
        assert self.cache is not None
        self.cache.keep(arrivals, loaded)
        return self.cache.start(prepare(self.on_grid, samples, epoch, self.grid))

    def read(self, samples: Sequence[int], epoch: int = 0) -> Blocks:
        """Read this rank's blocks of a mini-batch. Not collective; any thread may call `read`."""
        values = prepare(self.on_grid, self.numbers(samples), epoch, self.grid)
        # Samples first, then fields: a torch dataset loads all fields of a sample at once.
        for place in range(len(samples)):
            for own, wanted, array in zip(self.on_grid, values.wanted, values.arrays, strict=True):
                here = place - wanted.box.start[0]
                if 0 <= here < len(wanted.samples):
                    view = wanted.views[here]
                    self._read_view(own.source, wanted.samples[here], view, array[here, ...])
        return self.converted(values)

    def converted(self, values: Values) -> Blocks:
        """Convert this rank's elements of a mini-batch, as read, to tensors.

        The tensors are transformed and augmented, and are in pinned memory if the grid uses GPUs.
        Raises DataError for values that are not finite, with `check_finite`.
        """
        blocks = Blocks(values.samples)
        for own, wanted, array in zip(self.on_grid, values.wanted, values.arrays, strict=True):
            if self._check_finite and own.source.dtype.kind in "fc":
                own.check_finite(np.isfinite(array), wanted)
            block = own.converted(array, wanted, values.epoch)
            if self._check_finite:
                where = f", as {own.dtype} and after transform="
                own.check_finite(torch.isfinite(block), wanted, where)
            if not own.halo:
                shape = len(values.samples), *own.shape
                block = in_sample_format(block, shape, own.cuts, self.grid)
            pinned = self.grid.computes_on_gpu
            blocks.tensors.append(block.pin_memory() if pinned else block)
            blocks.boxes.append(wanted.box)
        return blocks

    def assemble(self, blocks: Blocks) -> Batch:
        """Return DistTensors, or `HaloBlock`s, on the grid's device from this rank's blocks.

        All ranks call `assemble` for the same mini-batch. No communication.
        """
        batch: list[Any] = []
        count, topology = len(blocks.samples), self.grid.topology
        for own, block, box in zip(self.on_grid, blocks.tensors, blocks.boxes, strict=True):
            local = block.to(self.grid.device, non_blocking=True)
            shape = count, *own.shape
            if own.halo:
                mine = own.box(count, topology, self.grid.rank)
                batch.append(HaloBlock(local, box, mine, shape))
            else:
                batch.append(DistTensor(local, shape, own.cuts, self.grid))
        return tuple(batch) if len(batch) > 1 else batch[0]

    def numbers(self, samples: Sequence[int]) -> list[int]:
        """Return sample numbers as ints.

        Raises TypeError for values that are not whole numbers, and ValueError for numbers outside
        0 to `len(dataset) - 1`.
        """
        numbers = whole_numbers(tuple(samples), "samples")
        wrong = [i for i in numbers if not 0 <= i < self.samples]
        if wrong:
            raise ValueError(f"there are no samples {wrong}; choose from 0 to {self.samples - 1}")
        return list(numbers)

    def _read_view(self, source: Source, sample: int, view: View, out: NDArray[Any]) -> None:
        """Read `view` of a stored sample into `out`, one box of the stored sample at a time."""
        for piece in view.pieces:
            if piece.source.shape == out.shape and view.straight and not any(piece.flips):
                self._read_into(source, sample, piece.source, out)
            else:
                values = np.empty(piece.source.shape, source.dtype)
                self._read_into(source, sample, piece.source, values)
                piece.place(out, values, view.order)

    def _read_into(self, source: Source, sample: int, box: Box, out: NDArray[Any]) -> None:
        source.read_into(out, sample, box)
        with self._counting:
            self.bytes_read += box.size * source.dtype.itemsize
            self.bytes_fetched += source.fetched(box)

    def _facts(self) -> dict[str, str]:
        facts = {"cache": f"{self._cached} kept"}
        facts |= facts_of({name: own.source for name, own in self._fields.items()})
        for name, own in self._fields.items():
            cut = f"{own.dtype} in {Layout.of(own.cuts)}"
            halo = f", halo {own.halo} {own.border}" if own.halo else ""
            facts[f"field {name!r}"] = f"{own.source.name} as {cut}{halo}"
            facts["augment"] = str(own.augmentations)
        return facts

    def _compare_chunks(self) -> dict[Field, float]:
        """Return for each field the bytes fetched for a sample divided by the bytes needed.

        Both are sums over all ranks. Warns on rank 0 about a field with a ratio of 2 or more.
        Collective.
        """
        grid = self.grid
        boxes = {
            name: own.stored_box(grid.topology, grid.rank) for name, own in self._fields.items()
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
                    f"{own.source.name} is stored in chunks of {own.source.chunks}: for the "
                    f"{needed:,.0f} bytes of a sample for each replica, the ranks of {grid} read "
                    f"{fetched:,.0f}, {found[name]:.3g} times as much. Chunks of {best} would "
                    "each lie within the block of one rank",
                    stacklevel=3,
                )
        return found


def _listed(names: str | int | Sequence[str | int] | None) -> list[str | int]:
    if names is None:
        return []
    return [names] if isinstance(names, str | int) else list(names)


def _fields_on_grid(
    sources: Mapping[Field, Source],
    grid: ProcessGrid,
    augmentations: Augmentations,
    layout: Layout | Mapping[Any, Layout] | None,
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None,
    transforms: Mapping[Any, Transform],
    halo: Any,
    border: str,
) -> dict[Field, FieldOnGrid]:
    """Combine sources, partitioning and conversions to the fields of a dataset.

    The arguments are those of `Dataset`, with `transforms` by field. Raises ValueError if an
    augmentation changes values that are not floating-point.
    """
    shapes = given_shapes(sources, augmentations)
    cuts = batch_cuts({name: shape for name, (shape, _) in shapes.items()}, layout, grid)
    fields = {
        name: FieldOnGrid(
            number=number,
            name=name,
            source=own,
            cuts=cuts[name],
            dtype=tensor_type(own, dtype, name),
            transform=transforms.get(name),
            shape=shapes[name][0],
            space=shapes[name][1],
            halo=halo_of(name, own, *shapes[name], halo, border),
            border=border,
            augmentations=augmentations,
            changes=tuple(augmentations.changes(number, name)),
        )
        for number, (name, own) in enumerate(sources.items())
    }
    for own in fields.values():
        if own.changes and not own.dtype.is_floating_point:
            raise ValueError(
                f"augment: {own.changes[0][1]} changes {own.source.name}, which has type "
                f"{own.dtype}; expected a floating-point type, which dtype= sets"
            )
    return fields


def _by_name(
    transform: Transform | Mapping[Any, Transform] | None, sources: Mapping[Field, Source]
) -> Mapping[Any, Transform]:
    """Return the transforms by field, from the argument `transform` of `Dataset`.

    Raises ValueError for a single function if there are several fields.
    """
    if not callable(transform):
        return transform or {}
    if len(sources) > 1:
        raise ValueError(
            f"transform={transform!r} is a single function, but there are the fields "
            f"{list(sources)}; pass a dictionary of functions by field name"
        )
    return dict.fromkeys(sources, transform)


def _check_arguments(names: Sequence[Field], augment_seed: int) -> None:
    """Raise ValueError for a field that is named twice, or a negative seed."""
    if len(set(names)) < len(names):
        raise ValueError(f"inputs and targets name a field twice: {names}; name each field once")
    if augment_seed < 0:
        raise ValueError(f"augment_seed={augment_seed} is negative; choose 0 or more")


def _check_samples(sources: Mapping[Field, Source]) -> None:
    counts = {own.name: own.samples for own in sources.values()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{n} in {name}" for name, n in counts.items())
        raise ValueError(
            f"the fields have different numbers of samples: {listed}; expected the same number in "
            "every field"
        )
