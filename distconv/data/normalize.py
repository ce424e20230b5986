"""`Normalize`: a transform that scales the channels of samples as they are read."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.layout import Box


class Normalize:
    """Scale each channel to (x - mean) / deviation, and clip the result to +-`limit` if given.

    A transform for `Dataset`: it gets this rank's block (samples, channels, ...) and changes it in
    place.

    Parameters
    ----------
    mean: the mean of each channel.
    deviation: the standard deviation of each channel, positive.
    limit: the largest magnitude of the result, in deviations; None for no clipping.

    Raises
    ------
    ValueError For means that are not finite, deviations that are not positive, or unequal numbers
    of them.
    """

    def __init__(self, mean: Any, deviation: Any, limit: float | None = None) -> None:
        self.mean = torch.as_tensor(mean, dtype=torch.float64).reshape(-1)
        self.deviation = torch.as_tensor(deviation, dtype=torch.float64).reshape(-1)
        self.limit = limit
        if self.mean.shape != self.deviation.shape:
            raise ValueError(
                f"Normalize: {len(self.mean)} means and {len(self.deviation)} deviations; expected "
                "one of each for every channel"
            )
        for mean, deviation in zip(self.mean.tolist(), self.deviation.tolist(), strict=True):
            if not isfinite(mean):
                raise ValueError(f"Normalize: mean {mean} of a channel; expected finite numbers")
            if not 0 < deviation < inf:
                raise ValueError(
                    f"Normalize: deviation {deviation} of a channel; expected finite numbers above "
                    "0, such as 1 for a channel that is constant"
                )

    def __call__(self, block: Tensor, box: Box) -> Tensor:
        """Scale, in place, this rank's block of a mini-batch; `box` are its indices there."""
        if block.dim() < 2 or box.stop[1] > len(self.mean):
            raise ValueError(
                f"Normalize: {len(self.mean)} channels are known, and the values at {box} have "
                "others; expected (samples, channels, ...)"
            )
        shape = (-1, *[1] * (block.dim() - 2))
        channels = box.slices[1]
        mean, deviation = (
            x[channels].to(block.dtype).reshape(shape) for x in (self.mean, self.deviation)
        )
        block.sub_(mean).div_(deviation)
        return block if self.limit is None else block.clamp_(-self.limit, self.limit)
