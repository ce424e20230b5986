"""Index maps: along one dimension, the inputs that an interval of an operator's outputs needs.

Every map gives, along one dimension of size n, the input intervals needed to compute the outputs
[start, stop), and the number of outputs. An interval may reach outside [0, n): those positions are
padding. The needed buffer is the concatenation of the intervals. In the other direction,
`dependents` bounds the outputs that need some inputs, without a search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

Interval = tuple[int, int]

cached = lru_cache(maxsize=1024)
"""A decorator of methods of index maps, which are small, frozen and few."""


class IndexMap(Protocol):
    """The inputs that outputs need along one dimension; hashable, as a key of caches."""

    def output_size(self, size: int) -> int:
        """Return the number of outputs along a dimension of `size` inputs."""

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        """Return the input intervals needed for the outputs [start, stop), start < stop."""

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        """Return output intervals with all outputs that need any of the inputs [start, stop).

        They may contain other outputs, too.
        """


class Ascending:
    """An index map in which later outputs need no earlier inputs, and each needs one interval."""

    def dependents(self: IndexMap, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        outputs = range(self.output_size(size))
        if not outputs:
            return ()

        def first(output: int) -> int:
            return self.intervals(size, output, output + 1)[0][0]

        def last(output: int) -> int:
            return self.intervals(size, output, output + 1)[0][1]

        low = min(bisect_right(outputs, start, key=last), len(outputs) - 1)
        high = max(bisect_left(outputs, stop, key=first) - 1, 0)
        # Inputs between windows belong to the interval between the outputs on both sides.
        return ((min(low, high), max(low, high) + 1),)


@dataclass(frozen=True)
class Same:
    """The identity: output i needs input i."""

    def output_size(self, size: int) -> int:
        return size

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((start, stop),)

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((start, stop),)


@dataclass(frozen=True)
class Strided(Ascending):
    """A slice: output i is input first + i*step, with a positive step."""

    first: int
    step: int
    outputs: int

    def output_size(self, size: int) -> int:
        return self.outputs

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((self.first + start * self.step, self.first + (stop - 1) * self.step + 1),)


@dataclass(frozen=True)
class Span:
    """One operand of a concatenation: its n inputs are the outputs [offset, offset + n).

    The other outputs need nothing of it.
    """

    offset: int
    outputs: int

    def output_size(self, size: int) -> int:
        return self.outputs

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first, last = max(start - self.offset, 0), min(stop - self.offset, size)
        return ((first, last),) if first < last else ()

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((self.offset + start, self.offset + stop),)


@dataclass(frozen=True)
class Grouped(Ascending):
    """Groups: the outputs [g*factor, (g+1)*factor) need the inputs [g*inputs, (g+1)*inputs).

    Used for pixel shuffle and grouped convolution.
    """

    factor: int
    inputs: int = 1

    def output_size(self, size: int) -> int:
        return size // self.inputs * self.factor

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first, last = start // self.factor, (stop - 1) // self.factor + 1
        return ((first * self.inputs, last * self.inputs),)


@dataclass(frozen=True)
class Rows(Ascending):
    """A reshape of rows of `before` elements to rows of `after` elements; positions count rows."""

    before: int
    after: int

    def output_size(self, size: int) -> int:
        return size * self.before // self.after

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((start * self.after // self.before, -(-stop * self.after // self.before)),)

    def offset(self, start: int) -> int:
        """Return the number of elements in the buffer before the first of output row `start`."""
        return start * self.after % self.before


@dataclass(frozen=True)
class Reversed:
    """A reversal: output i is input n - 1 - i; the buffer is in input order."""

    def output_size(self, size: int) -> int:
        return size

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((size - stop, size - start),)

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return self.intervals(size, start, stop)


@dataclass(frozen=True)
class Rolled:
    """A rotation: output i is input (i - shift) mod n."""

    shift: int

    def output_size(self, size: int) -> int:
        return size

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first = (start - self.shift) % size
        last = first + stop - start
        return ((first, last),) if last <= size else ((first, size), (0, last - size))

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return Rolled(-self.shift).intervals(size, start, stop)
