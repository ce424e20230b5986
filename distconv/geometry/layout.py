"""Partitioning of tensors: canonical blocks, boxes of indices, and layouts.

Index arithmetic only. A dimension of size n over p parts gives the first n mod p parts one element
more, so the box that a rank holds follows from (shape, layout, grid) and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from math import prod
from operator import mul
from typing import Protocol, TypeAlias, TypeVar

from distconv.geometry.topology import AXES, Topology

Cuts = tuple[tuple[str, ...], ...]
"""For each dimension of a tensor, the grid axes that partition it (first slowest); () for none."""


def block(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of part `index` of `size` elements partitioned into `parts` blocks."""
    quotient, remainder = divmod(size, parts)
    start = index * quotient + min(index, remainder)
    return start, start + quotient + (index < remainder)


def distinct_parts(first: int, second: int, parts: int, steps: tuple[int, int]) -> Iterator[int]:
    """Yield the number of one part of each kind; a check of all parts need not visit more parts.

    Two dimensions, of `first` and `second` elements, are each partitioned into `parts` parts. Parts
    of a kind have equal lengths in each dimension, and an equal drift: steps[0] * start in the
    first dimension minus steps[1] * start in the second. If the drift changes from part to part,
    every part is yielded.
    """
    edges = {0, 1, first % parts, second % parts, parts - 1, parts}
    for start, stop in pairwise(sorted(edge for edge in edges if edge <= parts)):
        (a, b), (c, d) = block(first, parts, start), block(second, parts, start)
        drifts = steps[0] * (b - a) != steps[1] * (d - c)
        yield from range(start, stop) if drifts else (start,)


def owning_part(size: int, parts: int, position: int) -> int:
    """Return the number of the part with `position`, of `size` elements in `parts` blocks."""
    quotient, remainder = divmod(size, parts)
    longer = remainder * (quotient + 1)
    if position < longer:
        return position // (quotient + 1)
    return remainder + (position - longer) // quotient


@dataclass(frozen=True)
class Box:
    """A box of global indices, `start` to `stop` (exclusive) along every dimension.

    Examples
    --------
    >>> box = dc.Box((0, 4), (2, 8))
    >>> box.shape, box.size
    ((2, 4), 8)
    >>> np.arange(16).reshape(2, 8)[box.slices].tolist()
    [[4, 5, 6, 7], [12, 13, 14, 15]]
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent along every dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from an array of the global shape."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return the box of the elements in both boxes, None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def slices_within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index that selects this box from an array of the elements of box `outer`."""
        bounds = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(a - first, b - first) for a, b, first in bounds)


def dimension_names(ndim: int) -> tuple[str, ...]:
    """Return the names of dimensions by position.

    Three dimensions are (sample, channel, width), four (sample, channel, height, width), five
    (sample, channel, depth, height, width). Beyond five, the dimensions between channel and space
    are `dim2`, `dim3`, ...
    """
    if ndim <= 2:
        return ("sample", "channel")[:ndim]
    spatial = ("depth", "height", "width")[max(0, 5 - ndim) :]
    between = (f"dim{i}" for i in range(2, ndim - 3))
    return ("sample", "channel", *between, *spatial)


class _HasCuts(Protocol):
    """A partitioned tensor: the interface of DistTensor for this module, which imports no torch."""

    cuts: Cuts


class Layout:
    """The grid axis, or tuple of axes (first slowest), that partitions each tensor dimension.

    `Layout(sample="sample", height=("height", "width"))` partitions samples over the grid axis
    "sample" and the rows over "height" and "width" together. A dimension that is not named, or is
    over axes of one rank, is not partitioned. Dimensions are named by position (see
    `dimension_names`); for weights, (filter, channel, *kernel), `filter` names dimension 0, and is
    equal to `sample`. Immutable and hashable.

    Raises
    ------
    ValueError
        For an unknown dimension or grid axis, or a grid axis that partitions two dimensions.

    Examples
    --------
    >>> dc.Layout(sample="sample", height=("depth", "height"))
    Layout(sample='sample', height=('depth', 'height'))
    >>> dc.Layout()  # whole on every rank
    Layout()
    """

    __slots__ = ("_by_dimension", "_cut")
    _by_dimension: frozenset[tuple[str, tuple[str, ...]]]
    """Pairs of dimension and axes, in which `sample` also names `filter`, to compare layouts."""
    _cut: tuple[tuple[str, tuple[str, ...]], ...]
    """Pairs of dimension and axes, sorted, with the names that the caller used."""

    def __init__(self, **dimensions: str | tuple[str, ...] | list[str] | None) -> None:
        cut = {}
        used: dict[str, str] = {}
        for name, axes in dimensions.items():
            if name not in AXES and not re.fullmatch(r"dim\d+", name):
                raise ValueError(
                    f"Layout: {name!r} is not a tensor dimension; choose from {', '.join(AXES)}, "
                    "or dim2, dim3, ... beyond five dimensions"
                )
            if axes is None:
                continue
            axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
            for axis in axes:
                if axis not in AXES:
                    raise ValueError(
                        f"Layout: {name}={axis!r} is not a grid axis; choose from {', '.join(AXES)}"
                    )
                if axis in used:
                    raise ValueError(
                        f"Layout: grid axis {axis!r} partitions both {used[axis]} and {name}; use "
                        "an axis for one dimension only"
                    )
                used[axis] = name
            if axes:
                cut[name] = axes
        if "sample" in cut and "filter" in cut:
            raise ValueError("Layout: sample and filter both name dimension 0; give one of them")
        object.__setattr__(self, "_cut", tuple(sorted(cut.items())))
        if "filter" in cut:
            cut["sample"] = cut.pop("filter")
        object.__setattr__(self, "_by_dimension", frozenset(cut.items()))

    @classmethod
    def of(cls, cuts: Cuts, *, weight: bool = False) -> Layout:
        """Return the layout of a tensor whose dimension d is partitioned over grid axes `cuts[d]`.

        With `weight` the first dimension is called `filter`, not `sample`.

        Examples
        --------
        >>> dc.Layout.of(((), (), ("depth", "height"), ()))
        Layout(height=('depth', 'height'))
        """
        names = dimension_names(len(cuts))
        if weight:
            names = tuple("filter" if name == "sample" else name for name in names)
        return cls(**dict(zip(names, cuts, strict=True)))

    @classmethod
    def like(cls, x: _HasCuts, without: str | Iterable[str] = ()) -> Layout:
        """Return the layout of a tensor partitioned as `x`, which lacks the dimensions `without`.

        Labels (sample, depth, height, width) of a volume have the layout `Layout.like(volume,
        without="channel")`. By position alone their dimensions would be named (sample, channel,
        height, width). No communication.

        Parameters
        ----------
        x: a DistTensor.
        without: names of dimensions of `x` that the other tensor does not have.

        Raises
        ------
        ValueError
            If `x` has no dimension of such a name.
        TypeError
            If `x` is no DistTensor.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> x = dc.distribute_tensor(torch.ones(2, 3, 8, 8), grid)
        >>> labels = dc.Layout.like(x, without="channel")
        >>> y = dc.distribute_tensor(torch.zeros(2, 8, 8), grid, labels)
        >>> tuple(y.to_local().shape)
        (2, 4, 8)
        """
        if not hasattr(x, "cuts"):
            raise TypeError(f"Layout.like: expected a DistTensor, not {type(x).__name__}")
        names = dimension_names(len(x.cuts))
        left_out = {without} if isinstance(without, str) else set(without)
        unknown = left_out.difference(names)
        if unknown:
            raise ValueError(
                f"Layout.like: without={sorted(unknown)} names no dimension of the tensor; choose "
                f"from {', '.join(names)}"
            )
        return cls.of(
            tuple(axes for n, axes in zip(names, x.cuts, strict=True) if n not in left_out)
        )

    def cuts(self, ndim: int) -> Cuts:
        """Return the grid axes that partition each dimension of a tensor of `ndim` dimensions.

        Raises `ValueError` if the layout partitions a dimension that such a tensor does not have.

        Examples
        --------
        >>> dc.Layout(height=("depth", "height")).cuts(4)
        ((), (), ('depth', 'height'), ())
        """
        names = dimension_names(ndim)
        position = {name: i for i, name in enumerate(names)}
        if ndim:
            position["filter"] = 0
        cuts: list[tuple[str, ...]] = [()] * ndim
        for name, axes in self._cut:
            if name not in position:
                raise ValueError(
                    f"{self} partitions {name!r}, but a tensor of {ndim} dimensions has "
                    f"({', '.join(names)})"
                )
            cuts[position[name]] = axes
        return tuple(cuts)

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the grid axes that partition the dimension of this name.

        Examples
        --------
        >>> dc.Layout(height=("depth", "height")).axes("height")
        ('depth', 'height')
        """
        return dict(self._cut).get(name, ())

    @property
    def cutting_axes(self) -> tuple[str, ...]:
        """Return all grid axes that partition some dimension.

        Examples
        --------
        >>> dc.Layout(sample="sample", height="height").cutting_axes
        ('height', 'sample')
        """
        return cutting_axes(axes for _, axes in self._cut)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Layout is immutable; create a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Layout is immutable; create a new one")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._by_dimension == other._by_dimension

    def __hash__(self) -> int:
        return hash(self._by_dimension)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Layout, **dict(self._cut)), ()

    def __repr__(self) -> str:
        names = sorted(self._cut, key=lambda item: (*AXES, item[0]).index(item[0]))
        inner = (f"{name}={axes[0] if len(axes) == 1 else axes!r}" for name, axes in names)
        return f"Layout({', '.join(inner)})"


def default_cuts(ndim: int, topology: Topology) -> Cuts:
    """Return the cuts of each dimension over the axis of its own name, if it has several ranks."""
    return tuple(
        (name,) if name in AXES and topology.extent(name) > 1 else ()
        for name in dimension_names(ndim)
    )


def effective_cuts(cuts: Cuts, topology: Topology) -> Cuts:
    """Return `cuts` without the axes of a single rank, to compare partitionings."""
    return tuple(tuple(a for a in axes if topology.extent(a) > 1) for axes in cuts)


def cutting_axes(cuts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all grid axes that partition some dimension.

    Examples
    --------
    >>> from distconv import layout
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 6, 4), dc.ProcessGrid(height=2))
    >>> x.cuts
    ((), (), ('height',), ())
    >>> layout.cutting_axes(x.cuts)
    ('height',)
    """
    return tuple(chain.from_iterable(cuts))


@lru_cache(maxsize=4096)
def replicating_axes(cuts: Cuts, topology: Topology) -> tuple[str, ...]:
    """Return the grid axes with several ranks along which a tensor with `cuts` is replicated."""
    used = cutting_axes(cuts)
    return tuple(a for a in AXES if a not in used and topology.extent(a) > 1)


@lru_cache(maxsize=65536)
def rank_box(shape: tuple[int, ...], cuts: Cuts, topology: Topology, rank: int) -> Box:
    """Return the box that `rank` holds of a tensor of global `shape`, partitioned by `cuts`."""
    coordinates = topology.coordinates(rank)
    bounds = [
        block(n, topology.parts(axes), topology.part(coordinates, axes)) if axes else (0, n)
        for n, axes in zip(shape, cuts, strict=True)
    ]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


Shape: TypeAlias = tuple[int, ...]


def operand_cuts(operand: Shape, shape: Shape, cuts: Cuts) -> Cuts:
    """Return the cuts of an operand that is broadcast to a result of `shape` with `cuts`.

    `operand` is the shape of the operand. A dimension of the operand is partitioned as in the
    result if the sizes agree, else it is not partitioned.
    """
    lead = len(shape) - len(operand)
    return tuple(
        axes if n == m else ()
        for n, m, axes in zip(operand, shape[lead:], cuts[lead:], strict=True)
    )


@lru_cache(maxsize=4096)
def cuts_of_broadcast(operands: tuple[tuple[Shape, Cuts], ...], shape: Shape) -> Cuts:
    """Return the cuts of a result of `shape` to which operands are broadcast.

    Each dimension is partitioned as in the largest operand that partitions the dimension and is not
    broadcast along it, over axes that no other dimension uses. Operands that do not partition the
    dimension are sliced, without communication.

    Parameters
    ----------
    operands: global shape and cuts of each operand.
    """
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    for sizes, own in sorted(operands, key=lambda x: -prod(x[0])):
        lead = len(shape) - len(sizes)
        for d, axes in enumerate(own, lead):
            if not cuts[d] and sizes[d - lead] == shape[d]:
                used = {a for cut in cuts for a in cut}
                cuts[d] = axes if not used.intersection(axes) else ()
    return tuple(cuts)


Axes = tuple[str, ...]


T = TypeVar("T")


def replaced_at(values: tuple[T, ...], dimension: int, value: T) -> tuple[T, ...]:
    """Return `values` with `value` at index `dimension`."""
    return (*values[:dimension], value, *values[dimension + 1 :])


def idle_axes(used: Axes, topology: Topology) -> Axes:
    """Return the `channel` and `filter` axes that have several ranks and are not in `used`."""
    return tuple(a for a in ("channel", "filter") if a not in used and topology.extent(a) > 1)


# Dimensions that a reshape splits and merges, as products of factors common to both shapes.
#
# Index arithmetic only.


def groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """Split two shapes into the shortest runs of dimensions with equal numbers of elements.

    Return pairs of a run of dimensions of `before` and the corresponding run of `after`, in order.
    """
    if 0 in before:
        return [(range(len(before)), range(len(after)))]
    found = []
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0 = i, j
        n = m = 1
        if i < len(before):
            n, i = before[i], i + 1
        if j < len(after):
            m, j = after[j], j + 1
        while n != m:
            if n < m:
                n, i = n * before[i], i + 1
            else:
                m, j = m * after[j], j + 1
        found.append((range(i0, i), range(j0, j)))
    return found


def common_factors(splits: Sequence[Sequence[int]]) -> Shape | None:
    """Return the fewest factors from which each of `splits` follows by multiplying neighbours.

    Each split is a list of sizes with the same product. Returns None for a size of 0, and if there
    are no such factors: (2, 3) and (3, 2) have none, as 3 is not a multiple of 2.
    """
    if any(0 in row for row in splits):
        return None
    factors: list[int] = []
    last = 1
    for bound in sorted({bound for row in splits for bound in accumulate(row, mul)}):
        if bound % last:
            return None
        if bound > last:
            factors.append(bound // last)
            last = bound
    return tuple(factors) or (1,)


def runs_of_factors(factors: Sequence[int], sizes: Sequence[int]) -> tuple[Shape, ...]:
    """Return, for each of `sizes`, the consecutive `factors` whose product it is; (1,) for size 1.

    A factor 1 is allowed only where a size is 1.
    """
    runs, i = [], 0
    for n in sizes:
        start, product = i, 1
        while product < n:
            product, i = product * factors[i], i + 1
        i += n == 1 and i < len(factors) and factors[i] == 1
        runs.append(tuple(factors[start:i]) or (1,))
    return tuple(runs)


def factors_of_reshape(before: Shape, after: Shape) -> tuple[Shape, ...] | None:
    """Return the factors of each dimension of `after` in a reshape of the shape `before`.

    Each dimension of `before` is a product of consecutive factors, too. Returns None if there are
    no factors that fit both shapes.
    """
    found: list[Shape] = []
    for old, new in groups(before, after):
        factors = common_factors([before[old.start : old.stop], after[new.start : new.stop]])
        if factors is None:
            return None
        found += runs_of_factors(factors, after[new.start : new.stop])
    return tuple(found)
