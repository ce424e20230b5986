"""One field of the samples on a grid: the boxes that ranks read, and the conversion to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distconv.data.augment import Augmentations, Change, Move
from distconv.data.errors import DataError
from distconv.data.sources.interface import Source
from distconv.data.sources.opening import Field
from distconv.data.sources.packing import check_range
from distconv.data.views import View
from distconv.geometry.layout import Box, Cuts, Layout, rank_box
from distconv.geometry.topology import Topology
from distconv.grid.interface import Grid
from distconv.tensor.redistribution import cuts_of_layout

Transform: TypeAlias = Callable[[Tensor, Box], Tensor]
"""A function `transform(block, box)` of a block of a mini-batch and its indices, which returns a
block of the same shape."""

Name = TypeVar("Name")

BORDERS = ("clip", "zeros", "periodic")

_WIDER = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}
"""Signed torch types for numpy's unsigned types, for which torch has few operators."""


@dataclass(frozen=True)
class HaloBlock:
    """A rank's block of a mini-batch with a halo of neighbouring elements, in a plain tensor.

    Attributes
    ----------
    local: the elements of block and halo, on the device of the grid.
    box: the indices of `local` in the mini-batch. Elements with indices outside the mini-batch are
        zeros, or come from its other end.
    own: the indices of the rank's block, without the halo, in the mini-batch.
    shape: the global shape of the mini-batch.

    Examples
    --------
    >>> grid = dc.ProcessGrid(width=2)
    >>> row = np.arange(8.0).reshape(1, 1, 8)
    >>> data = dc.data.Dataset(row, grid, halo=1, halo_border="periodic")
    >>> block = data.batch([0])
    >>> grid.all_gather_object(block.local[0, 0].tolist())
    [[7.0, 0.0, 1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0, 7.0, 0.0]]
    >>> own = block.local[block.inner]  # without the halo
    >>> tuple(own.shape)
    (1, 1, 4)
    """

    local: Tensor
    box: Box
    own: Box
    shape: tuple[int, ...]

    @property
    def inner(self) -> tuple[slice, ...]:
        """Return the slices of `local` that hold the rank's block, without the halo."""
        return self.own.slices_within(self.box)


@dataclass(frozen=True)
class Wanted:
    """The elements that a rank needs of one field of a mini-batch.

    `box` has their indices in the mini-batch, halos included. `samples` are the sample numbers in
    `box`, and `views` has for each sample the positions of the stored elements to read.
    """

    box: Box
    samples: tuple[int, ...]
    views: tuple[View, ...]


@dataclass
class Values:
    """The elements of one mini-batch that this rank needs, in the types of the sources.

    Attributes
    ----------
    samples: the sample numbers of the mini-batch, on all ranks.
    wanted: for each field, the elements that this rank needs.
    epoch: the epoch, on which random changes of samples depend.
    arrays: for each field, an array of shape `wanted.box.shape` that holds the elements.
    """

    samples: list[int]
    epoch: int
    wanted: list[Wanted]
    arrays: list[NDArray[Any]]


@dataclass(frozen=True)
class FieldOnGrid:
    """One field of the samples, with its source, its partitioning, and its conversions.

    Attributes
    ----------
    number: the position of the field among the fields.
    name: the name of the field in the program.
    cuts: for each dimension of a mini-batch, the grid axes over which the dimension is partitioned.
    dtype: the type of the tensors.
    shape: the shape of a sample after augmentation.
    space: the number of trailing spatial dimensions shared with the first field; 0 for none.
    halo: the width of the halo in each dimension of a sample; empty for DistTensors.
    border: the kind of halo beyond the sample; see `Dataset`.
    augmentations: all random changes of samples.
    changes: the changes of this field's values, each with its index in `augmentations`.
    """

    number: int
    name: Field
    source: Source
    cuts: Cuts
    dtype: torch.dtype
    transform: Transform | None
    shape: tuple[int, ...]
    space: int
    halo: tuple[int, ...]
    border: str
    augmentations: Augmentations
    changes: tuple[tuple[int, Change], ...]

    @property
    def moves(self) -> bool:
        """Return whether a rank may need elements outside its block of the stored sample."""
        moved = any(isinstance(one, Move) for one in self.augmentations.chosen)
        return bool(self.halo or (self.space and moved))

    def box(self, samples: int, topology: Topology, rank: int) -> Box:
        """Return the indices of the block of `rank`, without halo, in a mini-batch of `samples`."""
        return rank_box((samples, *self.shape), self.cuts, topology, rank)

    def stored_box(self, topology: Topology, rank: int) -> Box:
        """Return the indices of the block of `rank` in a stored sample, without halo."""
        return rank_box(self.source.shape, self.cuts[1:], topology, rank)

    def wanted(self, samples: Sequence[int], epoch: int, topology: Topology, rank: int) -> Wanted:
        """Return the elements of a mini-batch that `rank` needs. No communication.

        `samples` are the sample numbers of the mini-batch, on all ranks.
        """
        own = self.box(len(samples), topology, rank)
        box, in_sample = own, Box(own.start[1:], own.stop[1:])
        if self.halo and in_sample.size:
            bounds = [
                (a - h, b + h) if self.border != "clip" else (max(a - h, 0), min(b + h, n))
                for a, b, h, n in zip(
                    in_sample.start, in_sample.stop, self.halo, self.shape, strict=True
                )
            ]
            box = Box(
                (own.start[0], *(a for a, _ in bounds)), (own.stop[0], *(b for _, b in bounds))
            )
        mine = tuple(int(i) for i in samples[own.slices[0]]) if own.size else ()
        if not self.moves:
            view = View.of(self.source.shape).within(in_sample)
            return Wanted(box, mine, (view,) * len(mine))
        views = tuple(
            self.augmentations.view(self.source.shape, self.space, sample, epoch).within(
                in_sample, self.halo, self.border
            )
            for sample in mine
        )
        return Wanted(box, mine, views)

    def empty(self, wanted: Wanted) -> NDArray[Any]:
        """Return an array to read `wanted` into, zeroed if elements lie outside the samples."""
        if any(view.filled for view in wanted.views):
            return np.zeros(wanted.box.shape, self.source.dtype)
        return np.empty(wanted.box.shape, self.source.dtype)

    def converted(self, values: NDArray[Any], wanted: Wanted, epoch: int) -> Tensor:
        """Convert `values`, as read from the source, to `dtype`; transform and augment the tensor.

        Raises ValueError for values that `dtype` cannot hold, and for a transform that changes the
        shape.
        """
        if not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype == torch.bool):
            check_range(values, str(self.dtype).removeprefix("torch."), self.source.name)
        if values.dtype.name in _WIDER:
            check_range(values, np.int64, self.source.name)
            values = values.astype(np.int64)
        stored = torch.from_numpy(values)
        block = stored.to(self.dtype)
        rounds = stored.is_floating_point() and not (
            block.is_floating_point() or block.is_complex()
        )
        if (rounds or block.dtype == torch.bool) and not torch.equal(block, stored):
            raise ValueError(
                f"{self.source.name} has values of {values.dtype} that {self.dtype} cannot hold; "
                "choose a floating-point type, and round or compare in the program"
            )
        if self.transform is not None:
            shape, block = block.shape, self.transform(block, wanted.box)
            if block.shape != shape:
                raise ValueError(
                    f"the transform of {self.source.name} returns {tuple(block.shape)} for a block "
                    f"of {tuple(shape)}; expected the same shape"
                )
        in_sample = Box(wanted.box.start[1:], wanted.box.stop[1:])
        for place, (sample, view) in enumerate(zip(wanted.samples, wanted.views, strict=True)):
            if self.changes:
                block[place] = self.augmentations.change(
                    self.changes, block[place], in_sample, self.shape, (self.number, sample, epoch)
                )
            if view.filled:
                for d, along in enumerate(view.positions):
                    outside = torch.from_numpy(np.flatnonzero(along < 0))
                    block[place].index_fill_(d, outside, 0)
        return block

    def check_finite(self, finite: Any, wanted: Wanted, where: str = "") -> None:
        """Raise `DataError`, with the sample numbers, if an element of `finite` is False.

        `finite` is a boolean array or tensor over the elements of `wanted`; `where` ends the
        message.
        """
        if not finite.all():
            bad = [i for i, one in zip(wanted.samples, finite, strict=True) if not one.all()]
            raise DataError(
                f"{self.source.name} holds values that are not finite in samples {bad}{where}"
            )


def prepare(
    fields: Sequence[FieldOnGrid], samples: Sequence[int], epoch: int, grid: Grid
) -> Values:
    """Find the elements of a mini-batch that this rank needs, and allocate arrays for them.

    `samples` are the sample numbers of the mini-batch. No communication.
    """
    wanted = [own.wanted(samples, epoch, grid.topology, grid.rank) for own in fields]
    arrays = [own.empty(share) for own, share in zip(fields, wanted, strict=True)]
    return Values(list(map(int, samples)), epoch, wanted, arrays)


def tensor_type(own: Source, dtype: Any, name: Field) -> torch.dtype:
    """Return the torch type of the tensors of field `name`.

    `own` is the source of the field, and `dtype` the argument of `Dataset`. Raises TypeError for an
    argument that is not a torch type, or a real type for complex values.
    """
    chosen = dtype.get(name) if isinstance(dtype, Mapping) else dtype
    if chosen is not None and (own.dtype.kind == "f" or isinstance(dtype, Mapping)):
        if not isinstance(chosen, torch.dtype):
            raise TypeError(f"dtype={chosen!r} of {own.name} is not a torch.dtype")
        if own.dtype.kind == "c" and not chosen.is_complex:
            raise TypeError(
                f"dtype={chosen} would discard the imaginary part of {own.name}, which has type "
                f"{own.dtype}; choose a complex type, or take the real part in a Function"
            )
        return chosen
    if own.dtype.kind == "f":
        return torch.get_default_dtype()
    if own.dtype.name in _WIDER:
        return _WIDER[own.dtype.name]
    return torch.from_numpy(np.empty(0, own.dtype)).dtype


def batch_cuts(
    shapes: Mapping[Name, tuple[int, ...]], layout: Layout | Mapping[Any, Layout] | None, grid: Grid
) -> dict[Name, Cuts]:
    """Return for each field of a mini-batch the grid axes that partition each dimension.

    The first dimension is that of the samples. A field without a layout is partitioned like the
    first field if both have equally many dimensions, or if the shape is the first field's without
    channels; other fields are partitioned over samples only.

    Parameters
    ----------
    shapes: the shape of one sample of each field, without the dimension of samples.
    layout: the layout of the first field, or a dictionary of layouts by field; by default every
        dimension is partitioned over the axis of its own name.

    Raises ValueError for names that are no fields, and dimensions that a field does not have.
    """
    by_name = layout if isinstance(layout, Mapping) else {}
    check_names(shapes, layout=layout)
    names = list(shapes)
    chosen = by_name.get(names[0]) if isinstance(layout, Mapping) else layout
    first_shape = shapes[names[0]]
    first = cuts_of_layout(chosen, grid, 1 + len(first_shape))
    cuts = {}
    for name, shape in shapes.items():
        ndim = 1 + len(shape)
        if name in by_name:
            cuts[name] = cuts_of_layout(by_name[name], grid, ndim)
        elif ndim == len(first):
            cuts[name] = first
        elif len(first) > 2 and shape == first_shape[1:]:
            cuts[name] = (first[0], *first[2:])
        else:
            cuts[name] = (first[0], *[()] * (ndim - 1))
    return cuts


def check_names(names: Mapping[Any, object], **choices: Any) -> None:
    """Raise `ValueError` if a dictionary among the arguments `choices` has a key not in `names`."""
    for argument, choice in choices.items():
        unknown = set(choice) - set(names) if isinstance(choice, Mapping) else set()
        if unknown:
            raise ValueError(
                f"{argument}= names {sorted(map(str, unknown))}; choose from the fields "
                f"{list(names)}"
            )


def given_shapes(
    sources: Mapping[Field, Source], augmentations: Augmentations
) -> dict[Field, tuple[tuple[int, ...], int]]:
    """Return each field's sample shape after augmentation, and its number of spatial dimensions.

    Spatial dimensions are the trailing dimensions that have the first field's spatial extents; the
    number is 0 for a field without them. `sources` are the stored fields. Raises ValueError if a
    move of `augmentations` does not fit the samples.
    """
    space = next(iter(sources.values())).shape[1:]
    resulting = augmentations.resulting(space)
    found = {}
    for name, own in sources.items():
        shares = bool(space) and own.shape[-len(space) :] == space
        lead = own.shape[: len(own.shape) - len(space)]
        found[name] = ((*lead, *resulting), len(space)) if shares else (own.shape, 0)
    return found


def halo_of(
    name: Field, source: Source, shape: tuple[int, ...], space: int, halo: Any, border: str
) -> tuple[int, ...]:
    """Return the width of the halo in each dimension of a sample of field `name`; () for no halo.

    `shape` is the shape of a sample, whose last `space` dimensions are spatial. `halo` and `border`
    are the arguments `halo` and `halo_border` of `Dataset`. Raises ValueError for a halo of a field
    that does not share the first field's spatial dimensions, a wrong number of widths, an unknown
    border, and a periodic halo larger than a sample.
    """
    asked = halo if space else None
    if isinstance(halo, Mapping):
        asked = halo.get(name)
    if asked is None or asked == 0:
        return ()
    extents = shape[len(shape) - space :]
    sides = (asked,) * space if isinstance(asked, int) else tuple(asked)
    if not space or len(sides) != space or min(sides) < 0:
        raise ValueError(
            f"halo={asked!r} of {source.name} is invalid; expected one extent of 0 or more for "
            f"all {space} spatial dimensions, or one for each"
        )
    if border not in BORDERS:
        raise ValueError(f"halo_border={border!r}; choose one of {', '.join(BORDERS)}")
    if border == "periodic" and any(h > n for h, n in zip(sides, extents, strict=True)):
        raise ValueError(
            f"halo={asked!r} is larger than the samples, {extents}, which a periodic halo cannot "
            "be; choose at most the extents of the samples"
        )
    return (*(0,) * (len(shape) - space), *sides)
