"""Convolution, pooling and patches equal the serial ones for any arguments, on any grid."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import distconv as dc
from distconv.ops.conv.channel_algorithms import parallel
from tests.support.strategies import FLOATING, INTEGER, Case, each, on_any_grid, sizes

pytestmark = pytest.mark.gpu

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
UNPOOL = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
POWER = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}
ADAPTIVE = {
    "max": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
    "average": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
}


def unbatched(case: Case, shape: list[int]) -> list[int]:
    """Draw the shape, or now and then the shape of a single sample."""
    return shape if case.draw(st.integers(0, 4)) else shape[1:]


def by_any_method(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by a drawn method, or by the default one.

    Where channels are cut, they are divided by any of the algorithms.
    """
    method = case.one_of(None, "overlapped", "overlapped", "assembled")
    algorithm = case.one_of("auto", "x", "y", "w")

    def call(*operands: Tensor) -> Any:
        with ExitStack() as choices:
            choices.enter_context(parallel(algorithm))
            if method is not None:
                choices.enter_context(dc.method(method))
            return function(*operands)

    return call


@on_any_grid(18, [3, 8])
def test_convolution_equals_serial_for_all_arguments(case: Case) -> None:
    n, groups = case.one_of(2, 1, 3), case.one_of(1, 1, 2, 3)
    channels, filters = groups * case.draw(sizes(1, 2)), groups * case.draw(sizes(1, 3))
    kernel = [case.draw(sizes(1, 7 if n == 1 else 4)) for _ in range(n)]
    arguments = dict(
        stride=case.draw(each(sizes(1, 3), n)),
        padding=case.draw(st.one_of(each(sizes(0, 3), n), st.sampled_from(["same", "valid"]))),
        dilation=case.draw(each(sizes(1, 3), n)),
        groups=groups,
    )
    if arguments["padding"] == "same":
        arguments["stride"] = 1
    dtype = case.one_of(torch.float64, torch.float64, torch.float32)
    tensors = [
        case.tensor(unbatched(case, case.plane(n, channels)), dtype=dtype),
        case.tensor([filters, channels // groups, *kernel], dtype=dtype),
    ]
    if case.flag():
        tensors.append(case.tensor([filters], dtype=dtype))
    cut = case.one_of(None, [0])
    function = by_any_method(case, lambda x, w, b=None: CONV[n](x, w, b, **arguments))
    case.agrees(function, *tensors, cut=cut)


@on_any_grid(14, [3])
def test_transposed_convolution_equals_serial_for_all_arguments(case: Case) -> None:
    n, groups = case.one_of(2, 1, 3), case.one_of(1, 1, 2)
    channels, filters = groups * case.draw(sizes(1, 2)), case.draw(sizes(1, 3))
    kernel = [case.draw(sizes(1, 5 if n == 1 else 4)) for _ in range(n)]
    stride, dilation = ([case.draw(sizes(1, most)) for _ in range(n)] for most in (3, 2))
    arguments = dict(
        stride=stride,
        padding=[case.draw(sizes(0, 2)) for _ in range(n)],
        output_padding=[
            case.draw(sizes(0, max(s, d) - case.one_of(1, 1, 1, 0)))
            for s, d in zip(stride, dilation, strict=True)
        ],
        dilation=dilation,
        groups=groups,
    )
    tensors = [
        case.tensor(unbatched(case, case.plane(n, channels))),
        case.tensor([channels, filters, *kernel]),
    ]
    if case.flag():
        tensors.append(case.tensor([filters * groups]))
    cut = case.one_of(None, [0])
    function = by_any_method(case, lambda x, w, b=None: TRANSPOSED[n](x, w, b, **arguments))
    case.agrees(function, *tensors, cut=cut)


def windows(case: Case, n: int, padding: int = 1) -> dict[str, Any]:
    return dict(
        kernel_size=case.draw(each(sizes(1, 4), n)),
        stride=case.draw(st.one_of(st.none(), each(sizes(1, 4), n))),
        padding=case.draw(each(sizes(0, padding), n)),
        ceil_mode=case.flag(),
    )


@on_any_grid(14, [3])
def test_max_pooling_equals_serial_with_and_without_indices(case: Case) -> None:
    n = case.one_of(2, 1, 3)
    arguments = windows(case, n, 2)
    dilation = case.one_of(1, 2)
    arguments |= dict(dilation=dilation, return_indices=case.flag())
    # Of windows that lie in the padding throughout, as dilated ones may on a smaller plane, the
    # gradient differs.
    x = case.tensor(
        unbatched(case, case.plane(n, smallest=dilation)),
        *("normal", "negative", "ties", "equal", "nan", "infinite"),
        dtype=case.one_of(torch.float64, *FLOATING, *INTEGER),
    )
    case.agrees(by_any_method(case, lambda x: MAX[n](x, **arguments)), x)


@on_any_grid(9)
def test_max_unpooling_equals_serial(case: Case) -> None:
    n = case.one_of(2, 1, 3)
    kernel, stride = case.draw(each(sizes(2, 3), n)), case.one_of(None, 2, 3)
    padding = case.one_of(0, 0, 1)
    x = case.tensor(unbatched(case, case.plane(n, smallest=4)), "normal", "negative", "ties")
    # Without a size the maxima of a plane that the windows do not fill would lie outside of it.
    filled = kernel == 2 and stride in (None, 2) and not any(m % 2 for m in x.shape[-n:])
    size = None if filled and not padding else x.shape[-n:]

    def back_and_forth(x: torch.Tensor) -> torch.Tensor:
        values, indices = MAX[n](x, kernel, stride, padding, return_indices=True)
        return UNPOOL[n](values, indices, kernel, stride, padding, size)

    case.agrees(back_and_forth, x)


@on_any_grid(14)
def test_average_pooling_equals_serial_for_every_divisor(case: Case) -> None:
    n = case.one_of(2, 1, 3)
    arguments = windows(case, n, 2)
    arguments["count_include_pad"] = case.flag()
    if n > 1:
        arguments["divisor_override"] = case.one_of(None, None, 3, -2)
    x = case.tensor(
        unbatched(case, case.plane(n)),
        *("normal", "negative", "ties", "nan"),
        dtype=case.one_of(torch.float64, *FLOATING, *INTEGER),
    )
    case.agrees(by_any_method(case, lambda x: AVERAGE[n](x, **arguments)), x)


@on_any_grid(14)
def test_adaptive_pooling_equals_serial_for_every_size(case: Case) -> None:
    n, kind = case.one_of(2, 1, 3), case.one_of("average", "max")
    dtype = case.one_of(torch.float64, *FLOATING, torch.int64)
    # Serial torch refuses integers, unless nothing is left of them.
    size = case.draw(each(sizes(0 if dtype.is_floating_point else 1, 9), n))
    if n > 1 and case.flag():
        size = tuple(case.one_of(None, 4) for _ in range(n))
    x = case.tensor(
        unbatched(case, case.plane(n)), *("normal", "negative", "ties", "nan"), dtype=dtype
    )
    case.agrees(lambda x: ADAPTIVE[kind][n](x, size), x)


@on_any_grid(7)
def test_power_average_pooling_equals_serial(case: Case) -> None:
    n, norm = case.one_of(2, 1, 3), case.one_of(2, 1, 3, 1.5)
    arguments = windows(case, n)
    del arguments["padding"]
    x = case.tensor(unbatched(case, case.plane(n)), "positive")
    case.agrees(lambda x: POWER[n](x, norm, **arguments), x)


@on_any_grid(9)
def test_windows_as_columns_equal_serial(case: Case) -> None:
    arguments = dict(
        kernel_size=case.draw(each(sizes(1, 4), 2)),
        dilation=case.draw(each(sizes(1, 2), 2)),
        padding=case.draw(each(sizes(0, 2), 2)),
        stride=case.draw(each(sizes(1, 3), 2)),
    )
    x = case.tensor(unbatched(case, case.plane(2)), "normal", "wild")
    case.agrees(lambda x: F.unfold(x, **arguments), x)


@on_any_grid(9)
def test_columns_added_up_equal_serial(case: Case) -> None:
    size, kernel = (case.draw(st.tuples(s, s)) for s in (sizes(3, 9), sizes(1, 3)))
    dilation, padding, stride = (case.draw(sizes(a, b)) for a, b in ((1, 2), (0, 1), (1, 3)))
    arguments = (size, kernel, dilation, padding, stride)
    reached = [
        max((n + 2 * padding - dilation * (k - 1) - 1) // stride + 1, 1)
        for n, k in zip(size, kernel, strict=True)
    ]
    columns = [case.draw(sizes(1, 3)) * kernel[0] * kernel[1], reached[0] * reached[1]]
    x = case.tensor(unbatched(case, [case.draw(sizes(1, 4)), *columns]))
    case.agrees(lambda x: F.fold(x, *arguments), x)
