"""Stand-ins on CPUs for torch's kernels for synchronised batch norm, which only accelerators have.

They compute what torch's documentation of `SyncBatchNorm` says, and refuse what the kernels of CUDA
read wrongly or not at all: numbers for channels that are not contiguous, and other types.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from distconv.grid.interface import Grid

ALWAYS = property(lambda self: True, lambda self, value: None)
"""In place of an attribute, a property that is true whatever it is set to."""


@contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Let norms on this CPU take the way of accelerators within the context."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{kernel.__name__}", kernel, "CPU")
    try:
        with mock.patch.object(Grid, "computes_on_gpu", ALWAYS, create=True):
            yield
    finally:
        library._destroy()


def _check(x: Tensor, *numbers: Tensor | None) -> None:
    last = x.dim() > 3 and x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])
    assert x.is_contiguous() or last, "a block with gaps"
    for t in numbers:
        assert t is None or (t.dim() == 1 and t.is_contiguous()), "numbers that are not contiguous"
        assert t is None or t.dtype == _statistics(x), "numbers of another type"


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _strides(x: Tensor) -> list[int]:
    return [n for n, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _statistics(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _over(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _along(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.view(-1, *(1,) * (x.dim() - 2))


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x)
    variance, mean = torch.var_mean(x.to(_statistics(x)), _over(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    kind = x.dtype if running_mean is None else running_mean.dtype
    assert counts.dtype == kind and bool((counts > 0).all()), "counts divide, in the type of x"
    total, shares = counts.sum(), (counts / counts.sum()).unsqueeze(1)
    whole = (mean * shares).sum(0)
    variance = ((invstd**-2 - eps + (mean - whole) ** 2) * shares).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(whole, momentum)
        running_var.lerp_(variance * total / (total - 1), momentum)
    return whole, (variance + eps).rsqrt()


def elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    _check(x.permute(2, 1, 0) if x.dim() == 3 and x.stride(0) == 1 else x)
    _check(x.new_empty(0), weight, bias, mean, invstd)
    y = (x - _along(mean, x)) * _along(invstd, x)
    y = y if weight is None else y * _along(weight, x)
    return torch.empty_like(x).copy_(y if bias is None else y + _along(bias, x))


def backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, mean, invstd, weight)
    _check(dy)
    assert _strides(dy) == _strides(x) and not (weight_g and weight is None)
    rows = dy.to(mean.dtype)
    sum_dy = rows.sum(_over(x))
    sum_dy_xmu = (rows * (x - _along(mean, x))).sum(_over(x))
    none = x.new_empty(0)
    return (
        *((sum_dy, sum_dy_xmu) if input_g else (none, none)),
        sum_dy_xmu * invstd if weight_g else none,
        sum_dy.clone() if bias_g else none,
    )


def backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    _check(x, mean, invstd, weight, sum_dy, sum_dy_xmu)
    assert count.dtype == torch.int32 and _strides(dy) == _strides(x)
    n = count.sum()
    slope = invstd.square() * sum_dy_xmu / n
    dx = dy - _along(sum_dy / n, x) - (x - _along(mean, x)) * _along(slope, x)
    gain = invstd if weight is None else invstd * weight
    return (dx * _along(gain, x)).to(x.dtype)
