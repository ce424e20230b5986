"""Volumes are convolved by oneDNN where torch would take a slower kernel, with equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import distconv as dc
from distconv.ops.conv import volumes
from distconv.ops.conv.volumes import convolution, convolution_gradients, recorded_by_onednn
from distconv.planning.local_operators import LocalOperator, spec_of
from distconv.planning.operator_calls import Operands, call_of
from tests.support.serial import deviation

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)

CASES = {
    "plain": ((1, 3, 5, 6, 7), (4, 3, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), False),
    "of two samples": ((2, 3, 5, 6, 7), (4, 3, 3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, False),
    "of many channels": ((1, 17, 4, 4, 4), (2, 17, 3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, False),
    "padded far": ((1, 3, 4, 4, 4), (2, 3, 2, 2, 2), (1,) * 3, (2, 3, 2), (1,) * 3, False),
    "strided": ((1, 3, 5, 6, 7), (4, 3, 3, 3, 3), (2, 1, 2), (1, 0, 1), (1, 1, 1), False),
    "dilated": ((1, 2, 7, 6, 7), (3, 2, 3, 2, 3), (1, 1, 1), (2, 1, 0), (2, 1, 2), False),
    "transposed": ((1, 3, 3, 4, 5), (3, 2, 2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), True),
    "transposed and padded": (
        (1, 3, 3, 4, 5),
        (3, 2, 3, 3, 3),
        (2, 1, 2),
        (1, 1, 1),
        (1,) * 3,
        True,
    ),
}


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take oneDNN however little there is to compute."""
    monkeypatch.setattr(volumes, "_FEWEST_PRODUCTS", 0)
    volumes._gains.cache_clear()
    yield
    volumes._gains.cache_clear()


def close(got: Tensor | None, want: Tensor | None) -> None:
    """Compare elements of float32, of which many have been added up."""
    assert got is not None and want is not None
    assert deviation(got, want) < 1e-5


def operators(run: Callable[[], object]) -> set[str]:
    """Return the names of torch's operators that a function calls."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    return {event.name for event in record.events()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.usefixtures("any_size")
def test_results_and_gradients_of_any_order_are_those_of_torch(
    case: tuple[Any, ...], biased: bool
) -> None:
    torch.manual_seed(0)
    shape, kernel, *arguments = case
    rest = (*arguments, (0, 0, 0), 1)
    x = torch.randn(shape, requires_grad=True)
    w = torch.randn(kernel, requires_grad=True)
    b = torch.randn(kernel[1 if rest[3] else 0], requires_grad=True) if biased else None
    leaves = [t for t in (x, w, b) if t is not None]
    expected = torch.convolution(x, w, b, *rest)
    y = recorded_by_onednn(x, w, b, *rest)
    assert y is not None
    close(y, expected)
    dy = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, dy, create_graph=True)
    close(convolution(x, w, b, *rest).detach(), expected)
    for got, want in zip(
        torch.autograd.grad(y, leaves, dy, retain_graph=True), wanted, strict=True
    ):
        close(got, want)
    again = torch.autograd.grad(y, leaves, dy, create_graph=True)
    for t in (x, w):
        sums = [g[0].square().sum() + g[1].square().sum() for g in (again, wanted)]
        got, want = (torch.autograd.grad(s, t, retain_graph=True)[0] for s in sums)
        close(got, want)


@pytest.mark.usefixtures("any_size")
def test_gradients_that_nobody_asks_for_are_not_computed() -> None:
    x, w = torch.randn(1, 2, 4, 4, 4), torch.randn(2, 2, 3, 3, 3)
    rest = ((1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1)
    with torch.no_grad():
        dx, dw, db = convolution_gradients(x, x, w, [2], *rest, [False, True, False])
    assert dx is None and db is None and dw is not None


def test_small_convolutions_and_other_types_are_left_to_torch() -> None:
    rest = ((1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1)
    w = torch.randn(16, 8, 3, 3, 3)
    large, small = torch.randn(1, 8, 8, 16, 16), torch.randn(1, 8, 2, 4, 4)
    assert recorded_by_onednn(large, w, None, *rest) is not None
    assert recorded_by_onednn(small, w, None, *rest) is None
    assert recorded_by_onednn(large.double(), w.double(), None, *rest) is None
    assert recorded_by_onednn(large, w.double(), None, *rest) is None
    assert recorded_by_onednn(large, w[:, :4], None, *rest[:-1], 2) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert recorded_by_onednn(large, w, None, *rest) is None
    with torch.backends.mkldnn.flags(enabled=False):
        assert recorded_by_onednn(large, w, None, *rest) is None


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
        part: Any = t.grad
        total = grid.comm.allreduce(part.numpy())
        close(torch.from_numpy(total), want)


def test_operators_are_timed_as_they_are_computed() -> None:
    x, w = torch.randn(1, 8, 8, 16, 16), torch.randn(16, 8, 3, 3, 3)
    arguments: Any = (x, w, None, (1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1)
    made = spec_of((torch.convolution(*arguments),))
    operator = LocalOperator("aten.convolution.default", spec_of(arguments), (), made)
    with torch.no_grad():
        assert "aten::mkldnn_convolution" in operators(call_of(operator, Operands([operator])))
