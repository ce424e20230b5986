"""Activation checkpoints of torch, one within another and around calls, give serial gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import distconv as dc
from tests.support.serial import deviation


def block(inputs: int) -> nn.Sequential:
    layers = (
        nn.Conv2d(inputs, 2, 3, padding=1, bias=False),
        nn.InstanceNorm2d(2),
        nn.Dropout(0.0),
        nn.Tanh(),
    )
    return nn.Sequential(*layers)


class Net(nn.Module):
    """Two blocks and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = block(1), block(2)
        self.c = nn.Conv2d(2, 1, 3, padding=1)
        self.within: Callable[[Any, Tensor], Tensor] = within_none

    def forward(self, x: Tensor) -> Tensor:
        return self.within(self, x)


def again(function: Any, x: Tensor, reentrant: bool = False, **options: Any) -> Any:
    return checkpoint(function, x, use_reentrant=reentrant, **options)


def within_none(m: Net, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x)))


def one_after_another(m: Net, x: Tensor) -> Tensor:
    return m.c(again(m.b, again(m.a, x)))


def nested(m: Net, x: Tensor) -> Tensor:
    return again(lambda y: m.c(again(m.b, again(m.a, y))), x)


def nested_deeper(m: Net, x: Tensor) -> Tensor:
    return again(lambda y: m.c(again(lambda z: again(m.b, again(m.a, z)), y)), x)


def nested_to_the_end(m: Net, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return nested(m, x)


def of_a_view(m: Net, x: Tensor) -> Tensor:
    """Compute again from a reshape that merges cut dimensions, whose block comes when it is due."""
    y = m.b(m.a(x)).flatten(2)
    return again(lambda z: again(lambda t: t.tanh() * t, z).exp(), y)


def reentrant(m: Net, x: Tensor) -> Tensor:
    return m.c(again(m.b, again(m.a, x, True), True))


def reentrant_within(m: Net, x: Tensor) -> Tensor:
    return again(lambda y: m.c(again(m.b, m.a(y), True)), x)


def within_reentrant(m: Net, x: Tensor) -> Tensor:
    return again(lambda y: m.c(again(m.b, m.a(y))), x, True)


def sequential(m: Net, x: Tensor) -> Tensor:
    return m.c(checkpoint_sequential([m.a, m.b], 2, x, use_reentrant=False))


def sequential_reentrant(m: Net, x: Tensor) -> Tensor:
    return m.c(checkpoint_sequential([m.a, m.b], 2, x, use_reentrant=True))


def around(m: Net, n: Net, x: Tensor) -> Tensor:
    return again(m, x).square().mean() + n(x).mean()


def around_two_modules(m: Net, n: Net, x: Tensor) -> Tensor:
    return again(lambda y: n(m(y)).square().mean(), x)


def around_two_calls(m: Net, n: Net, x: Tensor) -> Tensor:
    return again(lambda y: m(y).square().mean() + m(y * 2).sin().mean() + n(y).mean(), x)


def around_and_within(m: Net, n: Net, x: Tensor) -> Tensor:
    m.within = n.within = nested
    return again(lambda y: n(again(m, y)).square().mean(), x)


def around_reentrant(m: Net, n: Net, x: Tensor) -> Tensor:
    return again(lambda y: n(m(y)).square().mean() + m(y).mean(), x, True)


WITHIN = [
    within_none,
    one_after_another,
    nested,
    nested_deeper,
    nested_to_the_end,
    of_a_view,
    reentrant,
    reentrant_within,
    within_reentrant,
    sequential,
    sequential_reentrant,
]
AROUND = [around, around_two_modules, around_two_calls, around_and_within, around_reentrant]


def gradients(
    where: Callable[..., Tensor], grid: dc.ProcessGrid | None, what: str = "serial"
) -> list[Tensor]:
    """Return the gradients of two networks and their input after two steps, as plain tensors."""
    amp = what == "autocast"
    dtype = torch.float32 if amp else torch.float64
    m, n = Net().to(dtype), Net().to(dtype)
    x = torch.arange(3 * 3 * 5, dtype=dtype).view(3, 1, 3, 5).sin()
    if what == "dropout":
        m.a[2].p = m.b[2].p = n.b[2].p = 0.5
    if grid is not None:
        dc.parallelize(m, grid)
        dc.parallelize(n, grid)
        x = dc.distribute_tensor(x, grid)
    x.requires_grad_()
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, amp):
            if where in WITHIN:
                m.within = where
                loss = m(x).square().mean()
            else:
                loss = where(m, n, x)
        loss.backward()
    found = [p.grad for module in (m, n) for p in module.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, dc.DistTensor) else g for g in [*found, x.grad]]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("axis", ["height", "sample"])
@pytest.mark.parametrize("where", [*WITHIN, *AROUND])
def test_gradients_are_the_serial_ones(where: Callable[..., Tensor], axis: str) -> None:
    found = gradients(where, dc.ProcessGrid(**{axis: -1}))
    for one, other in zip(found, gradients(where, None), strict=True):
        assert deviation(one, other) <= 1e-10


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(("what", "axis"), [("dropout", "height"), ("autocast", "sample")])
@pytest.mark.parametrize("where", [*WITHIN, *AROUND])
def test_random_numbers_and_types_are_those_of_the_first_time(
    where: Callable[..., Tensor], what: str, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    found = gradients(where, grid, what)
    monkeypatch.setitem(globals(), "checkpoint", lambda function, x, **_: function(x))
    monkeypatch.setitem(globals(), "checkpoint_sequential", lambda f, n, x, **_: f[1](f[0](x)))
    for one, other in zip(found, gradients(where, grid, what), strict=True):
        assert deviation(one, other) <= (1e-5 if what == "autocast" else 1e-10)
