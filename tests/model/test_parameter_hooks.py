"""Hooks on parameters of a parallelized module get, and may change, the serial gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import distconv as dc
from tests.support.serial import deviation, raised_everywhere, same_gradients, same_state
from tests.support.verdicts import one_verdict

CHANNELS = {"2": dc.Layout(sample="sample", channel="channel")}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 1)).double()


def batch(seed: int, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 2, 5, 6, dtype=torch.float64, generator=generator)


HOOKS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "clamps": lambda m, seen: m[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "two": lambda m, seen: (
        m[0].weight.register_hook(lambda g: g.sin()),
        m[0].weight.register_hook(lambda g: seen.append(g.clone()) or g * 2),
    ),
    "looks": lambda m, seen: [
        p.register_hook(lambda g: seen.append(g.clone())) and None for p in m.parameters()
    ],
    "several": lambda m, seen: register_multi_grad_hook(
        tuple(m.parameters()), lambda gradients: seen.extend(g.clone() for g in gradients)
    ),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "axes, options", [({"sample": -1}, {}), ({"height": -1}, {"bucket_bytes": 8})]
)
def test_hooks_on_parameters_get_the_serial_gradient(name: str, axes: Any, options: Any) -> None:
    grid = dc.ProcessGrid(**axes)
    serial, model = net(), net()
    HOOKS[name](model, (mine := []))
    dc.parallelize(model, grid, **options)
    HOOKS[name](serial, (yours := []))
    for step, samples in enumerate((4, 1, 3)):
        x = batch(step, samples)
        serial(x).square().sum().backward()
        if step == 1:
            with dc.no_sync(model):
                model(dc.distribute_tensor(x, grid)).square().sum().backward()
            continue
        loss = model(dc.distribute_tensor(x, grid)).square().sum()
        loss.backward()
        same_gradients(model, serial)
    if name != "several":  # torch takes those in backward() alone
        distributed = dc.distribute_tensor(x, grid)
        again = [
            torch.autograd.grad(m(y).square().sum(), m[0].weight)[0]
            for m, y in ((model, distributed), (serial, x))
        ]
        assert deviation(*again) < 1e-10
    assert len(mine) == len(yours)
    assert all(deviation(got, wanted) < 1e-10 for got, wanted in zip(mine, yours, strict=True))


@pytest.mark.parallel([2, 3])
def test_a_removed_hook_costs_nothing_and_a_late_one_is_an_error() -> None:
    grid = dc.ProcessGrid(height=-1)
    model, serial = dc.parallelize(net(), grid), net()
    weight, x = model[0].weight, batch(0, 2)
    handle = weight.register_hook(lambda g: 0 * g)
    model(dc.distribute_tensor(x, grid))
    handle.remove()
    loss = model(dc.distribute_tensor(x, grid)).sum()
    assert not weight._backward_hooks
    loss.backward()
    serial(x).sum().backward()
    assert deviation(weight.grad, serial[0].weight.grad) < 1e-10
    loss = model(dc.distribute_tensor(x, grid)).sum()
    weight.register_hook(lambda g: 0 * g)
    message = raised_everywhere(RuntimeError, loss.backward)
    assert (
        "received a hook after the forward pass" in message and "before the forward pass" in message
    )


def _stepping(model: nn.Module) -> list[Any]:
    """Let each parameter take its step when its gradient is there; return the hooks' handles."""

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in model.parameters()}
    return [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "axes, options",
    [
        ({"sample": -1}, {}),
        ({"height": -1}, {"bucket_bytes": 8}),
        ({"channel": 2, "sample": -1}, {"layouts": CHANNELS, "shard_parameters": True}),
    ],
)
def test_optimizers_step_within_the_backward_pass(axes: Any, options: Any, early: bool) -> None:
    if MPI.COMM_WORLD.size == 1:
        axes, options = {}, {}
    grid = dc.ProcessGrid(**axes)
    serial, model = net(), net()
    early = early and not options.get("shard_parameters")  # which makes other parameters
    if early:
        _stepping(model)
    dc.parallelize(model, grid, **options)
    if not early:
        _stepping(model)
    _stepping(serial)
    for step, samples in enumerate((4, 1, 3)):
        x = batch(step, samples)
        serial(x).square().sum().backward()
        model(dc.distribute_tensor(x, grid)).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
    same_state(model, serial, 1e-8)


@pytest.mark.parallel([2, 4])
def test_a_post_accumulate_hook_runs_on_all_ranks_once_its_gradient_is_summed() -> None:
    grid = dc.ProcessGrid(height=-1)
    model, serial = dc.parallelize(net(), grid), net()
    x, seen = batch(0, 2), []
    d = dc.distribute_tensor(x, grid)
    late = model(d).square().sum()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad + 0))
    late.backward()  # registered after the forward pass
    serial(x).square().sum().backward()
    model(d).square().sum().backward()
    with one_verdict():
        assert deviation(seen[0], serial[0].weight.grad) < 1e-10
        assert deviation(seen[1], 2 * serial[0].weight.grad) < 1e-10
    with dc.no_sync(model):
        loss = model(d).square().sum()
        message = raised_everywhere(RuntimeError, loss.backward)
        assert "post-accumulate-gradient hook" in message and "no_sync" in message
    handle.remove()
    model.zero_grad()
    model(d).square().sum().backward()
    assert len(seen) == 2
    model[0].weight.register_post_accumulate_grad_hook(seen.append)
    model(d).square().sum().backward()
    assert len(seen) == 3
    plain = dc.unparallelize(model)
    plain(x).sum().backward()
    assert len(seen) == 4


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("ignore:backward at")
def test_a_post_accumulate_hook_runs_on_ranks_without_a_part_of_the_gradient() -> None:
    grid = dc.ProcessGrid(sample=-1)

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            layer = self.a if grid.rank else self.b
            return dc.DistTensor.from_local(layer(x.to_local()), grid, x.grid_layout)

    model, seen = dc.parallelize(Chosen(), grid), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    model(dc.distribute_tensor(torch.ones(2, 3), grid)).sum().backward()
    with one_verdict():
        assert sorted(seen) == ["a.bias", "a.weight", "b.bias", "b.weight"]


@pytest.mark.parallel([2])
def test_what_looks_at_gradients_of_plain_intermediates_is_refused() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.rand(2, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    d = dc.distribute_tensor(x, grid)
    model = dc.parallelize(nn.Conv2d(2, 3, 3, dtype=torch.float64), grid)
    for look in (lambda w: w.register_hook(lambda g: g), lambda w: w.retain_grad()):
        w = model.weight * 2
        look(w)
        raised_everywhere(dc.UnsupportedOperation, nn.functional.conv2d, d, w)
    free = torch.rand(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    seen = []
    for y in (d, x):
        w = free.detach().requires_grad_() * 2
        w.register_hook(seen.append)
        nn.functional.conv2d(y, w).square().mean().backward()
    assert deviation(*seen) < 1e-12


@pytest.mark.parallel([2, 4])
def test_gradients_on_demand_of_plain_and_distributed_losses_are_the_serial_ones() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.rand(2, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def losses(model: nn.Module, x: Tensor) -> list[Tensor]:
        decay = model.weight.square().sum()
        w = model.weight * 2
        asked = [
            torch.autograd.grad(decay, model.weight),
            torch.autograd.grad(model(x).square().mean() + w.square().sum(), model.weight),
            torch.autograd.grad(nn.functional.conv2d(x, w).square().mean(), w),
        ]
        return [g for (g,) in asked]

    layers = [nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    dc.parallelize(layers[0], grid)
    layers[1].load_state_dict(layers[0].state_dict())
    pairs = zip(losses(layers[0], dc.distribute_tensor(x, grid)), losses(layers[1], x), strict=True)
    assert all(deviation(a, b) < 1e-12 for a, b in pairs)
