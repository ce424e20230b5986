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
from typing import NamedTuple, Protocol

Interval = tuple[int, int]

cached = lru_cache(maxsize=1024)
"""A decorator that caches methods of index maps, which are small, immutable and few."""


class IndexMap(Protocol):
    """The inputs that outputs need along one dimension; hashable, for use as a key of caches."""

    def output_size(self, size: int) -> int:
        """Return the number of outputs along a dimension of `size` inputs."""

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        """Return the input intervals needed for the outputs [start, stop), start < stop."""

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        """Return output intervals with all outputs that need any of the inputs [start, stop).

        The intervals may contain other outputs, too.
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
class WrittenSlice:
    """A slice that is written, such as one operand of a concatenation.

    Input i becomes the output offset + i*step. All other outputs need no input.
    """

    offset: int
    outputs: int
    step: int = 1

    def output_size(self, size: int) -> int:
        return self.outputs

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first = max(-((self.offset - start) // self.step), 0)
        last = min(-((self.offset - stop) // self.step), size)
        return ((first, last),) if first < last else ()

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first = self.offset + start * self.step
        return ((first, self.offset + (stop - 1) * self.step + 1),)


@dataclass(frozen=True)
class Grouped(Ascending):
    """Groups: outputs [g*factor, (g+1)*factor) need the inputs [g*inputs, (g+1)*inputs) for each g.

    Pixel shuffle and grouped convolution use this map.
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
        """Return the offset in elements of output row `start`, the first row of the buffer."""
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


# Windows that slide along one dimension, as in convolution and pooling: the inputs of each output.
#
# The halo of an operator is the part of its window's inputs that other ranks hold; see `plan`.


@dataclass(frozen=True)
class Window(Ascending):
    """A sliding window, for convolution and pooling.

    Output o covers the inputs o*stride - padding[0] + dilation*i for i in range(kernel).
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    @property
    def extent(self) -> int:
        """Return the length of one window in inputs, gaps of the dilation included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def steps(self) -> tuple[int, int]:
        """Return the distances from one window to the next, in outputs and in inputs."""
        return 1, self.stride

    def output_size(self, size: int) -> int:
        room = size + sum(self.padding) - self.extent
        outputs = (room + (self.stride - 1 if self.ceil_mode else 0)) // self.stride + 1
        # A window of ceil mode has to start inside the input or the left padding.
        if self.ceil_mode and (outputs - 1) * self.stride >= size + self.padding[0]:
            outputs -= 1
        return outputs

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first = start * self.stride - self.padding[0]
        last = (stop - 1) * self.stride - self.padding[0] + self.extent
        return ((first, last),)

    def misses_input(self, size: int) -> bool:
        """Return whether all taps of some window are in the padding, because of its dilation."""
        if self.dilation <= size:
            return False
        last = (self.output_size(size) - 1) * self.stride - self.padding[0]
        return any(
            all(not 0 <= first + tap * self.dilation < size for tap in range(self.kernel))
            for first in range(-self.padding[0], last + 1, self.stride)
        )


@dataclass(frozen=True)
class TransposedWindow(Ascending):
    """The transpose of a `Window`, for transposed convolution.

    Input i contributes to the outputs i*stride - padding + dilation*k for k in range(kernel).
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    output_padding: int = 0

    @property
    def steps(self) -> tuple[int, int]:
        """Return the distances from one window to the next, in outputs and in inputs."""
        return self.stride, 1

    def output_size(self, size: int) -> int:
        reach = (size - 1) * self.stride + self.dilation * (self.kernel - 1) + 1
        return reach - 2 * self.padding + self.output_padding

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        reach = self.dilation * (self.kernel - 1)
        last = (stop - 1 + self.padding) // self.stride + 1
        first = -((reach - start - self.padding) // self.stride)
        # Where the stride exceeds the kernel the first outputs may need no input; the buffer starts
        # no later for that.
        return ((min(first, (start + self.padding) // self.stride), last),)

    def written(self, size: int, start: int, stop: int) -> Interval:
        """Return the interval of outputs to which the inputs of [start, stop) contribute."""
        ((first, last),) = self.intervals(size, start, stop)
        offset = -self.padding
        return (
            first * self.stride + offset,
            (last - 1) * self.stride + offset + self.dilation * (self.kernel - 1) + 1,
        )


class Run(NamedTuple):
    """The elements [start, stop) of a buffer that one call of torch pools to `outputs` outputs."""

    start: int
    stop: int
    outputs: int


@dataclass(frozen=True)
class AdaptiveWindow(Ascending):
    """Adaptive pooling to m outputs: output o covers the inputs [o*n // m, ceil((o+1)*n / m))."""

    outputs: int

    def output_size(self, size: int) -> int:
        return self.outputs

    def window(self, size: int, output: int) -> Interval:
        """Return the interval of inputs that one output covers."""
        return output * size // self.outputs, -(-(output + 1) * size // self.outputs)

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((self.window(size, start)[0], self.window(size, stop - 1)[1]),)

    @cached
    def runs(self, size: int, start: int, stop: int) -> tuple[Run, ...]:
        """Return runs of the buffer from which adaptive pooling computes the outputs [start, stop).

        Each run is pooled separately. A run is halved while its windows, pooled separately, differ
        from the windows in the global dimension.
        """
        origin, runs = self.window(size, start)[0], []
        while start < stop:
            outputs = stop - start
            while not _pools_alone(self, size, start, outputs):
                outputs //= 2
            ((first, last),) = self.intervals(size, start, start + outputs)
            runs.append(Run(first - origin, last - origin, outputs))
            start += outputs
        return tuple(runs)


def _pools_alone(window: AdaptiveWindow, size: int, start: int, outputs: int) -> bool:
    """Return whether `outputs` outputs from `start` on have the same windows, pooled separately."""
    ((first, last),) = window.intervals(size, start, start + outputs)
    alone = AdaptiveWindow(outputs)
    return all(
        window.window(size, start + o) == tuple(first + i for i in alone.window(last - first, o))
        for o in range(outputs)
    )


# Padding along one dimension, in torch's four modes.


@dataclass(frozen=True)
class Pad:
    """Padding by `before` and `after` positions; negative numbers crop.

    Mode "constant" fills the padding with a value, "reflect" mirrors the elements about the border
    element, "replicate" repeats the border element, and "circular" repeats the elements of the
    other end, cropped elements excluded.
    """

    before: int
    after: int
    mode: str = "constant"

    def output_size(self, size: int) -> int:
        start, stop = self._source_range(size)
        if (
            self.mode == "circular"
            and size
            and not 0 < stop - start >= max(self.before, self.after)
        ):
            raise RuntimeError(
                f"circular padding by ({self.before}, {self.after}) leaves {max(stop - start, 0)} "
                f"of {size} positions to wrap around; expected at least the padding of each side"
            )
        return size + self.before + self.after

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first, last = start - self.before, stop - self.before
        if self.mode == "constant":
            return ((first, last),)
        inputs = self._source_range(size)
        low, high = (min(first, 0), min(last, 0)), (max(first, size), max(last, size))
        inside = (max(first, 0), min(last, size))
        repeated = _mirror(self.mode, inputs, *low), inside, _mirror(self.mode, inputs, *high)
        pieces = tuple(piece for piece in repeated if piece[0] < piece[1])
        # Reflections and the border are near the inputs inside, or among them.
        if self.mode == "circular":
            return pieces
        return ((min(first for first, _ in pieces), max(last for _, last in pieces)),)

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        inside = (start + self.before, stop + self.before)
        if self.mode == "constant":
            return (inside,)
        left, right = (0, self.before), (self.before + size, self.output_size(size))
        repeats = [side for side in (left, right) if side[0] < side[1]]
        return (inside, *(s for s in repeats if self._takes(size, s, (start, stop))))

    def _takes(self, size: int, outputs: Interval, inputs: Interval) -> bool:
        """Return whether any output in the interval `outputs` needs any input in `inputs`."""
        needed = self.intervals(size, *outputs)
        return any(max(a, inputs[0]) < min(b, inputs[1]) for a, b in needed)

    def outside(self, size: int, start: int, stop: int) -> tuple[int, int] | None:
        """Return the numbers of outputs in [start, stop) before the first and after the last input.

        Returns None if the outputs are not the buffer padded by these numbers.
        """
        first, last = start - self.before, stop - self.before
        inside = (max(first, 0), min(last, size))
        if self.mode == "circular" or self.intervals(size, start, stop) != (inside,):
            return None
        return inside[0] - first, last - inside[1]

    def order(self, size: int, start: int, stop: int) -> list[int] | None:
        """Return the position in the buffer of each output in [start, stop); None if in order."""
        if self.mode == "constant":
            return None
        first, last = start - self.before, stop - self.before
        buffer = [i for a, b in self.intervals(size, start, stop) for i in range(a, b)]
        wanted = [_source(self.mode, self._source_range(size), i) for i in range(first, last)]
        where = {position: i for i, position in enumerate(buffer)}
        order = [where[position] for position in wanted]
        return None if order == list(range(len(buffer))) else order

    def _source_range(self, size: int) -> Interval:
        """Return the inputs that padding may repeat: all, or if circular, all not cropped."""
        if self.mode == "circular":
            return max(-self.before, 0), size + min(self.after, 0)
        return 0, size


def _source(mode: str, inputs: Interval, position: int) -> int:
    """Return the input, of the interval `inputs`, that padding repeats at `position`."""
    start, stop = inputs
    if mode == "circular":
        return start + (position - start) % (stop - start)
    if mode == "replicate":
        return min(max(position, start), stop - 1)
    return -position if position < 0 else min(position, 2 * (stop - 1) - position)


def _mirror(mode: str, inputs: Interval, start: int, stop: int) -> Interval:
    """Return the inputs that padding repeats at the positions [start, stop), all on one side."""
    if start >= stop:
        return (0, 0)
    ends = _source(mode, inputs, start), _source(mode, inputs, stop - 1)
    return min(ends), max(ends) + 1
