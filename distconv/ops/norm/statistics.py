"""Statistics of norms over all ranks: moments, running statistics, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce, all_reduce_with_grad
from distconv.comm.packing import CHANNELS_LAST, has_channels_last
from distconv.device.kinds import remembered
from distconv.geometry.layout import rank_box
from distconv.grid.interface import Grid
from distconv.ops.support.operands import (
    Placement,
    accumulation_type,
    in_type,
    to_accumulation_type,
)

# The dimensions of a norm's statistics, and the shapes in which torch's kernels take blocks.
#
# The kernels for batch normalisation add up the elements of a channel one by one, in the type of
# the statistics. Here each run of a few hundred elements is passed as a channel of its own, so that
# few elements are added one by one, and with channels last many runs at once. The results for runs
# are added up pairwise.


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


class Norm(NamedTuple):
    """The elements and ranks over which a norm takes its statistics.

    Attributes
    ----------
    form: the elements of a rank's block.
    group: the grid axes along which ranks share statistics.
    counts: the number of elements of a statistic on each rank along `group`, in rank order.
    eps: the number that is added to variances.
    """

    form: Form
    group: tuple[str, ...]
    counts: tuple[int, ...]
    eps: float


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

    def collect(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the results of the kernel calls of `calls`, joined, each of shape `numbers`.

        `parts` has for each call its results, such as means and variances, with a number for each
        run.
        """
        rows = parts[0] if len(parts) == 1 else map(torch.stack, zip(*parts, strict=True))
        return [row.view(self.numbers) for row in rows]


def runs_of(x: Tensor, form: Form) -> Runs:
    """Return the runs of a block with elements, for kernels that add elements up."""
    last = has_channels_last(x) or (not form.of_each_sample and x.shape[1:].numel() == x.shape[1])
    return _divided(tuple(x.shape), form, last)


def by_groups(x: Tensor, form: Form) -> Tensor:
    """Return a view of a block with elements that has the groups as its channels.

    With channels last the block itself is returned.
    """
    if form.groups == x.shape[1] or has_channels_last(x):
        return x
    return x.view(x.shape[0], form.groups, x[0].numel() // form.groups)


def channels_of(x: Tensor, form: Form) -> Runs:
    """Return the runs of a block for kernels that add nothing up.

    If samples share their statistics, runs are whole channels of the mini-batch.
    """
    return runs_of(x, form) if form.of_each_sample and x.shape[0] > 1 else _whole(x.shape, form)


@lru_cache(maxsize=4096)
def _whole(shape: torch.Size, form: Form) -> Runs:
    return Runs((1, 1, form.groups, shape[1] // form.groups, 1), tuple(shape), False)


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


# Mean and variance over dimensions that may be cut.
#
# Means and variances of runs, and of ranks, are combined by the pairwise update of Chan, Golub
# and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
# which does not cancel as E[x^2] - E[x]^2 does.


@lru_cache(maxsize=4096)
def element_counts_of_peers(
    x: Placement, over: tuple[int, ...], group: tuple[str, ...], block: int = 1
) -> tuple[int, ...]:
    """Return the number of elements of one statistic on each rank along `group`, in rank order.

    A statistic covers the dimensions `over` of `x`; if channels are not among them, it covers
    `block` channels.
    """
    peers = x.topology.peers(x.rank, group)
    boxes = (rank_box(x.shape, x.cuts, x.topology, peer).shape for peer in peers)
    return tuple(block * prod(box[d] for d in over) for box in boxes)


def moments(x: Tensor, norm: Norm, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, (samples, groups), in `accumulation_type`.

    They are over the block `x` and the blocks of all ranks along `norm.group`, which call it.
    """
    if x.numel():
        own = _of_block(x, norm.form)
    else:
        samples = x.shape[0] if norm.form.of_each_sample else 1
        own = x.new_zeros((2, samples, norm.form.groups), dtype=accumulation_type(x.dtype))
    return combined(own, grid, norm.group, norm.counts)


def combined(
    own: Tensor, grid: Grid, group: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over the elements of all ranks along `group`, which call it.

    `own` holds mean and variance of this rank's elements, (2, ...), or zeros on a rank without
    elements. `counts` are the numbers of elements of a statistic on these ranks.
    """
    if not group:
        mean, variance = own.unbind()
        return mean, variance
    parts = all_gather(own, grid, group)
    means, variances = parts.unbind(1)
    if min(counts) == max(counts):
        return _of_equal_parts(means, variances, (0,))
    shares = _shares(parts.device, counts, parts.dtype).view(-1, *(1,) * (means.dim() - 1))
    mean = (means * shares).sum(0)
    return mean, (means - mean).square_().add_(variances).mul_(shares).sum(0)


def _of_equal_parts(
    means: Tensor, variances: Tensor, over: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the union of parts that have equal numbers of elements.

    `means` and `variances` are those of the parts, which lie along the dimensions `over`.
    """
    between, mean = torch.var_mean(means, over, correction=0)
    return mean, between.add_(variances.mean(over))


@remembered
def _shares(device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return each rank's fraction of all elements."""
    numbers = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    return numbers.to(dtype)


def _of_block(x: Tensor, form: Form) -> Tensor:
    """Return mean and biased variance of a block, as (2, samples, groups)."""
    x = rows_if_small(x, form) if form.of_each_sample else x
    x = by_groups(to_accumulation_type(x), form)
    runs = runs_of(x, form)
    means, variances = runs.collect(list(map(_of_runs, runs.calls(x))))
    if prod(runs.numbers) == runs.numbers[0] * form.groups:
        return torch.stack([means, variances]).flatten(2)
    return torch.stack(_of_equal_parts(means, variances, (1, 3, 4)))


def _of_runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of `x`, over all other dimensions."""
    over = (0, *range(2, x.dim()))
    if not x.is_cpu:  # torch has no meta kernel for the following functions
        variance, mean = torch.var_mean(x, over, correction=0)
        return mean, variance
    if x.stride(1) == 1 or x.numel() <= _LITTLE:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean, variance
    # torch.var_mean takes thirty times as long on CPUs.
    mean = x.mean(over, keepdim=True)
    if x.numel() <= _PIECE:
        return mean.flatten(), torch.ops.aten.mse_loss(x, mean, 0).mean(over)
    pieces = (t.split(max(1, _PIECE * x.shape[1] // x.numel()), 1) for t in (x, mean))
    squares = [torch.ops.aten.mse_loss(*piece, 0).mean(over) for piece in zip(*pieces, strict=True)]
    return mean.flatten(), torch.cat(squares)


_LITTLE = 2**14
"""Elements below which one call is faster than three, although it is slow for rows."""

_PIECE = 2**18
"""Elements processed at once: fresh memory of an activation's size costs more than arithmetic."""


# The running statistics of a norm, and their update in training.


class RunningStatistics(NamedTuple):
    """Running mean and variance of this rank's channels, and how a mini-batch changes them.

    Attributes
    ----------
    mean, variance: tensors (channels,), which are updated in place.
    momentum: the weight of the mini-batch.
    elements: the number of elements of a statistic on all ranks.
    rest, groups: the grid axes that separate groups of ranks with statistics of their own, and the
        number of groups that have elements. Running statistics take the mean over the groups.
    publish: a collective function that makes the updated statistics known to all ranks; None if
        every rank has all channels.
    """

    mean: Tensor
    variance: Tensor
    momentum: float
    elements: int
    grid: Grid
    rest: tuple[str, ...]
    groups: int
    publish: Callable[[], None] | None

    def update(self, mean: Tensor, variance: Tensor) -> None:
        """Take in the mini-batch's mean and biased variance, one number for each channel.

        Collective.
        """
        mean, variance = mean.flatten(), variance.flatten() * (self.elements / (self.elements - 1))
        if self.rest:
            total = all_reduce(torch.stack([mean, variance]), self.grid, self.rest)
            mean, variance = total / self.groups
        for own, new in ((self.mean, mean), (self.variance, variance)):
            own.lerp_(new if new.dtype == own.dtype else new.to(own.dtype), self.momentum)
        if self.publish is not None:
            self.publish()


# Gradients of norms that can be differentiated again.


def recorded_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, norm: Norm, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, recorded for differentiation to any order.

    Collective. `dy` is the gradient of the norm of the block `x`.
    """
    form, count = norm.form, max(sum(norm.counts), 1)
    groups, channels = form.groups, x.shape[1] // max(form.groups, 1)
    shape = x.shape[0], groups, channels, prod(x.shape[2:])
    over = (2, 3) if form.of_each_sample else (0, 2, 3)
    of_weight = (0, 1, 2) if form.weighs_elements else (0, 3)
    dy, deviation = (to_accumulation_type(t).reshape(shape) for t in (dy, x))

    def mean(t: Tensor) -> Tensor:
        return all_reduce_with_grad(t.sum(over, keepdim=True), grid, norm.group) / count

    if form.centered:
        deviation = deviation - mean(deviation)
    scale = torch.rsqrt(mean(deviation.square()) + norm.eps)
    standard = deviation * scale
    dweight, dbias = (dy * standard).sum(of_weight), dy.sum(of_weight)
    if weight is not None:
        own = (1, 1, 1, -1) if form.weighs_elements else (1, groups, channels, 1)
        dy = dy * in_type(weight, dy.dtype).reshape(own)
    dx = dy - standard * mean(dy * standard)
    if form.centered:
        dx = dx - mean(dy)
    return in_type((dx * scale).view(x.shape), x.dtype), dweight, dbias
