"""Random changes of samples (flips, crops, noise) whose result is the same on any grid.

The random numbers of a sample depend on a seed, the epoch and the number of the sample only. Flips
and crops need no messages: each rank reads the stored elements that its block will hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from math import inf, isfinite
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from distconv.data.views import View
from distconv.geometry.layout import Box, dimension_names
from distconv.ops.random import normal_at

Generator: TypeAlias = np.random.Generator

SPACE = ("depth", "height", "width")


class Move(ABC):
    """Base class of random moves of elements (flips, rotations, crops, shifts) of a sample.

    All fields with the spatial extents of the first field are moved alike.

    Examples
    --------
    >>> class Mirror(dc.data.Move):
    ...     def resulting(self, space):
    ...         return space
    ...     def view(self, view, space, generator):
    ...         return view.flipped(-1)  # along the last dimension
    >>> grid = dc.ProcessGrid(width=2)
    >>> data = dc.data.Dataset(np.arange(6.0).reshape(1, 1, 6), grid, augment=[Mirror()])
    >>> data.batch([0]).full_tensor()
    tensor([[[5., 4., 3., 2., 1., 0.]]])
    """

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial extents of a sample after the move, given the extents `space` before.

        Raises ValueError if the move cannot be applied to samples of these extents, or if its
        parameters are invalid.
        """
        return space

    @abstractmethod
    def view(self, view: View, space: int, generator: Generator) -> View:
        """Return `view`, a view of a stored sample, with the move applied to its elements.

        Parameters
        ----------
        view: maps each element to its position in the stored sample.
        space: the number of spatial dimensions, which are the last dimensions.
        generator: draws the random numbers of this sample, the same for all fields and ranks.
        """


class Change(ABC):
    """Base class of random changes of the values of a sample, such as noise.

    Attributes
    ----------
    fields: the names of the fields to change; by default, the first field alone.

    Examples
    --------
    >>> class Brighten(dc.data.Change):
    ...     fields = ()  # the first field
    ...     def apply(self, block, box, shape, generator):
    ...         return block + generator.uniform(0, 0.5)
    >>> grid = dc.ProcessGrid(width=2)
    >>> data = dc.data.Dataset(np.ones((1, 1, 4), "float32"), grid, augment=[Brighten()])
    >>> data.batch([0]).full_tensor()
    tensor([[[1.4715, 1.4715, 1.4715, 1.4715]]])
    """

    fields: Sequence[str | int | None] = ()

    @abstractmethod
    def apply(
        self, block: Tensor, box: Box, shape: tuple[int, ...], generator: Generator
    ) -> Tensor:
        """Return this rank's block of a sample with its values changed.

        Parameters
        ----------
        block: floating-point numbers, without a dimension for samples.
        box: the indices of the block in the sample; with a halo they may lie outside the sample.
        shape: the shape of the sample.
        generator: draws the random numbers of this sample and field, the same on all ranks.
        """


@dataclass(frozen=True)
class Flip(Move):
    """Flip samples along some dimensions, each with the same probability and independently.

    Parameters
    ----------
    dimensions: some of "depth", "height" and "width"; all spatial dimensions when not given.
    probability: the probability of a flip along each dimension.

    Examples
    --------
    >>> grid = dc.ProcessGrid(width=2)
    >>> flip = dc.data.Flip(("width",), probability=1.0)
    >>> data = dc.data.Dataset(np.arange(6.0).reshape(1, 1, 6), grid, augment=[flip])
    >>> data.batch([0]).full_tensor()
    tensor([[[5., 4., 3., 2., 1., 0.]]])
    """

    dimensions: tuple[str, ...] = ()
    probability: float = 0.5

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        _positions(self.dimensions, len(space), "Flip")
        if not 0 <= self.probability <= 1:
            raise ValueError(
                f"Flip: probability={self.probability} is out of range; choose a number from 0 to 1"
            )
        return space

    def view(self, view: View, space: int, generator: Generator) -> View:
        for d in _positions(self.dimensions, space, "Flip"):
            if generator.random() < self.probability:
                view = view.flipped(d)
        return view


@dataclass(frozen=True)
class Rotate90(Move):
    """Rotate samples in a plane by 0, 90, 180 or 270 degrees, with equal probability.

    Parameters
    ----------
    plane: two dimensions of equal extents.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> planes = np.arange(4.0).reshape(1, 1, 2, 2)
    >>> data = dc.data.Dataset(planes, grid, augment=[dc.data.Rotate90(("height", "width"))])
    >>> [data.batch([0], epoch).full_tensor()[0, 0].tolist() for epoch in (0, 1)]
    [[[2.0, 0.0], [3.0, 1.0]], [[3.0, 2.0], [1.0, 0.0]]]
    """

    plane: tuple[str, str] = ("height", "width")

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(self.plane)) != 2:
            raise ValueError(
                f"Rotate90: plane={self.plane} is invalid; expected two different spatial "
                "dimensions"
            )
        extents = tuple(space[d] for d in _positions(self.plane, len(space), "Rotate90"))
        if extents[0] != extents[1]:
            raise ValueError(
                f"Rotate90: the plane {self.plane} has the unequal extents {extents}, which a "
                "rotation would exchange; put a Crop to equal extents before it"
            )
        return space

    def view(self, view: View, space: int, generator: Generator) -> View:
        """Return the view rotated by a random number of quarter turns, as by `numpy.rot90`."""
        d, e = _positions(self.plane, space, "Rotate90")
        quarters = int(generator.integers(4))
        if quarters % 2:
            view = view.swapped(d, e)
        # Rotate from the first dimension towards the second, as numpy does.
        if quarters in (1, 2):
            view = view.flipped(d)
        if quarters in (2, 3):
            view = view.flipped(e)
        return view


@dataclass(frozen=True)
class Crop(Move):
    """Crop each sample to given spatial extents.

    Parameters
    ----------
    extents: the extent along each spatial dimension after cropping.
    where: "random" for a random position in each sample, or "center".

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> volumes = np.zeros((1, 1, 64, 64), "float32")
    >>> data = dc.data.Dataset(volumes, grid, augment=[dc.data.Crop((32, 48))])
    >>> tuple(data.batch([0]).shape)
    (1, 1, 32, 48)
    """

    extents: tuple[int, ...]
    where: str = "random"

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        if self.where not in ("random", "center"):
            raise ValueError(f"Crop: where={self.where!r} is neither 'random' nor 'center'")
        if len(self.extents) != len(space) or not all(
            0 < part <= whole for part, whole in zip(self.extents, space, strict=False)
        ):
            raise ValueError(
                f"Crop: extents={self.extents} does not fit samples of {space}; expected "
                f"{len(space)} extents, each from 1 to that of the samples"
            )
        return tuple(self.extents)

    def view(self, view: View, space: int, generator: Generator) -> View:
        lead = len(view.order) - space
        for d, part in enumerate(self.extents, lead):
            room = view.shape[d] - part
            start = int(generator.integers(room + 1)) if self.where == "random" else room // 2
            view = view.cropped(d, start, start + part)
        return view


@dataclass(frozen=True)
class Translate(Move):
    """Shift samples by a random number of elements along each spatial dimension.

    Parameters
    ----------
    most: the largest shift in either direction, in elements; one number, or one per dimension.
    border: "periodic" to fill the gap with the elements shifted beyond the other end, or "zeros" to
        fill the gap with zeros after `transform`.

    Examples
    --------
    >>> grid = dc.ProcessGrid(width=2)
    >>> shift = dc.data.Translate(2, border="periodic")
    >>> data = dc.data.Dataset(np.arange(6.0).reshape(1, 1, 6), grid, augment=[shift])
    >>> [data.batch([0], epoch).full_tensor()[0, 0].tolist() for epoch in (0, 1)]
    [[4.0, 5.0, 0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    """

    most: int | tuple[int, ...]
    border: str = "zeros"

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        if self.border not in ("periodic", "zeros"):
            raise ValueError(f"Translate: border={self.border!r} is not 'periodic' or 'zeros'")
        most = self._most(len(space))
        if len(most) != len(space) or min(most) < 0:
            raise ValueError(
                f"Translate: most={self.most} does not fit samples of {space}; expected one "
                "distance of 0 or more for all dimensions, or one for each of them"
            )
        return space

    def view(self, view: View, space: int, generator: Generator) -> View:
        lead = len(view.order) - space
        for d, most in enumerate(self._most(space), lead):
            by = int(generator.integers(-most, most, endpoint=True))
            view = view.moved(d, by, self.border == "periodic")
        return view

    def _most(self, space: int) -> tuple[int, ...]:
        return (self.most,) * space if isinstance(self.most, int) else tuple(self.most)


@dataclass(frozen=True)
class ChannelJitter(Change):
    """Multiply each channel of a sample by a random factor 1 + a, and add a random number b.

    Parameters
    ----------
    scale, offset: the largest magnitudes of a and b, which are drawn uniformly for each channel.
    fields: the names of fields with channels first; the first field when not given.

    Examples
    --------
    >>> grid = dc.ProcessGrid(width=2)
    >>> jitter = dc.data.ChannelJitter(scale=0.1, offset=0.5)
    >>> data = dc.data.Dataset(np.ones((1, 2, 4), "float32"), grid, augment=[jitter])
    >>> data.batch([0]).full_tensor()
    tensor([[[1.3109, 1.3109, 1.3109, 1.3109],
             [0.5889, 0.5889, 0.5889, 0.5889]]])
    """

    scale: float = 0.1
    offset: float = 0.0
    fields: tuple[str | int | None, ...] = ()

    def apply(
        self, block: Tensor, box: Box, shape: tuple[int, ...], generator: Generator
    ) -> Tensor:
        drawn = generator.uniform(-1, 1, (2, shape[0]))[:, box.slices[0]]
        scale, offset = (
            torch.from_numpy(drawn).to(block.dtype).reshape(2, -1, *[1] * (block.dim() - 1))
        )
        return block * (1 + self.scale * scale) + self.offset * offset


@dataclass(frozen=True)
class Noise(Change):
    """Add independent normal random numbers to all elements.

    Parameters
    ----------
    deviation: the standard deviation.
    fields: the names of the fields to change; the first field when not given.

    Examples
    --------
    >>> grid = dc.ProcessGrid(width=2)
    >>> data = dc.data.Dataset(np.zeros((1, 1, 4), "float32"), grid, augment=[dc.data.Noise(0.1)])
    >>> data.batch([0]).full_tensor()  # the same on any grid
    tensor([[[-0.0209,  0.1375,  0.0232, -0.1609]]])
    """

    deviation: float
    fields: tuple[str | int | None, ...] = ()

    def apply(
        self, block: Tensor, box: Box, shape: tuple[int, ...], generator: Generator
    ) -> Tensor:
        key = torch.tensor(int(generator.integers(-(2**63), 2**63)))
        numbers = torch.zeros((), dtype=torch.int64)
        for start, stop, n in zip(box.start, box.stop, shape, strict=True):
            # Elements of a periodic halo get the same noise as their originals at the other end.
            numbers = numbers.unsqueeze(-1) * n + torch.arange(start, stop).remainder(n)
        return block + self.deviation * normal_at(numbers, key).to(block.dtype)


@dataclass(frozen=True)
class Augmentations:
    """All random changes that a `Dataset` makes, and the seed of their random numbers.

    Attributes
    ----------
    chosen: the user's moves, and changes of values. All moves are applied first, then all changes,
        each in this order.
    seed: the seed of the random numbers.
    """

    chosen: tuple[Move | Change, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        """Return a description of the moves and changes for ranks to compare."""
        # The default __repr__ contains an address, which differs between ranks.
        words = [str(x) if is_dataclass(x) else type(x).__qualname__ for x in self.chosen]
        return f"{', '.join(words)} from seed {self.seed}"

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial extents of a sample after all moves, given the extents `space` before.

        Raises ValueError if a move cannot be applied to samples of these extents, and TypeError if
        an entry of `chosen` is neither a `Move` nor a `Change`.
        """
        for one in self.chosen:
            if not isinstance(one, Move | Change):
                raise TypeError(
                    f"augment: {one!r} changes no samples; expected Flip(), Noise(0.1) and others "
                    "of distconv.data"
                )
            if isinstance(one, Move):
                if not space:
                    raise ValueError(
                        f"augment: {one} moves elements in space, but samples of the first field "
                        "have no spatial dimensions; expected (channel, ..., width)"
                    )
                space = one.resulting(space)
        return space

    def view(self, shape: tuple[int, ...], space: int, sample: int, epoch: int) -> View:
        """Return the view of stored sample number `sample`, of `shape`, after all moves in `epoch`.

        The last `space` dimensions are spatial; 0 for a sample that is not moved.
        """
        view = View.of(shape)
        for number, one in enumerate(self.chosen):
            if space and isinstance(one, Move):
                view = one.view(view, space, self._generator(epoch, sample, number))
        return view

    def changes(self, field: int, name: str | int | None) -> list[tuple[int, Change]]:
        """Return the changes of values that apply to a field, each with its index in `chosen`.

        `field` is the position of the field, and `name` its name. Changes that name no fields apply
        to the first field.
        """
        return [
            (number, one)
            for number, one in enumerate(self.chosen)
            if isinstance(one, Change) and (name in one.fields if one.fields else field == 0)
        ]

    def change(
        self,
        changes: Sequence[tuple[int, Change]],
        block: Tensor,
        box: Box,
        shape: tuple[int, ...],
        place: tuple[int, int, int],
    ) -> Tensor:
        """Apply `changes` in order to this rank's block of a sample, and return the result.

        Parameters
        ----------
        changes: the changes of the field, from the method `changes`.
        block, box, shape: see `Change.apply`.
        place: the position of the field, the sample number, and the epoch. With the seed, `place`
            determines the random numbers.
        """
        field, sample, epoch = place
        for number, one in changes:
            block = one.apply(block, box, shape, self._generator(epoch, sample, number, field))
        return block

    def _generator(self, *place: int) -> Generator:
        return np.random.default_rng((self.seed, *place))


def _positions(dimensions: Sequence[str], space: int, name: str) -> list[int]:
    """Return the negative index of each named dimension, such as -2 for "height".

    An empty `dimensions` selects all `space` spatial dimensions. `name` is the name of the move,
    for error messages. Raises ValueError for a name that is no spatial dimension.
    """
    known = SPACE[-space:] if space <= len(SPACE) else dimension_names(space + 2)[2:]
    unknown = [d for d in dimensions if d not in known]
    if unknown:
        raise ValueError(f"{name}: samples have no dimension {unknown}; choose from {list(known)}")
    return [known.index(d) - space for d in dimensions or known]


# `Normalize`: a transform that scales the channels of samples as they are read.


class Normalize:
    """Scale each channel to (x - mean) / deviation, and clip the result to +-`limit` if given.

    A `transform` of `Dataset`, which changes this rank's block (samples, channels, ...) in place.

    Parameters
    ----------
    mean: the mean of each channel.
    deviation: the standard deviation of each channel, positive.
    limit: the largest magnitude of the result, in deviations; None for no clipping.

    Raises
    ------
    ValueError
        For means that are not finite, deviations that are not positive, or different numbers of
        means and deviations.

    Examples
    --------
    >>> grid = dc.ProcessGrid(width=2)
    >>> normalize = dc.data.Normalize(mean=[2.0], deviation=[0.5])
    >>> data = dc.data.Dataset(np.array([[[1.0, 2.0, 2.5, 3.0]]]), grid, transform=normalize)
    >>> data.batch([0]).full_tensor()
    tensor([[[-2.,  0.,  1.,  2.]]])
    """

    def __init__(self, mean: Any, deviation: Any, limit: float | None = None) -> None:
        self.mean = torch.as_tensor(mean, dtype=torch.float64).reshape(-1)
        self.deviation = torch.as_tensor(deviation, dtype=torch.float64).reshape(-1)
        self.limit = limit
        if self.mean.shape != self.deviation.shape:
            raise ValueError(
                f"Normalize: {len(self.mean)} means and {len(self.deviation)} deviations; "
                "expected one mean and one deviation for every channel"
            )
        for mean, deviation in zip(self.mean.tolist(), self.deviation.tolist(), strict=True):
            if not isfinite(mean):
                raise ValueError(f"Normalize: mean {mean} of a channel; expected a finite number")
            if not 0 < deviation < inf:
                raise ValueError(
                    f"Normalize: deviation {deviation} of a channel; expected a finite number "
                    "above 0, for example 1 for a constant channel"
                )

    def __call__(self, block: Tensor, box: Box) -> Tensor:
        """Scale this rank's block in place; `box` has its indices in the mini-batch."""
        if block.dim() < 2 or box.stop[1] > len(self.mean):
            raise ValueError(
                f"Normalize: there are means for {len(self.mean)} channels, but the values at "
                f"{box} have another number of channels; expected (samples, channels, ...)"
            )
        shape = (-1, *[1] * (block.dim() - 2))
        channels = box.slices[1]
        mean, deviation = (
            x[channels].to(block.dtype).reshape(shape) for x in (self.mean, self.deviation)
        )
        block.sub_(mean).div_(deviation)
        return block if self.limit is None else block.clamp_(-self.limit, self.limit)
