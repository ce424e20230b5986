"""The dimensions that a norm takes statistics over, and blocks as torch's kernels take them.

The kernels for batch normalisation add up the elements of a channel one by one, in the type of the
statistics. Here each run of a few hundred elements is a channel to them. They add up few elements
so, with channels last many runs at once; what they return for runs is added up in float64.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.comm.packing import CHANNELS_LAST, has_channels_last


class Form(NamedTuple):
    """The dimensions of a block (N, C, *spatial) over which statistics are taken.

    Attributes
    ----------
    groups: into how many groups the channels are divided.
    of_each_sample: whether each sample has statistics of its own.
    centered: whether the mean is subtracted; otherwise deviations are from 0.
    weighs_elements: whether weight and bias have a number for each spatial position, not for each
        channel.
    """

    groups: int
    of_each_sample: bool
    centered: bool = True
    weighs_elements: bool = False


class Runs(NamedTuple):
    """How a block (N, C, *spatial) without gaps is divided into runs of elements.

    Attributes
    ----------
    numbers: the shape of one number for each run: (samples, runs before, groups, channels of a
        group, runs behind). Samples are 1 where all share their statistics.
    last: whether runs are columns of matrices, as channels are that lie last; otherwise rows.
    matrices: the shape of the block as matrices that torch's kernels take: (matrices, elements of
        a run, runs) with `last`, else (1, 1, runs, elements of a run).
    """

    numbers: tuple[int, int, int, int, int]
    last: bool
    matrices: tuple[int, ...]

    def of(self, x: Tensor) -> Tensor:
        """Return a view of a block as matrices of runs."""
        if self.last:
            x = x.permute(0, *range(2, x.dim()), 1)
        return x.view(self.matrices)

    def spread(self, numbers: Tensor) -> Tensor:
        """Return numbers (samples, groups, channels of a group or 1) as broadcast to `of`."""
        each = numbers[:, None, :, :, None].expand(self.numbers)
        return each.reshape((self.matrices[0], 1, -1) if self.last else (1, 1, -1, 1))

    def collect(self, numbers: Tensor) -> Tensor:
        """Return a number for each run of `of` in float64, with the dimensions of `numbers`."""
        return numbers.double().view(self.numbers)


def runs_of(x: Tensor, form: Form) -> Runs:
    """Return how torch's kernels take a block that has elements."""
    last = has_channels_last(x) or (not form.of_each_sample and x.shape[1:].numel() == x.shape[1])
    return _divided(tuple(x.shape), form, last, x.is_cpu)


@lru_cache(maxsize=4096)
def _divided(shape: tuple[int, ...], form: Form, last: bool, on_cpu: bool) -> Runs:
    samples = shape[0] if form.of_each_sample else 1
    channels = form.groups, shape[1] // form.groups
    positions = prod(shape[2:])
    if not last:
        length = _part(positions, _ROW)
        numbers = samples, shape[0] // samples, *channels, positions // length
        return Runs(numbers, False, (1, 1, prod(numbers), length))
    together = _part(shape[-1] if len(shape) > 2 else 1, _COLUMNS // shape[1])
    every = prod(shape) // (samples * together * shape[1])
    length = _part(every, _COLUMN) if on_cpu else every
    numbers = samples, every // length * together, *channels, 1
    matrices = prod(shape) // (length * together * shape[1]), length, together * shape[1]
    return Runs(numbers, True, matrices)


_ROW = 512
"""Elements of a run in a row. A register holds 16, and each of its numbers is the sum of 32."""

_COLUMNS, _COLUMN = 1024, 256
"""Runs beside each other, of which the kernels' sums stay in the first cache, and their elements.
Such a matrix stays in the second cache while a kernel reads it twice."""


def _part(n: int, least: int) -> int:
    """Return the smallest divisor of n that is at least `least`; n if there is none soon."""
    return next((k for k in range(max(least, 1), min(n, 16 * least)) if n % k == 0), n)


_FEWEST = 2**13
"""Elements of a sample from which a call for each sample is faster than a copy of all."""


def rows_if_small(x: Tensor, form: Form) -> Tensor:
    """Return a block whose samples all make up one matrix: `x`, or a copy with rows last."""
    each = form.of_each_sample and x.shape[0] > 1 and has_channels_last(x)
    return x.contiguous() if each and (not x.is_cpu or x[0].numel() < _FEWEST) else x


def in_format_of(x: Tensor, other: Tensor) -> Tensor:
    """Return `x` without gaps, in the memory format of `other`."""
    last = has_channels_last(other)
    form = CHANNELS_LAST[x.dim()] if last else torch.contiguous_format
    return with_batch_stride(x.contiguous(memory_format=form))


def with_batch_stride(x: Tensor) -> Tensor:
    """Return the block in the memory format that torch's kernels take it for.

    The stride of a single sample may be any number, but if it is not that of the format, the
    kernels read a gradient of the other format in the wrong order.
    """
    if not x.numel() or x.shape[0] != 1 or x.is_contiguous() or x.stride(0) == x.numel():
        return x
    return x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))
