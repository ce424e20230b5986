"""Random changes of samples that are the same on any grid, as they commute with cutting.

The random numbers of a sample follow from a seed, the epoch and the number of the sample alone.
What moves elements is done while a sample is read: a rank reads the boxes that its own box is made
of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from distconv.data.views import View
from distconv.geometry.layout import Box, dimension_names
from distconv.ops.random import normal_at

Generator: TypeAlias = np.random.Generator

SPACE = ("depth", "height", "width")


class Move(ABC):
    """A random change of the places of elements, alike in all fields that share the space."""

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents of space that samples of some extents get.

        Raises ValueError for samples that it cannot be done to.
        """
        return space

    @abstractmethod
    def view(self, view: View, space: int, generator: Generator) -> View:
        """Return a view of a sample with its elements moved.

        Parameters
        ----------
        space: how many of the last dimensions are space.
        generator: of this sample; it is drawn from alike for all its fields.
        """


class Change(ABC):
    """A random change of the values of one sample.

    Attributes
    ----------
    fields: those that it changes; the first field when there are none.
    """

    fields: Sequence[str | int | None] = ()

    @abstractmethod
    def apply(
        self, block: Tensor, box: Box, shape: tuple[int, ...], generator: Generator
    ) -> Tensor:
        """Return a block of a sample with its values changed.

        Parameters
        ----------
        block: floating-point numbers, without a dimension for samples.
        box: where it lies in the sample, beyond which it may reach as far as a halo.
        shape: of the sample.
        generator: of this sample and field, the same on all ranks.
        """


@dataclass(frozen=True)
class Flip(Move):
    """Turn samples around, along each of some dimensions with a probability of its own.

    Parameters
    ----------
    dimensions: of "depth", "height" and "width"; all of the space when not given.
    probability: for each dimension.
    """

    dimensions: tuple[str, ...] = ()
    probability: float = 0.5

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents as they are.

        Raises ValueError for dimensions that samples do not have.
        """
        _numbers(self.dimensions, len(space), "Flip")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"Flip: probability={self.probability} is not between 0 and 1")
        return space

    def view(self, view: View, space: int, generator: Generator) -> View:
        """Return the sample, backwards along some dimensions."""
        for d in _numbers(self.dimensions, space, "Flip"):
            if generator.random() < self.probability:
                view = view.flipped(d)
        return view


@dataclass(frozen=True)
class Rotate90(Move):
    """Rotate samples in a plane by 0, 90, 180 or 270 degrees, with equal probability.

    Parameters
    ----------
    plane: two dimensions of equal extents.
    """

    plane: tuple[str, str] = ("height", "width")

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents as they are.

        Raises ValueError for a plane that is not in samples, or not a square.
        """
        if len(set(self.plane)) != 2:
            raise ValueError(f"Rotate90: plane={self.plane} does not name two dimensions")
        extents = tuple(space[d] for d in _numbers(self.plane, len(space), "Rotate90"))
        if extents[0] != extents[1]:
            raise ValueError(
                f"Rotate90: the plane {self.plane} has the extents {extents}, which a rotation "
                "exchanges; put a Crop to equal ones before it"
            )
        return space

    def view(self, view: View, space: int, generator: Generator) -> View:
        """Return the sample, rotated as by `numpy.rot90`."""
        d, e = _numbers(self.plane, space, "Rotate90")
        quarters = int(generator.integers(4))
        if quarters % 2:
            view = view.swapped(d, e)
        # From the first dimension towards the second, as numpy has it.
        if quarters in (1, 2):
            view = view.flipped(d)
        if quarters in (2, 3):
            view = view.flipped(e)
        return view


@dataclass(frozen=True)
class Crop(Move):
    """Take a part of each sample.

    Parameters
    ----------
    extents: of the part, along each dimension of space.
    where: "random", or "center" for the same part of all samples.
    """

    extents: tuple[int, ...]
    where: str = "random"

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents of the part."""
        if self.where not in ("random", "center"):
            raise ValueError(f"Crop: where={self.where!r} is neither 'random' nor 'center'")
        if len(self.extents) != len(space) or not all(
            0 < part <= whole for part, whole in zip(self.extents, space, strict=False)
        ):
            raise ValueError(
                f"Crop: extents={self.extents} of samples of {space}; choose as many, from 1 up to "
                "those"
            )
        return tuple(self.extents)

    def view(self, view: View, space: int, generator: Generator) -> View:
        """Return the part of the sample."""
        lead = len(view.order) - space
        for d, part in enumerate(self.extents, lead):
            room = view.shape[d] - part
            start = int(generator.integers(room + 1)) if self.where == "random" else room // 2
            view = view.cropped(d, start, start + part)
        return view


@dataclass(frozen=True)
class Translate(Move):
    """Move samples by a random number of elements along each dimension of space.

    Parameters
    ----------
    most: the largest distance, in both directions; one number, or one for each dimension.
    border: "periodic" for what comes in at the other end, "zeros" for zeros, which are those of the
        tensor that the program gets.
    """

    most: int | tuple[int, ...]
    border: str = "zeros"

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents as they are.

        Raises ValueError for distances and borders that there are not.
        """
        if self.border not in ("periodic", "zeros"):
            raise ValueError(f"Translate: border={self.border!r} is not 'periodic' or 'zeros'")
        most = self._most(len(space))
        if len(most) != len(space) or min(most) < 0:
            raise ValueError(
                f"Translate: most={self.most} of samples of {space}; expected distances from 0, "
                "one for all dimensions or for each"
            )
        return space

    def view(self, view: View, space: int, generator: Generator) -> View:
        """Return the sample, moved."""
        lead = len(view.order) - space
        for d, most in enumerate(self._most(space), lead):
            by = int(generator.integers(-most, most, endpoint=True))
            view = view.moved(d, by, self.border == "periodic")
        return view

    def _most(self, space: int) -> tuple[int, ...]:
        return (self.most,) * space if isinstance(self.most, int) else tuple(self.most)


@dataclass(frozen=True)
class ChannelJitter(Change):
    """Scale each channel of a sample by 1 + a, and add b.

    Parameters
    ----------
    scale, offset: the largest a and b in magnitude; both are uniform, for each channel on its own.
    fields: of samples, channels first; the first field when not given.
    """

    scale: float = 0.1
    offset: float = 0.0
    fields: tuple[str | int | None, ...] = ()

    def apply(
        self, block: Tensor, box: Box, shape: tuple[int, ...], generator: Generator
    ) -> Tensor:
        """Return the block with its channels scaled and moved."""
        drawn = generator.uniform(-1, 1, (2, shape[0]))[:, box.slices[0]]
        scale, offset = (
            torch.from_numpy(drawn).to(block.dtype).reshape(2, -1, *[1] * (block.dim() - 1))
        )
        return block * (1 + self.scale * scale) + self.offset * offset


@dataclass(frozen=True)
class Noise(Change):
    """Add independent normal numbers to all elements.

    Parameters
    ----------
    deviation: their standard deviation.
    fields: the first field when not given.
    """

    deviation: float
    fields: tuple[str | int | None, ...] = ()

    def apply(
        self, block: Tensor, box: Box, shape: tuple[int, ...], generator: Generator
    ) -> Tensor:
        """Return the block with noise added."""
        key = torch.tensor(int(generator.integers(-(2**63), 2**63)))
        numbers = torch.zeros((), dtype=torch.int64)
        for start, stop, n in zip(box.start, box.stop, shape, strict=True):
            # What a periodic halo has beyond the border is the same element as at the other end.
            numbers = numbers.unsqueeze(-1) * n + torch.arange(start, stop).remainder(n)
        return block + self.deviation * normal_at(numbers, key).to(block.dtype)


@dataclass(frozen=True)
class Augmentations:
    """Random changes in their order, and the seed of all their numbers.

    Those of places come first, then those of values.
    """

    chosen: tuple[Move | Change, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        """Return the changes in words that are the same on all ranks."""
        # An object that says nothing of itself would be told by where it lies in memory.
        words = [str(x) if is_dataclass(x) else type(x).__qualname__ for x in self.chosen]
        return f"{', '.join(words)} from seed {self.seed}"

    def resulting(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents of space that samples of some extents get.

        Raises ValueError or TypeError for samples, or objects, that this cannot be done with.
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
                        f"augment: {one} moves elements in space, and samples of the first field "
                        "have none; expected (channel, ..., width)"
                    )
                space = one.resulting(space)
        return space

    def view(self, shape: tuple[int, ...], space: int, sample: int, epoch: int) -> View:
        """Return how a stored sample of `shape` is moved, in its last `space` dimensions."""
        view = View.of(shape)
        for number, one in enumerate(self.chosen):
            if space and isinstance(one, Move):
                view = one.view(view, space, self._generator(epoch, sample, number))
        return view

    def changes(self, field: int, name: str | int | None) -> list[tuple[int, Change]]:
        """Return the changes of values of a field, with their numbers.

        Parameters
        ----------
        field: its place among the fields.
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
        """Return a block of a sample with its values changed.

        Parameters
        ----------
        changes: of the field, from `changes`.
        block, box, shape: see `Change.apply`.
        place: the field, the sample and the epoch.
        """
        field, sample, epoch = place
        for number, one in changes:
            block = one.apply(block, box, shape, self._generator(epoch, sample, number, field))
        return block

    def _generator(self, *place: int) -> Generator:
        return np.random.default_rng((self.seed, *place))


def _numbers(dimensions: Sequence[str], space: int, name: str) -> list[int]:
    """Return which dimensions are meant, counted from the end; all of the space for none."""
    known = SPACE[-space:] if space <= len(SPACE) else dimension_names(space + 2)[2:]
    unknown = [d for d in dimensions if d not in known]
    if unknown:
        raise ValueError(f"{name}: samples have no {unknown}; choose from {list(known)}")
    return [known.index(d) - space for d in dimensions or known]
