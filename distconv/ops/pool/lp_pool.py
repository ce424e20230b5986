"""Power-average pooling on cut planes."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.support.argument_forms import Sizes, to_tuple
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def _power_average(spatial: int, function: Any, average: Any) -> None:
    @implements(function)
    def rule(
        input: DistTensor,
        norm_type: float,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        ceil_mode: bool = False,
    ) -> Tensor:
        """Return the p-norm over windows, computed from an average as torch does."""
        if not isinstance(kernel_size, int) and (spatial == 1 or len(kernel_size) != spatial):
            expected = "a number" if spatial == 1 else f"a number or {spatial} of them"
            raise TypeError(f"lp_pool{spatial}d: kernel_size={kernel_size!r}; expected {expected}")
        mean: Any = average(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
        total = torch.sign(mean) * F.relu(torch.abs(mean))
        return total.mul(prod(to_tuple(kernel_size, spatial, "kernel_size"))).pow(1.0 / norm_type)


_power_average(1, F.lp_pool1d, F.avg_pool1d)


_power_average(2, F.lp_pool2d, F.avg_pool2d)


_power_average(3, F.lp_pool3d, F.avg_pool3d)
