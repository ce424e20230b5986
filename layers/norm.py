"""Batch and group normalisation with a choice of the ranks over which statistics are computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from distconv.ops.norm.functions import SPATIAL, batch_norm_over, group_norm_over
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.recording import recorded
from distconv.torch_private import BatchNorm

_STATISTICS: dict[str, tuple[str, ...] | None] = {
    "global": None,
    "sample": ("channel", "filter", *SPATIAL),
    "local": (),
}


class _DistributedBatchNorm(BatchNorm):
    """Batch normalisation over (sample, channel, *spatial); see `BatchNorm2d`."""

    def __init__(self, *args: Any, statistics: str = "global", **kwargs: Any):
        super().__init__(*args, **kwargs)
        if statistics not in _STATISTICS:
            raise ValueError(
                f"{type(self).__name__}: statistics={statistics!r} is unknown; choose 'global', "
                "'sample' or 'local'"
            )
        self.statistics = statistics

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DistTensor) or self.statistics == "global":
            return super().forward(input)
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        tracking = not self.training or self.track_running_stats
        _, weight, bias = recorded("batch_norm", (input, self.weight, self.bias))
        return batch_norm_over(
            _STATISTICS[self.statistics],
            input,
            self.running_mean if tracking else None,
            self.running_var if tracking else None,
            weight,
            bias,
            self.training or self.running_mean is None,
            momentum,
            self.eps,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, statistics={self.statistics}"


class BatchNorm1d(_DistributedBatchNorm, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d with a choice of the elements that enter the training statistics.

    See `BatchNorm2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(width=2)
    >>> model = dc.parallelize(layers.BatchNorm1d(4, statistics="sample"), grid)
    >>> y = model(dc.distribute_tensor(torch.randn(2, 4, 100), grid))
    """


class BatchNorm2d(_DistributedBatchNorm, nn.BatchNorm2d):
    """torch.nn.BatchNorm2d with a choice of the elements that enter the training statistics.

    Parameters
    ----------
    statistics: the elements that enter the training statistics.
        "global": the whole mini-batch, as in serial torch. The others do not give the serial
        result on partitioned tensors.
        "sample": all elements of the samples that this rank's group of P_S ranks shares.
        "local": this rank's own elements; the forward pass communicates only for the running
        statistics.
        The running statistics of "sample" and "local" are the mean over the groups that have
        elements, and so the same on every rank. On plain tensors all three are equal.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(layers.BatchNorm2d(4, statistics="local"), grid)
    >>> x = dc.distribute_tensor(torch.randn(2, 4, 8, 8), grid)
    >>> model(x).to_local().mean().abs().item() < 1e-6  # of this rank's block alone
    True
    """


class BatchNorm3d(_DistributedBatchNorm, nn.BatchNorm3d):
    """torch.nn.BatchNorm3d with a choice of the elements that enter the training statistics.

    See `BatchNorm2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(depth=2)
    >>> model = dc.parallelize(layers.BatchNorm3d(4), grid)  # as torch.nn.BatchNorm3d
    >>> x = dc.distribute_tensor(torch.randn(2, 4, 8, 8, 8), grid)
    >>> model(x).mean().abs().item() < 1e-6
    True
    """


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm with a choice of the elements that enter the statistics.

    Parameters
    ----------
    statistics: the elements of a sample that enter the statistics of a group.
        "global": all of them, as in serial torch.
        "local": the elements of this rank's block, without communication. It is **not exact**: the
        result depends on the partition, so use a network with the partition of its training. On
        plain tensors, and on planes that are not partitioned, both are equal.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(layers.GroupNorm(2, 8, statistics="local"), grid)
    >>> y = model(dc.distribute_tensor(torch.randn(2, 8, 8, 8), grid))
    """

    def __init__(self, *args: Any, statistics: str = "global", **kwargs: Any):
        super().__init__(*args, **kwargs)
        if statistics not in ("global", "local"):
            raise ValueError(
                f"GroupNorm: statistics={statistics!r} is unknown; choose 'global' or 'local'"
            )
        self.statistics = statistics

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DistTensor) or self.statistics == "global":
            return super().forward(input)
        _, weight, bias = recorded("group_norm", (input, self.weight, self.bias))
        return group_norm_over((), input, self.num_groups, weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, statistics={self.statistics}"
