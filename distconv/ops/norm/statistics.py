"""Mean and variance of norms over ranks, running statistics, and gradients of any order."""

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
# torch's kernels for batch normalisation sum the elements of a channel one by one, in the type of
# the statistics, which loses digits. Here each channel is divided into runs of a few hundred
# elements, and each run is passed as a channel of its own. With channels last, one call takes many
# runs side by side. The sums of runs are summed pairwise.


class Form(NamedTuple):
    """The elements of a block (N, C, *spatial) over which a norm takes mean and variance.

    Attributes
    ----------
    groups: the number of groups of channels in the block; each has its own mean and variance.
    of_each_sample: whether each sample has its own mean and variance.
    centered: whether the mean is subtracted; otherwise the mean square replaces the variance.
    weighs_elements: whether weight and bias have a number for each spatial position, not for each
        channel.
    in_runs: whether long channels are summed in runs, as on CPUs.
    """

    groups: int
    of_each_sample: bool
    centered: bool = True
    weighs_elements: bool = False
    in_runs: bool = True


class Norm(NamedTuple):
    """The elements and ranks over which a norm takes mean and variance.

    Attributes
    ----------
    form: the elements of each rank's block.
    group: the grid axes along which ranks share mean and variance.
    counts: the number of elements of one mean on each rank along `group`, in rank order.
    eps: the number that is added to variances.
    """

    form: Form
    group: tuple[str, ...]
    counts: tuple[int, ...]
    eps: float


class Runs(NamedTuple):
    """The division of a dense block (N, C, *spatial) into runs: elements that a kernel sums alone.

    Attributes
    ----------
    numbers: the shape of a tensor with one number for each run: (samples, runs before the channels,
        groups, channels of a group, runs after the channels). `samples` is 1 if all samples share
        their statistics.
    shape: the shape in which kernels take the block, with runs as channels: the block's own shape;
        (1, runs, elements of a run); or with channels last (matrices, elements of a run, runs).
    matrices: whether `shape` is (matrices, elements of a run, runs); each matrix needs its own
        kernel call.
    """

    numbers: tuple[int, int, int, int, int]
    shape: tuple[int, ...]
    matrices: bool

    def of(self, x: Tensor) -> Tensor:
        """Return a view of the block `x` in `shape`, for the kernels."""
        if self.matrices:
            return x.permute(0, *range(2, x.dim()), 1).view(self.shape)
        return x if x.shape == self.shape else x.view(self.shape)

    def calls(self, x: Tensor) -> Sequence[Tensor]:
        """Return views of the block `x` for the kernel, one for each call."""
        return self.of(x).unbind() if self.matrices else (self.of(x),)

    def spread(self, numbers: Tensor) -> Tensor:
        """Return `numbers` with one number for each run, in a shape that broadcasts to `shape`.

        `numbers` has shape (samples, groups, channels of a group or 1), or one number for each run.
        """
        if numbers.numel() != prod(self.numbers):
            numbers = numbers[:, None, :, :, None].expand(self.numbers)
        if self.matrices:
            return numbers.reshape(self.shape[0], 1, self.shape[2])
        return numbers.reshape(1, self.shape[1], *(1,) * (len(self.shape) - 2))

    def collect(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the results of all kernel calls, joined to one tensor of shape `numbers` each.

        `parts` has for each kernel call its results, such as means and variances of the runs.
        """
        rows = parts[0] if len(parts) == 1 else map(torch.stack, zip(*parts, strict=True))
        return [row.view(self.numbers) for row in rows]


def runs_of(x: Tensor, form: Form) -> Runs:
    """Return the runs of the block `x`, not empty, for kernels that sum elements."""
    last = has_channels_last(x) or (not form.of_each_sample and x.shape[1:].numel() == x.shape[1])
    return _divided(tuple(x.shape), form, last)


def by_groups(x: Tensor, form: Form) -> Tensor:
    """Return a view of the block `x`, not empty, with each group of channels as one channel.

    In channels last no such view exists, and `x` itself is returned.
    """
    if form.groups == x.shape[1] or has_channels_last(x):
        return x
    return x.view(x.shape[0], form.groups, x[0].numel() // form.groups)


def channels_of(x: Tensor, form: Form) -> Runs:
    """Return the runs of the block `x` for kernels that work element by element.

    Such kernels need no short runs: unless each sample has statistics of its own, a run is a
    channel with all samples.
    """
    return runs_of(x, form) if form.of_each_sample and x.shape[0] > 1 else _whole(x.shape, form)


@lru_cache(maxsize=4096)
def _whole(shape: torch.Size, form: Form) -> Runs:
    """Return the division of a block of `shape` into one run for each channel, with all samples."""
    return Runs((1, 1, form.groups, shape[1] // form.groups, 1), tuple(shape), False)


@lru_cache(maxsize=4096)
def _divided(shape: tuple[int, ...], form: Form, last: bool) -> Runs:
    """Return the division of a block of `shape` into short runs; `last` for channels last."""
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
"""The largest channel, in elements, that is not divided, as joining several runs takes longer."""

_ROW = 512
"""The elements of a run in contiguous memory: a register holds 16 sums, each of 32 elements."""

_COLUMNS, _COLUMN = 1024, 256
"""With channels last, the number of runs side by side whose sums stay in the first-level cache, and
the elements of each run. Such a matrix stays in the second-level cache while a kernel reads it
twice."""


def divisor_from(n: int, least: int) -> int:
    """Return the smallest divisor of `n` from `least` to 16 * `least`; `n` if there is none."""
    return next((k for k in range(max(least, 1), min(n, 16 * least)) if n % k == 0), n)


_FEWEST = 2**13
"""The elements of a sample from which a kernel call for each sample is faster than a copy."""


def rows_if_small(x: Tensor, form: Form) -> Tensor:
    """Return `x`, as a contiguous copy if that takes less time than a kernel call per sample."""
    each = form.of_each_sample and x.shape[0] > 1 and has_channels_last(x)
    return x.contiguous() if each and not (form.in_runs and x[0].numel() >= _FEWEST) else x


def in_format_of(x: Tensor, other: Tensor) -> Tensor:
    """Return `x` as a dense tensor in the memory format of `other`; a copy only if needed."""
    last = has_channels_last(other)
    form = CHANNELS_LAST[x.dim()] if last else torch.contiguous_format
    return with_batch_stride(x.contiguous(memory_format=form))


def with_batch_stride(x: Tensor) -> Tensor:
    """Return a view of the block `x` whose batch stride is that of its memory format.

    The batch dimension of a single sample may have any stride. With another stride than that of the
    memory format, torch's kernels read gradients of the other memory format in the wrong order.
    """
    if not x.numel() or x.shape[0] != 1 or x.is_contiguous() or x.stride(0) == x.numel():
        return x
    return x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))


# Mean and variance over dimensions that may be partitioned.
#
# Means and variances of runs, and of ranks, are combined by the pairwise update of Chan, Golub
# and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
# which does not cancel as E[x^2] - E[x]^2 does.


@lru_cache(maxsize=4096)
def element_counts_of_peers(
    x: Placement, over: tuple[int, ...], group: tuple[str, ...], block: int = 1
) -> tuple[int, ...]:
    """Return the number of elements of one mean on each rank along the axes `group`, in rank order.

    The mean is over the dimensions `over` of `x`. If channels are not among these dimensions, it is
    over `block` channels. No communication.
    """
    peers = x.topology.peers(x.rank, group)
    boxes = (rank_box(x.shape, x.cuts, x.topology, peer).shape for peer in peers)
    return tuple(block * prod(box[d] for d in over) for box in boxes)


def moments(x: Tensor, norm: Norm, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over the blocks `x` of all ranks along `norm.group`.

    Both have shape (samples, groups) and the accumulation type of `x`. Collective over the ranks
    along `norm.group`.
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
    """Return mean and biased variance over the elements of all ranks along the axes `group`.

    `own`, of shape (2, ...), has mean and biased variance of this rank's elements, or zeros on a
    rank without elements. `counts` has the number of elements of one mean on each of these ranks.
    Collective over the ranks along `group`.
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
    """Return mean and biased variance of the union of parts with equal numbers of elements.

    `means` and `variances` have the mean and the variance of each part; the parts are joined along
    the dimensions `over`.
    """
    between, mean = torch.var_mean(means, over, correction=0)
    return mean, between.add_(variances.mean(over))


@remembered
def _shares(device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return each rank's fraction of all elements, for ranks with `counts` elements."""
    numbers = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    return numbers.to(dtype)


def _of_block(x: Tensor, form: Form) -> Tensor:
    """Return mean and biased variance of the block `x`, not empty, as (2, samples, groups)."""
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
    # On CPUs torch.var_mean takes thirty times as long as the following functions.
    mean = x.mean(over, keepdim=True)
    if x.numel() <= _PIECE:
        return mean.flatten(), torch.ops.aten.mse_loss(x, mean, 0).mean(over)
    pieces = (t.split(max(1, _PIECE * x.shape[1] // x.numel()), 1) for t in (x, mean))
    squares = [torch.ops.aten.mse_loss(*piece, 0).mean(over) for piece in zip(*pieces, strict=True)]
    return mean.flatten(), torch.cat(squares)


_LITTLE = 2**14
"""The elements up to which one call is faster than three calls, although it is slow for rows."""

_PIECE = 2**18
"""The elements processed at once: allocating memory of an activation's size takes longer than the
arithmetic."""


# The running statistics of a norm, and their update in training.


class RunningStatistics(NamedTuple):
    """Running mean and variance of this rank's channels, and how a mini-batch updates them.

    Attributes
    ----------
    mean, variance: tensors (channels,), which are updated in place.
    momentum: the weight of the mini-batch.
    elements: the number of elements of one mean on all ranks that share it.
    rest, groups: the grid axes along which ranks do not share statistics, and the number of groups
        of ranks that share statistics and have elements. The update is the mean over the groups.
    publish: a collective function that gathers the updated statistics to all ranks; None if every
        rank has all channels.
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
        """Update the running statistics with the mean and biased variance of a mini-batch.

        `mean` and `variance` have one number for each channel. Collective.
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
    """Return the gradients of input, weight and bias of a norm, recorded by autograd.

    So the gradients can be differentiated again, to any order. `dy` is the gradient of the norm of
    the block `x`; gradients of weight and bias are of this block only. Collective over the ranks
    along `norm.group`.
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
