"""Geometry of operators that look at neighbours: which input positions an output interval needs.

Every map answers, along one dimension of size n, which input intervals are needed to compute the
outputs [start, stop), and how many outputs there are. An interval may reach outside [0, n): those
positions are padding. The needed buffer is the concatenation of the intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Interval = tuple[int, int]


class IndexMap(Protocol):
    """From outputs to needed inputs along one dimension; hashable, so that plans can be cached."""

    def output_size(self, size: int) -> int:
        """Number of outputs along a dimension of `size` inputs."""

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        """The input intervals needed for the outputs [start, stop), start < stop."""


@dataclass(frozen=True)
class Same:
    """Output i needs input i."""

    def output_size(self, size: int) -> int:
        return size

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((start, stop),)


@dataclass(frozen=True)
class Window:
    """A sliding window: convolution and pooling.

    Output o covers the inputs o*stride - padding[0] + dilation*i for i in range(kernel).
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    @property
    def extent(self) -> int:
        """Inputs from the first to the last that one window touches."""
        return self.dilation * (self.kernel - 1) + 1

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


@dataclass(frozen=True)
class AdaptiveWindow:
    """Adaptive pooling to m outputs: output o covers the inputs [o*n // m, ceil((o+1)*n / m))."""

    outputs: int

    def output_size(self, size: int) -> int:
        return self.outputs

    def window(self, size: int, output: int) -> Interval:
        """The inputs that one output covers."""
        return output * size // self.outputs, -(-(output + 1) * size // self.outputs)

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((self.window(size, start)[0], self.window(size, stop - 1)[1]),)


@dataclass(frozen=True)
class Strided:
    """A slice: output i is input first + i*step, step positive."""

    first: int
    step: int
    outputs: int

    def output_size(self, size: int) -> int:
        return self.outputs

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((self.first + start * self.step, self.first + (stop - 1) * self.step + 1),)


@dataclass(frozen=True)
class Span:
    """Outputs [offset, offset + n) are the n inputs; the other outputs take nothing from here.

    This is one operand of a concatenation.
    """

    offset: int
    outputs: int

    def output_size(self, size: int) -> int:
        return self.outputs

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first, last = max(start - self.offset, 0), min(stop - self.offset, size)
        return ((first, last),) if first < last else ()


@dataclass(frozen=True)
class Grouped:
    """Output i is computed from input i // factor (pixel shuffle, nearest upsampling)."""

    factor: int

    def output_size(self, size: int) -> int:
        return size * self.factor

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return ((start // self.factor, (stop - 1) // self.factor + 1),)


@dataclass(frozen=True)
class Pad:
    """Padding by `before` and `after` positions (negative ones crop).

    mode "constant" leaves the outside to the fill value; "reflect" mirrors about the border
    element, "replicate" repeats it, "circular" wraps around. `positions` tells which input each
    needed position of the buffer stands for.
    """

    before: int
    after: int
    mode: str = "constant"

    def output_size(self, size: int) -> int:
        return size + self.before + self.after

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first, last = start - self.before, stop - self.before
        if self.mode == "constant":
            return ((first, last),)
        low, high = (min(first, 0), min(last, 0)), (max(first, size), max(last, size))
        inside = (max(first, 0), min(last, size))
        pieces = [_mirror(self.mode, size, *low), inside, _mirror(self.mode, size, *high)]
        return tuple(piece for piece in pieces if piece[0] < piece[1])

    def order(self, size: int, start: int, stop: int) -> list[int] | None:
        """For each output in [start, stop) its place in the buffer; None where it is the same."""
        if self.mode in ("constant", "circular"):
            return None
        first, last = start - self.before, stop - self.before
        buffer = [i for a, b in self.intervals(size, start, stop) for i in range(a, b)]
        wanted = [_source(self.mode, size, i) for i in range(first, last)]
        where = {position: i for i, position in enumerate(buffer)}
        order = [where[position] for position in wanted]
        return None if order == list(range(len(buffer))) else order


def _source(mode: str, size: int, position: int) -> int:
    """The input that an output position outside [0, size) repeats."""
    if mode == "circular":
        return position % size
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    return -position if position < 0 else min(position, 2 * (size - 1) - position)


def _mirror(mode: str, size: int, start: int, stop: int) -> Interval:
    """The input interval that the outside positions [start, stop), all on one side, repeat."""
    if start >= stop:
        return (0, 0)
    ends = _source(mode, size, start), _source(mode, size, stop - 1)
    return min(ends), max(ends) + 1
