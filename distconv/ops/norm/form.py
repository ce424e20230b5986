"""The dimensions of a norm's statistics, and the shapes in which torch's kernels take blocks.

The kernels for batch normalisation add up the elements of a channel one by one, in the type of the
statistics. Here each run of a few hundred elements is passed as a channel of its own, so that few
elements are added one by one, and with channels last many runs at once. The results for runs are
added up pairwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.comm.packing import CHANNELS_LAST, has_channels_last


class Form(NamedTuple):
    """The elements of a block (N, C, *spatial) over which a norm takes each of its statistics.

    Attributes
    ----------
    groups: the number of groups of channels.
    of_each_sample: whether each sample has statistics of its own.
    centered: whether the mean is subtracted; otherwise deviations are from 0.
    weighs_elements: whether weight and bias have a number for each spatial position, not for each
        channel.
    in_runs: whether sums are taken over runs, as on CPUs.
    """

    groups: int
    of_each_sample: bool
    centered: bool = True
    weighs_elements: bool = False
    in_runs: bool = True


class Runs(NamedTuple):
    """The division of a block (N, C, *spatial) without gaps into runs of elements.

    Attributes
    ----------
    numbers: the shape of a tensor with one number for each run: (samples, runs before the channels,
        groups, channels of a group, runs after them). Samples are 1 if all share their statistics.
    shape: the shape in which kernels take the block, with runs as channels: its own shape, (1,
        runs, elements of a run), or with channels last (matrices, elements, runs).
    matrices: whether `shape` is (matrices, elements, runs); each matrix is a kernel call of its
        own.
    """

    numbers: tuple[int, int, int, int, int]
    shape: tuple[int, ...]
    matrices: bool

    def of(self, x: Tensor) -> Tensor:
        """Return a view of the block `x` in the shape for the kernels."""
        if self.matrices:
            return x.permute(0, *range(2, x.dim()), 1).view(self.shape)
        return x if x.shape == self.shape else x.view(self.shape)

    def calls(self, x: Tensor) -> Sequence[Tensor]:
        """Return the parts of `of(x)`, one for each kernel call."""
        return self.of(x).unbind() if self.matrices else (self.of(x),)

    def spread(self, numbers: Tensor) -> Tensor:
        """Return `numbers` in a shape that broadcasts to `of(x)`, with one number for each run.

        They are given as (samples, groups, channels of a group or 1), or for each run.
        """
        if numbers.numel() != prod(self.numbers):
            numbers = numbers[:, None, :, :, None].expand(self.numbers)
        if self.matrices:
            return numbers.reshape(self.shape[0], 1, self.shape[2])
        return numbers.reshape(1, self.shape[1], *(1,) * (len(self.shape) - 2))

    def collect(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the results of the kernel calls of `calls`, joined: (results, *numbers).

        `parts` has for each call its results, such as means and variances, with a number for each
        run.
        """
        rows = parts[0] if len(parts) == 1 else [torch.stack(p) for p in zip(*parts, strict=True)]
        return torch.stack(list(rows)).view(len(rows), *self.numbers)


def runs_of(x: Tensor, form: Form) -> Runs:
    """Return the runs of a block with elements, for kernels that add elements up."""
    last = has_channels_last(x) or (not form.of_each_sample and x.shape[1:].numel() == x.shape[1])
    return _divided(tuple(x.shape), form, last)


def by_groups(x: Tensor, form: Form) -> Tensor:
    """Return a view of a block with elements that has the groups as its channels.

    With channels last the block itself is returned.
    """
    if has_channels_last(x) or form.groups == x.shape[1]:
        return x
    return x.view(x.shape[0], form.groups, x[0].numel() // form.groups)


def channels_of(x: Tensor, form: Form) -> Runs:
    """Return the runs of a block for kernels that add nothing up.

    If samples share their statistics, runs are whole channels of the mini-batch.
    """
    if form.of_each_sample and x.shape[0] > 1:
        return runs_of(x, form)
    return Runs((1, 1, form.groups, x.shape[1] // form.groups, 1), tuple(x.shape), False)


@lru_cache(maxsize=4096)
def _divided(shape: tuple[int, ...], form: Form, last: bool) -> Runs:
    samples = shape[0] if form.of_each_sample else 1
    channels = form.groups, shape[1] // form.groups
    positions = prod(shape[2:])
    each = positions * shape[0] // samples
    few = each <= _FEW or not form.in_runs
    if few and samples == 1:
        return Runs((1, 1, *channels, 1), shape, False)
    if not last:
        length = positions if few else divisor_from(positions, _ROW)
        numbers = samples, shape[0] // samples, *channels, positions // length
        return Runs(numbers, (1, prod(numbers), length), False)
    together = 1 if few or len(shape) < 3 else divisor_from(shape[-1], _COLUMNS // shape[1])
    length = each if few else divisor_from(each // together, _COLUMN)
    numbers = samples, each // length, *channels, 1
    matrices = prod(shape) // (length * together * shape[1])
    return Runs(numbers, (matrices, length, together * shape[1]), True)


_FEW = 2**10
"""The most elements of a channel that are one run: joining more runs takes longer."""

_ROW = 512
"""Elements of a run in a row: a register holds 16 sums, each of 32 elements."""

_COLUMNS, _COLUMN = 1024, 256
"""Runs side by side whose sums stay in the first cache, and the elements of each. Such a matrix
stays in the second cache while a kernel reads it twice."""


def divisor_from(n: int, least: int) -> int:
    """Return the smallest divisor of n from `least` to 16 * `least`; n if there is none."""
    return next((k for k in range(max(least, 1), min(n, 16 * least)) if n % k == 0), n)


_FEWEST = 2**13
"""Elements of a sample above which a call for each sample is faster than a copy of all."""


def rows_if_small(x: Tensor, form: Form) -> Tensor:
    """Return `x`, made contiguous if a copy takes less time than a kernel call for each sample."""
    each = form.of_each_sample and x.shape[0] > 1 and has_channels_last(x)
    return x.contiguous() if each and not (form.in_runs and x[0].numel() >= _FEWEST) else x


def in_format_of(x: Tensor, other: Tensor) -> Tensor:
    """Return `x` without gaps, in the memory format of `other`."""
    last = has_channels_last(other)
    form = CHANNELS_LAST[x.dim()] if last else torch.contiguous_format
    return with_batch_stride(x.contiguous(memory_format=form))


def with_batch_stride(x: Tensor) -> Tensor:
    """Return the block with the strides that torch's kernels expect of its memory format.

    A dimension of one sample may have any stride. If its stride is not that of the memory format,
    the kernels read a gradient of the other memory format in the wrong order.
    """
    if not x.numel() or x.shape[0] != 1 or x.is_contiguous() or x.stride(0) == x.numel():
        return x
    return x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))
