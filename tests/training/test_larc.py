"""LARS and LARC take the published steps, on whole and on sharded weights."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import distconv as dc
from distconv.tensor.dist_tensor import DistTensor
from distconv.training import LARC, LARS
from tests.support.serial import deviation, random_grid, random_tensor, same_state

WORLD = MPI.COMM_WORLD

LR, MOMENTUM, DECAY, TRUST = 0.3, 0.9, 0.01, 0.02


def values(seed: int = 0) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return a matrix, a matrix of zeros and a bias, and their gradients in four steps."""
    rng = random.Random(seed)
    shapes = ((5, 3), (2, 2), (4,))
    weights = [random_tensor(rng, s) for s in shapes]
    weights[1].zero_()
    return weights, [[random_tensor(rng, s) for s in shapes] for _ in range(4)]


def trained(make: Callable[[list[nn.Parameter]], Optimizer], seed: int = 0) -> list[Tensor]:
    weights, steps = values(seed)
    parameters = [nn.Parameter(w) for w in weights]
    optimizer = make(parameters)
    for gradients in steps:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert deviation(a, e) <= 1e-14


def sgd(parameters: Any, **more: Any) -> SGD:
    return SGD(parameters, LR, momentum=MOMENTUM, weight_decay=DECAY, **more)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("trust", [1e-3, 0.2, 5.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_on_the_gradient_are_the_published_recursion(
    trust: float, clip: bool, maximize: bool
) -> None:
    weights, steps = values()
    velocities = [torch.zeros_like(w) for w in weights]
    sign = -1 if maximize else 1
    for gradients in steps:
        for w, v, g in zip(weights, velocities, gradients, strict=True):
            local = trust * w.norm() / (g.norm() + DECAY * w.norm())
            if clip:
                local = min(local / LR, torch.tensor(1.0))
            if w.dim() == 1 or not w.any():
                local = torch.tensor(1.0)
            v.copy_(MOMENTUM * v + local * (sign * g + DECAY * w))
            w -= LR * v
    actual = trained(lambda p: LARC(sgd(p, maximize=maximize), trust, clip=clip))
    same(actual, weights)
    if not clip:
        same(trained(lambda p: LARS(sgd(p, maximize=maximize), trust)), weights)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("trust", [1e-3, 0.2])
def test_steps_on_the_update_hold_it_beside_the_weights(trust: float, clip: bool) -> None:
    weights, steps = values()
    plain = [nn.Parameter(w.clone()) for w in weights]
    adam = AdamW(plain, LR, weight_decay=DECAY)
    clipped = 0
    for gradients in steps:
        for p, w, g in zip(plain, weights, gradients, strict=True):
            p.data.copy_(w)
            p.grad = g
        adam.step()
        for p, w in zip(plain, weights, strict=True):
            update = p.detach() - w
            ratio = trust * w.norm() / update.norm()
            ratio = ratio.clamp(max=1.0) if clip else LR * ratio
            if w.dim() == 1 or not w.any():
                ratio = torch.tensor(1.0)
            clipped += int(ratio < 1)
            w += ratio * update
    assert clipped
    actual = trained(
        lambda p: LARC(AdamW(p, LR, weight_decay=DECAY), trust, clip=clip, on="update")
    )
    same(actual, weights)


def test_a_clip_that_limits_nothing_leaves_the_optimizer_s_steps() -> None:
    assert all(map(torch.equal, trained(lambda p: LARC(Adam(p), 1e9, on="update")), trained(Adam)))
    same(trained(lambda p: LARC(sgd(p), 1e9)), trained(sgd))


def test_schedules_and_checkpoints_are_those_of_the_optimizer_within() -> None:
    def make(parameters: Any) -> tuple[Any, Any]:
        optimizer = LARC(sgd(parameters))
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    weights, steps = values()

    def run(pair: tuple[Any, Any], parameters: list[nn.Parameter], part: slice) -> None:
        for gradients in steps[part]:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone()
            for each in pair:
                each.step()

    whole, stopped = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    run(make(whole), whole, slice(None))
    pair = make(stopped)
    run(pair, stopped, slice(2))
    assert pair[0].param_groups[0]["lr"] == LR / 4
    assert pair[0].param_groups[0]["weight_decay"] == DECAY
    file = io.BytesIO()
    torch.save([each.state_dict() for each in pair], file)
    file.seek(0)
    again = [nn.Parameter(p.detach().clone()) for p in stopped]
    resumed = make(again)
    for target, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        target.load_state_dict(state)
    run(resumed, again, slice(2, None))
    same([p.detach() for p in again], [p.detach() for p in whole])
    # A checkpoint of the optimizer alone is one, too.
    sgd(again).load_state_dict(pair[0].state_dict())


def test_a_closure_computes_the_gradients_of_a_step_once() -> None:
    weights, steps = values()
    calls = iter(steps)
    parameters = [nn.Parameter(w) for w in weights]
    optimizer = LARC(sgd(parameters))

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        for p, g in zip(parameters, next(calls), strict=True):
            p.grad = g.clone()
        return torch.tensor(3.0)

    assert [optimizer.step(closure).item() for _ in steps] == [3.0] * len(steps)
    same([p.detach() for p in parameters], trained(lambda p: LARC(sgd(p))))


def test_scaled_gradients_are_unscaled_before_the_ratio() -> None:
    weights, steps = values()
    parameters = [nn.Parameter(w) for w in weights]
    optimizer = LARC(sgd(parameters))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for gradients in steps:
        loss = sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    same([p.detach() for p in parameters], trained(lambda p: LARC(sgd(p))))


def test_hooks_of_steps_and_copies_work() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = LARC(sgd([parameter]))
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(parameter.detach().clone()))
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert len(seen) == 1
    other = copy.deepcopy(optimizer)
    assert other.param_groups[0]["params"][0] is not parameter
    assert (other.trust, other.state_dict().keys()) == (0.02, optimizer.state_dict().keys())
    assert "LARC" in repr(other) and "trust=0.02" in repr(other)
    with pytest.raises(AttributeError):
        optimizer.param_groups = []
    added = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(2, 2)
    optimizer.step()
    assert not torch.equal(added, torch.ones(2, 2))


def test_a_step_that_fails_leaves_the_weight_decay() -> None:
    class Broken(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ArithmeticError("broken on purpose")

    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = LARC(Broken([parameter], LR, weight_decay=DECAY))
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == DECAY


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: LARC(torch.optim.LBFGS(p)), TypeError, "LBFGS cannot be wrapped"),
        (lambda p: LARC(LARS(SGD(p))), TypeError, "LARS cannot be wrapped"),
        (lambda p: LARS(p), TypeError, "LARS: list cannot be wrapped"),
        (lambda p: LARC(SGD(p), 0.0), ValueError, "trust=0.0 is not positive"),
        (lambda p: LARC(SGD(p), on="weights"), ValueError, "on='weights' is unknown"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make([nn.Parameter(torch.ones(2))])


def test_weight_decay_that_is_no_part_of_the_gradient_is_refused_on_the_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = LARC(AdamW([parameter]))
    with pytest.raises(ValueError, match="decay of AdamW is not part of the gradient"):
        optimizer.step()
    assert torch.equal(parameter.grad, torch.ones(2, 2))
    LARC(AdamW([parameter], weight_decay=0.0)).step()


# On ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("on", ["gradient", "update"])
@pytest.mark.parametrize("clip", [False, True])
def test_sharded_weights_take_the_steps_of_whole_ones(on: str, clip: bool) -> None:
    grids = [dc.ProcessGrid(channel=-1), random_grid(random.Random(3), ("channel", "sample"))]
    for grid in grids:
        torch.manual_seed(0)
        serial = Net().double()
        model = dc.parallelize(copy.deepcopy(serial), grid, shard_parameters=True)
        if grid.shape["channel"] > 1:
            assert isinstance(model.conv.weight, DistTensor)
        optimizers = [LARC(sgd(m.parameters()), 0.01, clip=clip, on=on) for m in (serial, model)]
        for seed in range(3):
            x = random_tensor(random.Random(seed), (4, 3, 5, 4))
            for m, optimizer, y in zip(
                (serial, model), optimizers, (x, dc.distribute_tensor(x, grid)), strict=True
            ):
                optimizer.zero_grad()
                m(y).square().mean().backward()
                optimizer.step()
        same_state(model, serial, 1e-12)
