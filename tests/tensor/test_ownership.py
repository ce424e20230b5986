"""Gradients that would be a rank's part, or counted once a rank, are errors at backward()."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import deviation, raised_everywhere

WORLD = MPI.COMM_WORLD
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
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        assert deviation(p.grad, q.grad) < 1e-10


# Without parallelize


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "start",
    [
        lambda y: y.square().mean().backward(),
        lambda y: torch.autograd.backward([y.square().mean()]),
        lambda y: y.full_tensor().square().mean().backward(),
        lambda y: y.to_local().square().sum().backward(),
    ],
    ids=["distributed", "function", "full", "local"],
)
def test_a_forgotten_parallelize_is_an_error_at_backward(start: Callable) -> None:
    grid = dc.ProcessGrid(height=-1)
    y = net()(batch(grid))
    message = raised_everywhere(RuntimeError, lambda: start(y))
    assert (
        "(2, 4, 3, 3) has met distributed tensors and belongs to no parallelized module" in message
    )
    assert "Call parallelize(model, grid) before" in message


@pytest.mark.parallel(RANKS)
def test_parameters_that_have_met_distributed_tensors_are_parallelized_later() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = net()
    model(batch(grid))
    dc.parallelize(model, grid)
    model(batch(grid)).square().mean().backward()
    check(model, lambda model, x: model(x).square().mean())


@pytest.mark.parallel(RANKS)
def test_plain_leaves_and_autograd_grad_still_give_parts() -> None:
    grid = dc.ProcessGrid(height=-1)
    model, leaf = net(), torch.ones(2, 1, 1, dtype=torch.float64, requires_grad=True)
    loss = (model(batch(grid)) * leaf).square().mean()
    (part,) = torch.autograd.grad(loss.to_local(), model[0].weight, retain_graph=True)
    torch.autograd.grad(loss, model[0].weight, retain_graph=True)
    model.requires_grad_(False)
    (model(batch(grid)) * leaf).square().mean().backward()
    serial, twin = net(), leaf.detach().clone().requires_grad_()
    (serial(whole()) * twin).square().mean().backward()
    parts = WORLD.allgather((part, leaf.grad))
    for i, expected in enumerate((serial[0].weight.grad, twin.grad)):
        assert deviation(sum(both[i] for both in parts), expected) < 1e-10


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
@pytest.mark.parametrize("hand_out", ["full_tensor", "to_local"])
def test_a_penalty_beside_what_was_handed_out_is_an_error(hand_out: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)

    def term() -> Tensor:
        return getattr(model(batch(grid)), hand_out)().square().sum()

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
        assert "as they are" in message
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
