"""Convolutions and fully connected layers with a choice of how channels are divided over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from distconv.ops.conv.channel_algorithms import ALGORITHMS, parallel


class _ChannelParallel(nn.Module):
    """The base class of layers with a choice, `parallel`, for partitioned channels."""

    def __init__(self, *args: Any, parallel: str = "auto", **kwargs: Any):
        super().__init__(*args, **kwargs)
        if parallel not in ALGORITHMS:
            raise ValueError(
                f"{type(self).__name__}: parallel={parallel!r} is unknown; choose from "
                f"{', '.join(ALGORITHMS)}"
            )
        self.parallel = parallel

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with parallel(self.parallel):
            result: Tensor = super().forward(*args, **kwargs)
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parallel={self.parallel}"


class Conv1d(_ChannelParallel, nn.Conv1d):
    """torch.nn.Conv1d with an algorithm, `parallel`, for partitioned channels; see `Conv2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(layers.Conv1d(4, 8, 3, padding=1, parallel="x"), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(2, 4, 100), grid))
    >>> tuple(y.shape), tuple(y.to_local().shape)
    ((2, 8, 100), (2, 4, 100))
    """


class Conv2d(_ChannelParallel, nn.Conv2d):
    """torch.nn.Conv2d with an algorithm, `parallel`, for partitioned channels.

    Parameters
    ----------
    parallel: the algorithm of Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN
        Training" (SC'19), which divides the layer if the channels of its input are partitioned.
        "x": the input stays on its ranks; each rank computes the contribution of its channels to
        all filters, and the sums are scattered. For layers with fewer filters than channels.
        "y": the input is gathered; each rank computes its own filters of all channels. For layers
        with more filters than channels.
        "w": both, for channels that are partitioned over two grid axes: the input is gathered over
        the last axis, and the sums are scattered over the first. If the channels are partitioned
        over one axis and the input is replicated along "filter" (or "channel"), this is the other
        axis. The output is partitioned over the same axes in the other order, as the next such
        layer needs it.
        "auto": the algorithm that moves the fewest elements, forward and backward.
        An algorithm that does not apply, such as "w" on a single grid axis, is replaced by "auto".
        The layout of a weight that is itself distributed takes precedence. In grouped layers every
        rank gathers the channels that its own filters need.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(layers.Conv2d(4, 8, 3, padding=1, parallel="x"), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(2, 4, 16, 16), grid))
    >>> tuple(y.shape), tuple(y.to_local().shape)
    ((2, 8, 16, 16), (2, 4, 16, 16))
    """


class Conv3d(_ChannelParallel, nn.Conv3d):
    """torch.nn.Conv3d with an algorithm, `parallel`, for partitioned channels; see `Conv2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(layers.Conv3d(4, 8, 3, padding=1, parallel="y"), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(1, 4, 8, 8, 8), grid))
    >>> tuple(y.shape), tuple(y.to_local().shape)
    ((1, 8, 8, 8, 8), (1, 4, 8, 8, 8))
    """


class ConvTranspose1d(_ChannelParallel, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with a choice, `parallel`, for partitioned channels; see `Conv2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(layers.ConvTranspose1d(8, 4, 2, stride=2, parallel="x"), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(2, 8, 50), grid))
    >>> tuple(y.shape), tuple(y.to_local().shape)
    ((2, 4, 100), (2, 2, 100))
    """


class ConvTranspose2d(_ChannelParallel, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with a choice, `parallel`, for partitioned channels; see `Conv2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(layers.ConvTranspose2d(8, 4, 2, stride=2, parallel="x"), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(2, 8, 8, 8), grid))
    >>> tuple(y.shape), tuple(y.to_local().shape)
    ((2, 4, 16, 16), (2, 2, 16, 16))
    """


class ConvTranspose3d(_ChannelParallel, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d with a choice, `parallel`, for partitioned channels; see `Conv2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(layers.ConvTranspose3d(8, 4, 2, stride=2, parallel="y"), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(1, 8, 4, 4, 4), grid))
    >>> tuple(y.shape), tuple(y.to_local().shape)
    ((1, 4, 8, 8, 8), (1, 2, 8, 8, 8))
    """


class Linear(_ChannelParallel, nn.Linear):
    """torch.nn.Linear with an algorithm, `parallel`, for partitioned features; see `Conv2d`.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(layers.Linear(64, 32, parallel="x"), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(8, 64), grid))
    >>> tuple(y.shape), tuple(y.to_local().shape)
    ((8, 32), (8, 16))
    """
