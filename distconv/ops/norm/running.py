"""The running statistics of a norm, and their update in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce
from distconv.grid.interface import Grid
from distconv.ops.support.operands import in_type


class RunningStatistics(NamedTuple):
    """Running mean and variance of this rank's channels, and how a mini-batch changes them.

    Attributes
    ----------
    mean, variance: tensors (channels,), which are updated in place.
    momentum: the weight of the mini-batch.
    elements: the number of elements of a statistic on all ranks.
    rest, groups: the grid axes that separate groups of ranks with statistics of their own, and the
        number of groups that have elements. Running statistics take the mean over the groups.
    publish: a collective function that makes the updated statistics known to all ranks.
    """

    mean: Tensor
    variance: Tensor
    momentum: float
    elements: int
    grid: Grid
    rest: tuple[str, ...]
    groups: int
    publish: Callable[[], None]

    def update(self, mean: Tensor, variance: Tensor) -> None:
        """Take in the mini-batch's mean and biased variance, one number for each channel.

        Collective.
        """
        mean, variance = mean.flatten(), variance.flatten() * (self.elements / (self.elements - 1))
        if self.rest:
            total = all_reduce(torch.stack([mean, variance]), self.grid, self.rest)
            mean, variance = total / self.groups
        self.mean.lerp_(in_type(mean, self.mean.dtype), self.momentum)
        self.variance.lerp_(in_type(variance, self.variance.dtype), self.momentum)
        self.publish()
