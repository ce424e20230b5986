"""Volumes are convolved by fast kernels of oneDNN, with results equal to torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import distconv as dc
from distconv.ops.conv import local_convolution
from distconv.ops.conv.local_convolution import (
    convolution,
    convolution_gradients,
    gains,
    recorded_convolution,
    torch_gradients,
)
from distconv.planning.operators import Operands, call_of
from distconv.planning.recording import LocalOperator, spec_of
from tests.support.serial import deviation

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)

ONE, NONE = (1, 1, 1), (0, 0, 0)

CASES: dict[str, tuple[Any, ...]] = {
    "plain": ((1, 3, 5, 6, 7), (4, 3, 3, 3, 3), ONE, ONE, ONE, False, NONE),
    "of two samples": ((2, 3, 5, 6, 7), (4, 3, 3, 3, 3), ONE, ONE, ONE, False, NONE),
    "of many channels": ((1, 17, 4, 4, 4), (2, 17, 3, 3, 3), ONE, ONE, ONE, False, NONE),
    "along the depth": ((1, 17, 4, 4, 4), (2, 17, 3, 1, 1), ONE, (1, 0, 0), ONE, False, NONE),
    "padded far": ((1, 3, 4, 4, 4), (2, 3, 2, 2, 2), ONE, (2, 3, 2), ONE, False, NONE),
    "strided": ((1, 3, 5, 6, 7), (4, 3, 3, 3, 3), (2, 1, 2), (1, 0, 1), ONE, False, NONE),
    "dilated": ((1, 2, 7, 6, 7), (3, 2, 3, 2, 3), ONE, (2, 1, 0), (2, 1, 2), False, NONE),
    "transposed": ((1, 3, 3, 4, 5), (3, 2, 2, 2, 2), (2, 2, 2), NONE, ONE, True, NONE),
    "transposed and padded": (
        *((1, 3, 3, 4, 5), (3, 2, 3, 3, 3)),
        *((2, 1, 2), ONE, ONE, True, (1, 0, 1)),
    ),
    "transposed, more outputs": (
        *((1, 3, 3, 4, 5), (3, 2, 3, 3, 3)),
        *((2, 2, 2), NONE, ONE, True, ONE),
    ),
}
"""Shapes of input and weight, and the arguments of torch.convolution, but for the groups."""


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take oneDNN however little there is to compute."""
    monkeypatch.setattr(local_convolution, "_FEWEST_PRODUCTS", 0)
    local_convolution._pays.cache_clear()
    yield
    local_convolution._pays.cache_clear()


def close(got: Tensor | None, want: Tensor | None) -> None:
    """Assert that tensors agree to the rounding of sums in float32."""
    assert got is not None and want is not None
    assert deviation(got, want) < 1e-5


def operators(run: Callable[[], object]) -> set[str]:
    """Return the names of torch's operators that a function calls."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    return {event.name for event in record.events()}


def recorded(x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> Tensor:
    assert gains(x, w, *rest)
    return recorded_convolution(x, w, b, *rest)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.usefixtures("any_size")
def test_results_and_gradients_of_any_order_are_those_of_torch(
    case: tuple[Any, ...], biased: bool, memory: torch.memory_format
) -> None:
    torch.manual_seed(0)
    shape, kernel, *arguments = case
    rest = (*arguments, 1)
    x = torch.randn(shape).contiguous(memory_format=memory).requires_grad_()
    w = torch.randn(kernel, requires_grad=True)
    filters = kernel[1 if rest[3] else 0]
    b = torch.randn(2 * filters)[::2].requires_grad_() if biased else None
    leaves = [t for t in (x, w, b) if t is not None]
    expected = torch.convolution(x, w, b, *rest)
    y = recorded(x, w, b, *rest)
    close(y, expected)
    close(convolution(x, w, b, *rest), expected)
    for dy in (torch.randn_like(expected), torch.ones(()).expand(expected.shape)):
        wanted = torch.autograd.grad(expected, leaves, dy, create_graph=True)
        for got, want in zip(
            torch.autograd.grad(y, leaves, dy, retain_graph=True), wanted, strict=True
        ):
            close(got, want)
    again = torch.autograd.grad(y, leaves, dy, create_graph=True)
    for t in (x, w):
        sums = [g[0].square().sum() + g[1].square().sum() for g in (again, wanted)]
        got, want = (torch.autograd.grad(s, t, retain_graph=True)[0] for s in sums)
        close(got, want)


@pytest.mark.parametrize("case", ["plain", "of many channels", "strided"])
@pytest.mark.parametrize("mask", list(product([False, True], repeat=3)))
@pytest.mark.usefixtures("any_size")
def test_the_gradients_that_are_asked_for_are_computed(case: str, mask: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    shape, kernel, *arguments = CASES[case]
    x, w = torch.randn(shape), torch.randn(kernel)
    dy = torch.randn_like(torch.convolution(x, w, None, *arguments, 1))
    with torch.no_grad():
        given = convolution_gradients(dy, x, w, kernel[:1], *arguments, 1, mask)
        wanted = torch_gradients(dy, x, w, kernel[:1], *arguments, 1, mask)
    for asked, got, want in zip(mask, given, wanted, strict=True):
        assert (got is not None) is asked
        if asked:
            close(got, want)


def test_small_convolutions_and_other_types_are_left_to_torch() -> None:
    rest = (ONE, ONE, ONE, False, NONE, 1)
    w = torch.randn(16, 8, 3, 3, 3)
    large, small = torch.randn(1, 8, 8, 16, 16), torch.randn(1, 8, 2, 4, 4)

    def left_to_torch(x: Tensor, w: Tensor, *rest: Any) -> bool:
        return not gains(x, w, *rest)

    assert not left_to_torch(large, w, *rest)
    assert left_to_torch(small, w, *rest)
    assert left_to_torch(large.double(), w.double(), *rest)
    assert left_to_torch(large, w.double(), *rest)
    assert left_to_torch(large, w[:, :4], *rest[:-1], 2)
    assert left_to_torch(large, w, ONE, NONE, (2, 2, 2), True, (1, 0, 0), 1)
    with torch.backends.mkldnn.flags(enabled=False):
        assert left_to_torch(large, w, *rest)


@pytest.mark.parametrize("case", ["plain", "of many channels", "strided"])
@pytest.mark.usefixtures("any_size")
def test_operations_are_counted_as_those_of_torch(case: str) -> None:
    shape, kernel, *arguments = CASES[case]
    x, w = torch.randn(shape, requires_grad=True), torch.randn(kernel, requires_grad=True)
    counts = []
    recorded(x, w, None, *arguments, 1)
    for run in (torch.convolution, recorded_convolution):
        with FlopCounterMode(display=False) as counter:
            run(x, w, None, *arguments, 1).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parallel([2, 3])
def test_a_dilated_transposed_convolution_of_a_volume_is_that_of_torch() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 8, 16, 16, 32), torch.randn(8, 8, 3, 3, 3)
    whole: Any = x.clone().requires_grad_()
    mine: Any = dc.distribute_tensor(x, dc.ProcessGrid(depth=-1)).requires_grad_()
    for t in (whole, mine):
        F.conv_transpose3d(t, w, dilation=2).square().sum().backward()
    close(mine.grad.full_tensor(), whole.grad)


@pytest.mark.parallel(2)
def test_a_checkpoint_of_a_volume_has_the_same_gradients() -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 8, 3, 3, 3, requires_grad=True)
    x = dc.distribute_tensor(torch.randn(1, 8, 16, 16, 16), dc.ProcessGrid(depth=-1))

    def layer(x: Any) -> Any:
        return F.conv3d(x, w, padding=1).relu()

    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        run(x).square().sum().backward()
        gradients.append(w.grad)
        w.grad = None
    close(*gradients)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("method", ["assembled", "overlapped"])
def test_blocks_of_a_volume_are_convolved_by_onednn(method: str) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(depth=-1)
    x, w = torch.randn(1, 4, 24, 32, 32), torch.randn(8, 4, 3, 3, 3)
    up = torch.randn(8, 8, 2, 2, 2)

    def run(x: Any) -> Any:
        y = F.conv_transpose3d(F.conv3d(x, w, padding=1).relu(), up, stride=2)
        y.square().mean().backward()
        return y

    whole: Any = x.clone().requires_grad_()
    mine: Any = dc.distribute_tensor(x, grid).requires_grad_()
    for t in (w, up):
        t.requires_grad_()
    expected = run(whole)
    serial = [t.grad for t in (w, up)]
    w.grad = up.grad = None
    with dc.method(method):
        called = operators(lambda: close(run(mine).full_tensor().detach(), expected.detach()))
    assert "aten::mkldnn_convolution" in called
    assert "aten::to_mkldnn" in called
    assert not {n for n in called if "slow_conv3d" in n}
    gradient: Any = mine.grad
    close(gradient.full_tensor(), whole.grad)
    for t, want in zip((w, up), serial, strict=True):
        gradient = t.grad
        close(gradient, want)


def test_operators_are_timed_as_they_are_computed() -> None:
    x, w = torch.randn(1, 8, 8, 16, 16), torch.randn(16, 8, 3, 3, 3)
    arguments: Any = (x, w, None, (1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1)
    made = spec_of((torch.convolution(*arguments),))
    operator = LocalOperator("aten.convolution.default", spec_of(arguments), (), made)
    with torch.no_grad():
        assert "aten::mkldnn_convolution" in operators(call_of(operator, Operands([operator])))
