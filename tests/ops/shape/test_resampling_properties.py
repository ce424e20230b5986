"""Padding, interpolation and pixel shuffle equal the serial ones for any arguments, on any grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st

from tests.support.strategies import FLOATING, INTEGER, Case, each, on_any_grid, sizes

pytestmark = pytest.mark.gpu

MODES = {
    1: ["nearest", "nearest-exact", "linear", "area"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    3: ["nearest", "nearest-exact", "trilinear", "area"],
}


@on_any_grid(7)
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_and_cropping_equal_serial(case: Case, mode: str) -> None:
    n = case.one_of(2, 1, 3)
    named = case.draw(sizes(1, n + 2)) if mode == "constant" else n
    amounts = case.draw(st.tuples(*[st.tuples(st.integers(-3, 4), st.integers(-3, 4))] * named))
    value = case.one_of(None, 2.5) if mode == "constant" else None
    dtype = case.one_of(*FLOATING, torch.int64, torch.bool)
    x = case.tensor(case.plane(n), "normal", "wild", dtype=dtype)
    if mode != "constant":
        along = list(zip(reversed(x.shape), amounts, strict=False))
        # The serial gradient of an empty result is arbitrary, and so are the serial values of a
        # plane that is cropped and then wrapped more than once.
        assume(all(size + sum(pair) for size, pair in along))
        if mode == "circular":
            assume(
                all(size + min(*pair, 0) + min(max(pair), 0) >= max(pair) for size, pair in along)
            )
    flat = [amount for pair in amounts for amount in pair]
    case.agrees(lambda x: F.pad(x, flat, mode, value), x)


@on_any_grid(18)
def test_interpolation_equals_serial_in_every_mode(case: Case) -> None:
    n = case.one_of(2, 1, 3)
    mode = case.one_of(*MODES[n])
    arguments: dict[str, Any] = {"mode": mode}
    if ("linear" in mode or mode == "bicubic") and case.flag():
        arguments["align_corners"] = case.flag()
    if mode in ("bilinear", "bicubic"):
        arguments["antialias"] = case.flag()
    by_size = case.flag()
    if by_size:
        arguments["size"] = case.draw(each(sizes(1, 19), n))
    else:
        factors = st.sampled_from([2.0, 0.7, 1.0, 1.5, 2.3, 3.0])
        arguments["scale_factor"] = case.draw(each(factors, n))
        arguments["recompute_scale_factor"] = case.one_of(None, False, True)
    # With antialias serial torch repeats the first row of a plane of one column.
    shape = case.plane(n, smallest=2 if arguments.get("antialias") else 1)
    dtype = case.one_of(torch.float64, torch.float64, torch.float64, torch.float32, torch.uint8)
    x = case.tensor(shape, "normal", "negative", "ties", dtype=dtype)
    case.agrees(
        lambda x: F.interpolate(x, **arguments),
        x,
        unsupported=r"mode='\w+' of torch.uint8 on a partitioned plane|of one column|disagree",
        # Single precision rounds the positions as well.
        tolerance=19 * 2**-22 if dtype == torch.float32 else None,
    )


@on_any_grid(9)
def test_pixel_shuffle_and_its_inverse_equal_serial(case: Case) -> None:
    r, up = case.draw(sizes(1, 3)), case.flag()
    lead = [case.draw(sizes(1, 4)) for _ in range(case.one_of(1, 0, 2))]
    channels, *plane = (case.draw(sizes(1, most)) for most in (3, 7, 5))
    shape = [*lead, channels * r * r, *plane] if up else [*lead, channels, *(r * m for m in plane)]
    x = case.tensor(shape, "normal", "wild", dtype=case.one_of(torch.float64, *INTEGER))
    case.agrees(lambda x: (F.pixel_shuffle if up else F.pixel_unshuffle)(x, r), x)
