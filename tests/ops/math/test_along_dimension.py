"""Softmax of masked rows, and what is gathered; see also test_properties."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import agrees, random_tensor


@pytest.mark.parallel([2])
def test_what_had_to_be_gathered_is_recorded() -> None:
    grid = dc.ProcessGrid(height=2)
    x = dc.distribute_tensor(torch.ones(1, 2, 4, 3), grid)
    dc.redistributions(reset=True)
    x.cumsum(1)
    x.softmax(2)
    for scan in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin):
        scan(x, 2)
    assert dc.redistributions() == []
    x.sort(2)
    (entry,) = dc.redistributions()
    assert (entry.operator, entry.times, entry.bytes) == ("sort", 1, 2 * 2 * 3 * 4)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("size", [3, 17])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
def test_scans_equal_serial_with_gradients_of_two_orders(name: str, size: int) -> None:
    rng = random.Random(size)
    grid = dc.ProcessGrid(width=-1)
    layout = dc.Layout.of(((), ("width",)))
    x = random_tensor(rng, (2, size))
    x[0, 1] = 0.0  # a product, and then its gradient, goes through it
    x[1] = x[1].round()  # equal extremes

    def scan(x: torch.Tensor) -> torch.Tensor:
        made = getattr(torch, name)(x, 1)
        return made if isinstance(made, torch.Tensor) else made.values

    agrees(scan, [x], [], grid, rng, [layout])
    serial = x.clone().requires_grad_()
    cut = dc.distribute_tensor(x, grid, layout).requires_grad_()
    penalties = []
    for t in (serial, cut):
        # torch's logcumsumexp has no second derivative where its gradient is 0.
        (dt,) = torch.autograd.grad((scan(t) + 0.3).square().sum(), t, create_graph=True)
        dt.square().sum().backward()
        penalties.append(t.grad)
    torch.testing.assert_close(penalties[1].full_tensor(), penalties[0])


@pytest.mark.parallel([2, 3])
def test_a_product_that_leaves_the_range_after_a_zero_stays_zero() -> None:
    x = torch.full((90,), 1e2)
    x[0] = 0.0
    cut = dc.distribute_tensor(x, dc.ProcessGrid(width=-1), dc.Layout.of((("width",),)))
    torch.testing.assert_close(cut.cumprod(0).full_tensor(), x.cumprod(0))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", ["cumprod", "logcumsumexp", "cummax", "cummin"])
def test_scans_of_nan_and_infinities_equal_serial(name: str) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[-inf, -inf, 1, 2, inf, 0], [0, nan, 3, 1, nan, 5], [2, 2, 2, 2, 2, 2.0]]
    x = torch.tensor(rows)
    cut = dc.distribute_tensor(x, dc.ProcessGrid(width=-1), dc.Layout.of(((), ("width",))))
    made, expected = getattr(cut, name)(1), getattr(x, name)(1)
    if isinstance(expected, torch.Tensor):
        made, expected = [made], [expected]
    for part, serial in zip(made, expected, strict=True):
        torch.testing.assert_close(part.full_tensor(), serial, equal_nan=True)


@pytest.mark.parallel([4, 6])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cumsum(1),
        lambda x: torch.cumulative_trapezoid(x, dim=1),
        lambda x: x.transpose(0, 1).flatten().cumsum(0),
        *(
            lambda x, f=f: f(x, 1)
            for f in (F.softmax, torch.prod, torch.cumprod, torch.logcumsumexp)
        ),
        *(lambda x, f=f: f(x, 1) for f in (torch.diff, torch.cummin, torch.argmax, torch.median)),
        *(lambda x, f=f: f(x, dim=1) for f in (torch.sort, torch.cummax, torch.aminmax, torch.var)),
        lambda x: torch.quantile(x, 0.3, 1),
        lambda x: x[x > 0],
        lambda x: torch.fft.fft(x, dim=1).abs(),
        lambda x: x.roll(2, 1).flip(1),
        lambda x: x.unfold(1, 3, 2),
    ],
)
@pytest.mark.parametrize("axes", [("width", "height"), ("height", "sample"), ("width", "filter")])
def test_blocks_are_counted_in_the_order_of_the_layouts_axes(
    function: Callable, axes: tuple[str, str]
) -> None:
    rng = random.Random(3)
    grid = dc.ProcessGrid(**{axes[0]: 2, axes[1]: -1})
    layout = dc.Layout.of(((), axes))
    for columns in (11, 3):  # some blocks are empty
        x = random_tensor(rng, (2, columns))
        agrees(function, [x], [], grid, rng, [layout])


@pytest.mark.parallel([2, 3])
def test_a_cumulative_sum_keeps_nan_in_the_real_part() -> None:
    x = torch.arange(7.0).to(torch.complex128)
    x[1] = complex(torch.nan, 1)
    layout = dc.Layout.of((("width",),))
    y = dc.distribute_tensor(x, dc.ProcessGrid(width=-1), layout)
    for part in (y.conj().cumsum(0), y.cumsum(0).conj(), torch.cumsum(y.real, 0, dtype=x.dtype)):
        assert not part.full_tensor().imag.isnan().any()
    torch.testing.assert_close(y.cumsum(0).full_tensor(), x.cumsum(0), equal_nan=True)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("function", [F.softmax, F.log_softmax, F.softmin])
def test_softmax_of_masked_and_unbounded_rows(function: Callable) -> None:
    inf = float("inf")
    x = torch.tensor(
        [[-inf, 1.0, 2.0, -inf], [-inf, -inf, -inf, 3.0], [inf, 1.0, 2.0, 3.0]]
        + [[1e4, 1e4, -1e4, 0.0], [-inf, -inf, -inf, -inf], [float("nan"), 0.0, 1.0, 2.0]],
        dtype=torch.float64,
    )
    grid = dc.ProcessGrid(width=-1)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        y = dc.distribute_tensor(x.to(dtype), grid, dc.Layout.of(((), ("width",))))
        got, expected = function(y, 1).full_tensor(), function(x.to(dtype), 1)
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=2**-7, atol=2**-9)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(
    "function",
    [
        *(lambda x, f=f: f(x, 2) for f in (F.softmax, F.log_softmax, torch.cumsum, torch.prod)),
        *(lambda x, f=f: f(x, 2) for f in (torch.sum, torch.var, torch.amax, torch.nansum)),
        torch.argmax,
    ],
)
def test_ranks_may_have_blocks_in_different_memory_formats(function: Callable) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = random_tensor(random.Random(0), (2, 3, 2 * grid.size, 5)).requires_grad_()
    block = x.detach()[:, :, 2 * grid.rank : 2 * grid.rank + 2]
    form = torch.channels_last if grid.rank == 0 else torch.contiguous_format
    cut = dc.DistTensor.from_local(block.contiguous(memory_format=form), grid).requires_grad_()
    y, made = function(x), function(cut)
    torch.testing.assert_close(made.detach().full_tensor(), y.detach())
    if y.requires_grad:
        seed = random_tensor(random.Random(1), y.shape)
        y.backward(seed)
        made.backward(seed)
        torch.testing.assert_close(cut.grad.full_tensor(), x.grad)
