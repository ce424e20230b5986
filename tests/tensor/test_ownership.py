"""Gradients are the serial ones, whoever adds them up; what is counted once a rank is an error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from tests.support.serial import deviation, raised_everywhere, same_gradients

RANKS = [2, 3]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3)).double()


def whole() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((4, 3, 8, 8), generator=generator, dtype=torch.float64)


def batch(grid: dc.ProcessGrid) -> Tensor:
    return dc.distribute_tensor(whole(), grid)


def check(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Assert that the gradients are those that the serial model gets of `loss`."""
    serial = net()
    loss(serial, whole()).backward()
    same_gradients(model, serial)


# Without parallelize


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize(
    "start",
    [
        lambda y: y.square().mean().backward(),
        lambda y: torch.autograd.backward([y.square().mean()]),
        lambda y: y.full_tensor().square().mean().backward(),
        lambda y: y.to_local(grad="part").square().sum().div(288).backward(),
    ],
    ids=["distributed", "function", "full", "local"],
)
def test_without_parallelize_gradients_are_the_serial_ones(start: Callable) -> None:
    for axis in ("height", "sample"):
        model = net()
        start(model(batch(dc.ProcessGrid(**{axis: -1}))))
        check(model, lambda model, x: model(x).square().mean())


def cosines(y: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """Return a loss on angles to class centres, at a temperature, as ArcFace takes it."""
    scores = F.linear(F.normalize(y.mean((2, 3)), dim=1), F.normalize(w[:, :2], dim=1))
    return F.cross_entropy(scores * s[2].exp(), torch.arange(4) % 3)


def penalized(y: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """Return a penalty on the gradient of a loss with respect to plain leaves."""
    loss = (y * s[:2].exp().view(2, 1, 1)).square().mean()
    g, h = torch.autograd.grad(loss, [s, y], create_graph=True)
    return g.square().sum() + (h * s[0]).square().sum() + loss


def twice(y: Tensor, s: Tensor, w: Tensor) -> Tensor:
    scale = s.softmax(0)[:2].view(2, 1, 1)
    return (y * scale).square().mean() + (y - scale.sin()).abs().sum() * s.sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "itself": lambda y, s, w: (y * s.view(3, 1, 1, 1)[0]).sum(),
    "uncertainty": lambda y, s, w: torch.exp(-s[0]) * y.square().mean() + s[0],
    "in a list": lambda y, s, w: torch.stack([y.mean(), s.exp().sum(), w.t()[0, 0]]).prod(),
    "by name": lambda y, s, w: torch.add(input=y, other=s[1:2].view(1, 1, 1)).square().sum(),
    "embedding": lambda y, s, w: (
        F.embedding((y[:, 0].abs().long() % 3), w.exp()).mean((1, 2)) @ w.t()
    ).sum(),
    "norm": lambda y, s, w: F.group_norm(y, 1, s[:2].exp(), s[1:].tanh()).square().sum(),
    "convolution": lambda y, s, w: (
        F.conv2d(y, (w[:, :2] * s.view(3, 1)).view(3, 2, 1, 1), s.exp()).sin().sum()
    ),
    "assigned": lambda y, s, w: assigned(y.clone(), s.exp()),
    "like another": lambda y, s, w: (y * s[:2].view(2, 1).expand(2, 36).view_as(y[0])).sum(),
    "cosines": cosines,
    "penalized": penalized,
    "twice": twice,
    "a result of to_local": lambda y, s, w: (
        plain_of((y * s[0].exp()).mean()) * s[1].exp() + s.sum()
    ),
    "again": lambda y, s, w: checkpoint(
        lambda y: (y * s[0].exp()).sin(), y, use_reentrant=False
    ).sum(),
    "distributed": lambda y, s, w: (y * like(s.exp(), y)[:2].view(2, 1, 1) * s[0]).sum(),
    "a Function": lambda y, s, w: _Scaled.apply(y, s[:1].exp()).sum(),
    "element-wise": lambda y, s, w: _scaled(y, s[:1].exp()).sum(),
}
"""Losses of a network's output, three numbers and a matrix; leaves that belong to no module."""


def assigned(y: Tensor, s: Tensor) -> Tensor:
    y[:, 0] = s[0]
    return y.square().sum()


def plain_of(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, dc.DistTensor) else x


def like(s: Tensor, y: Tensor) -> Tensor:
    return dc.distribute_tensor(s, y.grid, dc.Layout()) if isinstance(y, dc.DistTensor) else s


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, s: Tensor) -> Tensor:
        ctx.save_for_backward(y, s)
        return y * s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        y, s = ctx.saved_tensors
        return grads[0] * s, (grads[0] * y).sum().view(1)


_scaled = dc.elementwise(lambda y, s: y * s.sin())


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", LOSSES)
def test_leaves_of_no_module_have_the_serial_gradients(name: str) -> None:
    def train(model: nn.Module, x: Tensor) -> list[Tensor]:
        """Accumulate the gradients of two passes, of which the first is repeated."""
        s = nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))
        w = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_()
        for sign in (1, -1):
            loss = LOSSES[name](model(sign * x), s, w)
            for retain in (True, False)[sign < 0 :]:
                loss.backward(retain_graph=retain)
        return [p.grad for p in (*model.parameters(), s, w) if p.grad is not None]

    expected = train(net(), whole())
    for axis in ("height", "width", "sample"):
        grid = dc.ProcessGrid(**{axis: -1})
        actual = train(dc.parallelize(net(), grid), batch(grid))
        assert len(actual) == len(expected)
        for got, wanted in zip(actual, expected, strict=True):
            assert deviation(got, wanted) < 1e-10


@pytest.mark.parallel(RANKS)
def test_what_depends_on_parameters_within_and_outside_is_refused() -> None:
    grid = dc.ProcessGrid(height=-1)
    model, s = dc.parallelize(net(), grid), torch.ones((), requires_grad=True)
    loss = model(batch(grid)).mean()
    message = raised_everywhere(dc.UnsupportedOperation, lambda: loss + penalty(model) * s)
    assert "on a leaf outside of it, of shape (), whose gradients are summed elsewhere" in message
    (loss + penalty(model) + s.exp()).backward()
    check(model, lambda model, x: model(x).mean() + penalty(model))
    assert s.grad.item() == torch.tensor(1.0).exp().item()


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("plain", [lambda s: s, torch.exp])
def test_transforms_of_functions_are_refused(plain: Callable) -> None:
    y = batch(dc.ProcessGrid(height=-1))
    message = raised_everywhere(
        dc.UnsupportedOperation,
        lambda: torch.func.grad(lambda s: (y * plain(s)).sum())(torch.ones(1)),
    )
    assert "one of torch.func's transforms" in message


@pytest.mark.parallel(RANKS)
def test_a_parametrization_of_a_parallelized_module_is_added_up_once() -> None:
    def make() -> nn.Sequential:
        model = net()
        nn.utils.parametrizations.weight_norm(model[0])
        return model

    grid = dc.ProcessGrid(height=-1)
    model, serial = dc.parallelize(make(), grid), make()
    for m, x in ((model, batch(grid)), (serial, whole())):
        (m(x).square().mean() + m[0].weight.exp().sum() * m[2].bias.sin().sum()).backward()
    same_gradients(model, serial)


@pytest.mark.parallel(RANKS)
def test_a_forward_pass_before_parallelize_has_no_backward_pass_after_it() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = net()
    loss = model(batch(grid)).square().mean()
    dc.parallelize(model, grid)
    message = raised_everywhere(RuntimeError, loss.backward)
    assert "met distributed tensors before its module was parallelized" in message
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parallel(RANKS)
def test_parameters_that_have_met_distributed_tensors_are_parallelized_later() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = net()
    model(batch(grid))
    dc.parallelize(model, grid)
    model(batch(grid)).square().mean().backward()
    check(model, lambda model, x: model(x).square().mean())


@pytest.mark.parallel([1])
def test_a_single_rank_has_whole_gradients_without_parallelize() -> None:
    model = net()
    model(batch(dc.ProcessGrid())).square().mean().backward()
    check(model, lambda model, x: model(x).square().mean())


@pytest.mark.parallel(RANKS)
def test_a_plain_model_trains_as_ever() -> None:
    model = net()
    dc.parallelize(net(), dc.ProcessGrid(height=-1))
    model(whole()).square().mean().backward()
    check(model, lambda model, x: model(x).square().mean())


# A loss of parameters alone


def penalty(model: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in model.parameters())


@pytest.mark.parallel(RANKS)
def test_a_loss_of_parameters_alone_is_an_error() -> None:
    model = dc.parallelize(net(), dc.ProcessGrid(height=-1))
    model(batch(dc.ProcessGrid(height=-1)))
    message = raised_everywhere(RuntimeError, lambda: penalty(model).backward())
    assert "is part of a plain loss with no distributed tensor between" in message
    assert "(loss + penalty).backward()" in message


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("hand_out", [lambda y: y.full_tensor(), lambda y: y.to_local(grad="part")])
def test_a_penalty_beside_what_was_handed_out_is_an_error(hand_out: Callable) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)

    def term() -> Tensor:
        return hand_out(model(batch(grid))).square().sum()

    message = raised_everywhere(RuntimeError, lambda: (term() + penalty(model)).backward())
    assert "of a plain loss with no distributed tensor between" in message
    several = term(), penalty(model)
    raised_everywhere(RuntimeError, lambda: torch.autograd.backward(several))
    model.zero_grad()
    term().backward()
    check(model, lambda model, x: model(x).square().sum())


@pytest.mark.parallel(RANKS)
def test_a_penalty_in_a_distributed_loss_has_the_serial_gradients() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), torch.zeros(()).double().expand(4, 2, 6, 6)) + penalty(model)

    loss(model, batch(grid)).backward()
    check(model, loss)


@pytest.mark.parallel(RANKS)
def test_a_penalty_beside_a_distributed_root_is_an_error() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)
    loss = model(batch(grid)).square().mean()
    raised_everywhere(RuntimeError, lambda: torch.autograd.backward([loss, penalty(model)]))


@pytest.mark.parallel(RANKS)
def test_what_depends_on_parameters_is_not_distributed() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)
    whole, depending = dc.Layout(), (model[0].weight, penalty(model))
    for bring, x in product((dc.distribute_tensor, dc.DistTensor.from_local), depending):
        message = raised_everywhere(
            dc.UnsupportedOperation, lambda bring=bring, x=x: bring(x, grid, whole)
        )
        assert "depends on a parameter of a parallelized module" in message
        assert "directly" in message
    dc.distribute_tensor(model[0].weight.detach(), grid, dc.Layout())


@pytest.mark.parallel(RANKS)
def test_blocks_of_their_own_depend_on_parameters_by_a_part() -> None:
    grid = dc.ProcessGrid(height=-1)

    class Scale(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, dc.DistTensor):
                return super().forward(x)
            return dc.DistTensor.from_local(super().forward(x.to_local()), x.grid)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Scale(3, 2, 1).double()

    model, serial = dc.parallelize(make(), grid), make()
    model(batch(grid)).square().sum().backward()
    serial(whole()).square().sum().backward()
    assert deviation(model.weight.grad, serial.weight.grad) < 1e-10


# A loss of this rank's block


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axes", [("height",), ("sample",), ("height", "sample"), ("channel",)])
@pytest.mark.parametrize("own", [True, False], ids=["parallelized", "plain"])
def test_a_loss_of_the_block_says_that_it_is_a_summand(axes: tuple[str, ...], own: bool) -> None:
    grid = dc.ProcessGrid(**{axes[0]: 2, axes[-1]: -1})
    layout = dc.Layout(**{axis: axis for axis in axes})
    model = dc.parallelize(net(), grid) if own else net()
    x = batch(grid).requires_grad_()
    for start in BLOCKWISE:
        y = model(x).redistribute(layout)
        message = raised_everywhere(RuntimeError, start, x, y)
        assert "to_local() of the partitioned tensor (4, 2, 6, 6) Layout(" in message
        assert 'to_local(grad="part")' in message and "loss_function(model(x), target)" in message
        model.zero_grad()
    y = model(x).redistribute(layout)
    y.to_local(grad="part").square().sum().div(288).backward()
    check(model, lambda model, x: model(x).square().mean())


def _of_gradient(x: dc.DistTensor, y: dc.DistTensor) -> None:
    (g,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    torch.autograd.grad(g.to_local().mean(), x)


BLOCKWISE: list[Callable] = [
    lambda x, y: y.to_local().square().mean().backward(),
    lambda x, y: torch.autograd.grad(y.to_local().square().mean(), x),
    lambda x, y: torch.autograd.backward([y.mean(), y.to_local().square().sum()]),
    _of_gradient,
]
"""Backward passes that start at losses of the ranks' blocks."""


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("again", [True, False], ids=["checkpoint", "once"])
def test_blocks_that_come_back_have_the_serial_gradients(again: bool) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)

    def blockwise(y: dc.DistTensor) -> Tensor:
        return dc.DistTensor.from_local(y.to_local().sin(), grid, y.grid_layout)

    y = model(batch(grid))
    z = checkpoint(blockwise, y, use_reentrant=False) if again else blockwise(y)
    z.square().mean().full_tensor().backward()
    check(model, lambda model, x: model(x).sin().square().mean())


@pytest.mark.parallel([1, 2])
def test_only_a_part_may_be_the_gradient_of_a_block() -> None:
    y = batch(dc.ProcessGrid(height=-1))
    with pytest.raises(ValueError, match="grad='mean'; expected \"part\" or None"):
        y.to_local(grad="mean")
