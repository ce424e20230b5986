"""Windows that slide along one dimension, as in convolution and pooling: the inputs of each output.

The halo of an operator is the part of its window's inputs that other ranks hold; see `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from distconv.geometry.index_maps import Ascending, Interval, cached


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
        """Return the number of inputs from the first to the last of one window, gaps included."""
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


@dataclass(frozen=True)
class TransposedWindow(Ascending):
    """The transpose of a `Window`: input i reaches the outputs from i*stride - padding on."""

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
        """Return the outputs, first to last, that the inputs needed for [start, stop) reach."""
        ((first, last),) = self.intervals(size, start, stop)
        offset = -self.padding
        return (
            first * self.stride + offset,
            (last - 1) * self.stride + offset + self.dilation * (self.kernel - 1) + 1,
        )


class Run(NamedTuple):
    """The elements [start, stop) of a buffer, from which torch pools `outputs` in one call."""

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

        Each run is pooled alone. If its windows would then differ from those in the whole
        dimension, the run is halved.
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
    """Return whether `outputs` outputs from `start` on have the same windows if pooled alone."""
    ((first, last),) = window.intervals(size, start, start + outputs)
    alone = AdaptiveWindow(outputs)
    return all(
        window.window(size, start + o) == tuple(first + i for i in alone.window(last - first, o))
        for o in range(outputs)
    )
