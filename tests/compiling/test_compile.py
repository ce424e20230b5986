"""Replayed functions have the bits of the functions that they are traced from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.ops.conv import local_convolution
from tests.support.serial import raised_everywhere, told_once

CALLS = 7

MakeLoss = Callable[[nn.Module], Callable[..., Any]]
"""Returns the function that is compiled, of a mini-batch, for a network."""


class Residual(nn.Module):
    """A block of a residual network, which returns a plain tensor that has become distributed."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.norm(self.first(x))))
        z = torch.zeros(y.shape, dtype=y.dtype)
        z[:, 1:] = (self.pool(x) + y)[:, 1:]
        return F.relu(z)


def classifier() -> nn.Module:
    """Return a network with norms, dropout, strides and pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, 2, 2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Dropout(0.3),
        Residual(8, 2),
        nn.MaxPool2d(3, 1, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def volume() -> nn.Module:
    """Return a network of volumes."""
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.InstanceNorm3d(4, affine=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.MaxPool3d(2),
        nn.Conv3d(4, 4, 3, padding="same", padding_mode="circular"),
        nn.Upsample(scale_factor=2),
        nn.Conv3d(4, 2, 1),
    )


def batches(grid: dc.ProcessGrid, shape: tuple[int, ...] = (4, 3, 24, 20)) -> Iterator[Any]:
    """Yield mini-batches of samples and their classes."""
    for seed in range(CALLS):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=g)
        y = torch.randint(2, shape[:1], generator=g)
        layout = dc.Layout(sample="sample") if grid.shape["sample"] > 1 else dc.Layout()
        yield dc.distribute_tensor(x, grid), dc.distribute_tensor(y, grid, layout)


def trained(
    make_loss: MakeLoss,
    compiled: bool,
    grid: dc.ProcessGrid,
    network: Callable[[], nn.Module],
    backend: str | None = None,
) -> tuple[list[Any], Any]:
    """Train by a loss; return the losses and the state at the end, and the function used."""
    torch.manual_seed(0)
    model = dc.parallelize(network(), grid)
    loss_of: Any = make_loss(model)
    f: Any = dc.compile(loss_of, backend=backend) if compiled else loss_of
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    shape = (2, 1, 8, 12, 8) if network is volume else (4, 3, 24, 20)
    found = []
    for batch in batches(grid, shape):
        loss = f(*batch)
        if loss.requires_grad:
            loss.backward()
            dc.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        getattr(loss_of, "after", lambda: None)()
        found.append(loss.detach())
    results = [x.full_tensor().clone() if isinstance(x, dc.DistTensor) else x for x in found]
    return [*results, *model.state_dict().values()], f


def identical(mine: Any, theirs: Any) -> bool:
    """Return whether tensors, or lists of them, have the same bits on this rank."""
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(identical, mine, theirs))
    if isinstance(mine, dc.DistTensor):
        return identical(mine.to_local(), theirs.to_local())
    return torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs


def same_bits(run: Callable[[bool], tuple[list[Any], Any]]) -> Any:
    """Check that a run has the same bits with what is compiled, which is returned, as without."""
    expected, (actual, compiled) = run(False)[0], run(True)
    assert identical(actual, expected)
    return compiled


def check(
    make_loss: MakeLoss,
    network: Callable[[], nn.Module] = classifier,
    backend: str | None = None,
    **axes: Any,
) -> Any:
    """Check that training by a compiled loss has the bits of training by the loss; return it."""
    grid = dc.ProcessGrid(**(axes or {"height": -1}))
    return same_bits(lambda compiled: trained(make_loss, compiled, grid, network, backend))


def plain(model: nn.Module) -> Callable[..., Any]:
    """Return a usual loss."""
    return lambda x, y: F.cross_entropy(model(x), y, label_smoothing=0.1)


def of_volumes(model: nn.Module) -> Callable[..., Any]:
    """Return a loss for volumes."""
    return lambda x, y: model(x).square().mean()


def with_autocast(model: nn.Module) -> Callable[..., Any]:
    """Return a loss in bfloat16."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return loss


def of_halves(model: nn.Module) -> Callable[..., Any]:
    """Return a loss whose parameters, gradients and messages are in bfloat16."""
    model.bfloat16()
    return lambda x, y: F.cross_entropy(model(x.bfloat16()), y)


def of_two_passes(model: nn.Module) -> Callable[..., Any]:
    """Return a loss that calls the network twice, once without gradients."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = model(x * 0.5)
        return F.mse_loss(model(x), target)

    return loss


def predicting(model: nn.Module) -> Callable[..., Any]:
    """Return a function that evaluates."""
    model.eval()

    @torch.no_grad()
    def predict(x: Tensor, y: Tensor) -> Any:
        return model(x)

    return predict


def with_weights(model: nn.Module) -> Callable[..., Any]:
    """Return a loss with a weight for each class, which change in place."""
    weights = torch.ones(2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=weights)

    made: Any = loss
    made.after = lambda: weights[0].mul_(1.5)
    return made


def with_an_average(model: nn.Module) -> Callable[..., Any]:
    """Return a loss that keeps a running average of the images in a plain tensor."""
    mean = torch.zeros(3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            mean.lerp_(x.mean((0, 2, 3)), 0.1)
        return F.cross_entropy(model(x), y)

    return loss


def with_checkpoint(model: nn.Module) -> Callable[..., Any]:
    """Return a loss whose activations are computed again in the backward pass."""
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    model = nn.Sequential(*(part for part in model if not isinstance(part, nn.Dropout)))  # type: ignore[attr-defined]
    return lambda x, y: F.cross_entropy(checkpoint(model, x, **options), y)


_LOSSES = (
    *(plain, with_autocast, of_halves, of_two_passes, predicting, with_weights),
    *(with_an_average, with_checkpoint),
)
LOSSES = {loss.__name__: loss for loss in _LOSSES}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", LOSSES)
def test_a_replayed_function_has_the_same_bits(name: str) -> None:
    assert check(LOSSES[name]).replays == CALLS - 2


@pytest.mark.parallel([2])
def test_a_replayed_function_of_volumes_has_the_same_bits() -> None:
    assert check(of_volumes, volume, depth=-1).replays == CALLS - 2


@pytest.mark.parallel(2)
def test_kernels_are_chosen_as_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_convolution, "_FEWEST_PRODUCTS", 0)
    local_convolution._pays.cache_clear()
    assert "mkldnn" in check(of_volumes, volume, depth=2).source
    local_convolution._pays.cache_clear()


@pytest.mark.parallel(4)
@pytest.mark.parametrize(
    "axes",
    [{"sample": 2, "height": 2}, {"height": 2, "width": 2}, {"channel": 2, "width": 2}],
    ids=str,
)
def test_a_function_is_replayed_on_any_grid(axes: Mapping[str, int]) -> None:
    assert check(plain, **axes).replays == CALLS - 2


def sets_rates(model: Any) -> None:
    model[3].p, model[1].eps = 0.6, 0.1


def freezes(model: Any) -> None:
    model[0].requires_grad_(False)


def evaluates(model: Any) -> None:
    model.eval()


def hooks(model: Any) -> None:
    model[0].register_forward_hook(lambda module, given, result: result * 2)


def swaps(model: Any) -> None:
    model[2] = nn.ReLU()


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "change", [sets_rates, freezes, evaluates, hooks, swaps], ids=lambda f: f.__name__
)
def test_a_change_of_the_network_is_seen(change: Callable[[Any], None]) -> None:
    def make_loss(model: nn.Module) -> Callable[..., Any]:
        calls = iter(range(CALLS))
        loss: Any = plain(model)
        loss.after = lambda: change(model) if next(calls) == 3 else None
        return loss

    assert check(make_loss).replays == CALLS - 4


@pytest.mark.parallel(2)
def test_layouts_are_cases_of_one_graph() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    f = dc.compile(lambda x: model(x).square().mean())
    for layout in (dc.Layout(height="height"), dc.Layout(width="height")) * 3:
        x = dc.distribute_tensor(torch.randn(1, 3, 8, 8), grid, layout)
        mine, theirs = f(x), model(x).square().mean()
        mine.backward()
        assert identical(mine.detach(), theirs.detach())
    assert f.replays == 2


@pytest.mark.parallel([2])
def test_samples_at_different_places_of_one_tensor_are_replayed() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Conv2d(1, 2, 3, padding=1), grid)
    f = dc.compile(lambda x: model(x).square().mean())
    samples = dc.distribute_tensor(torch.randn(CALLS, 1, 8, 8), grid)
    for i in range(CALLS):
        x = samples[i : i + 1]
        mine, theirs = f(x), model(x).square().mean()
        mine.backward()
        assert identical(mine.detach(), theirs.detach())
    assert f.replays == CALLS - 2


@pytest.mark.parallel(2)
def test_layouts_of_modules_are_part_of_a_replay() -> None:
    def run(compiled: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        grid = dc.ProcessGrid(height=2)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
        model = dc.parallelize(net, grid, layouts={"2": dc.Layout(width="height")})
        f: Any = dc.compile(model) if compiled else model
        found = []
        for x, _ in batches(grid):
            y = f(x)
            y.square().mean().backward()
            found += [y.detach(), y.cuts]
        return [*found, *(p.grad for p in model.parameters())], f

    assert same_bits(run).replays == CALLS - 2


@pytest.mark.parallel(2)
def test_weights_that_are_sharded_have_the_same_bits_and_are_named() -> None:
    def run(compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        grid = dc.ProcessGrid(channel=2)
        net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        model = dc.parallelize(net, grid, shard_parameters=True)
        f: Any = dc.compile(model) if compiled else model
        g = torch.Generator().manual_seed(0)
        for _ in range(4):
            f(dc.distribute_tensor(torch.randn(2, 4, 9, 8, generator=g), grid)).sum().backward()
        return [p.grad.full_tensor() for p in model.parameters() if hasattr(p, "cuts")], f

    with told_once("runs uncompiled: its weights are sharded"):
        same_bits(run)


# Functions that run as they are


def reads(model: nn.Module) -> Callable[..., Any]:
    """Return a loss that is scaled by a number read from it."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(model(x), y)
        return found / found.item()

    return loss


def prints(model: nn.Module) -> Callable[..., Any]:
    """Return a loss that prints."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        print("a loss")
        return F.cross_entropy(model(x), y)

    return loss


def chooses(model: nn.Module) -> Callable[..., Any]:
    """Return a loss that depends on a condition on elements."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return F.cross_entropy(z if x.mean() > 0 else -z, y)

    return loss


def draws_again(model: nn.Module) -> Callable[..., Any]:
    """Return a loss whose checkpoint draws the numbers of dropout again."""
    return lambda x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


class Doubled(torch.autograd.Function):
    """A function of the program's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def differentiates(model: nn.Module) -> Callable[..., Any]:
    """Return a loss with an autograd function of its own."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return Doubled.apply(F.cross_entropy(model(x), y))  # type: ignore[no-any-return]

    return loss


def asks(model: nn.Module) -> Callable[..., Any]:
    """Return a loss that depends on the type of the images."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(model(x), y)
        return found * 2 if isinstance(x, dc.DistTensor) else found

    return loss


LEFT = {
    asks: "mentions DistTensor",
    reads: "values of a tensor",
    prints: "print",
    chooses: "branching",
    draws_again: "state of the random number generator",
    differentiates: "autograd_function_apply",
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("make_loss", LEFT, ids=lambda f: f.__name__)
def test_other_functions_run_as_they_are_and_say_why(make_loss: MakeLoss) -> None:
    with told_once("compile: ") as said:
        assert check(make_loss).replays == 0
    assert LEFT[make_loss] in said[0]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_of_an_optimizer_is_an_error_that_shows_the_way_out(whole: bool) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @dc.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if whole:
            loss.backward()
        optimizer.step()
        return loss

    before = model.weight.detach().clone()
    message = raised_everywhere(RuntimeError, step, next(batches(grid))[0])
    assert "SGD.step, at" in message and "loss.backward()\n    optimizer.step()" in message
    assert identical(model.weight, before)


@pytest.mark.parallel(2)
def test_without_a_distributed_tensor_a_function_runs_as_it_is() -> None:
    with pytest.warns(UserWarning, match="none of its arguments is a DistTensor"):
        assert dc.compile(lambda x: x + 1)(torch.zeros(1)) == 1


# Replays


@pytest.mark.parallel(2)
def test_a_replay_makes_no_call_of_a_module_and_shows_what_it_does() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    f = dc.compile(lambda x: model(x).square().mean())
    assert f.graph is None
    for x, _ in batches(grid):
        f(x).backward()
    assert "trace_exchange(" in f.source and "aten.convolution_backward" in f.source
    assert any(node.target is torch.conv2d for node in f.graph.nodes)


@pytest.mark.parallel(2)
def test_torch_compile_does_the_same_by_name() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    others = torch.compile(lambda x: x + 1, backend="eager")
    f, g = (torch.compile(m, backend="distconv") for m in (model, lambda x: model(x) * 2))
    for x, _ in batches(grid):
        assert identical(f(x).detach(), model(x).detach())
        assert identical(g(x).detach(), model(x).detach() * 2)
        f(x).sum().backward()
        g(x).sum().backward()
    assert f.replays > 0 and g.replays > 0 and f.weight is model.weight
    assert others(torch.zeros(1)) == 1


@contextmanager
def interrupted(grid: dc.ProcessGrid) -> Iterator[None]:
    """Let the next exchange fail, on all ranks."""
    carrier: Any = grid.transport
    before = carrier.carrier

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(before, name)

        def exchange(self, *_: Any) -> Any:
            raise ConnectionError("lost")

    carrier.carrier = Failing()
    try:
        yield
    finally:
        carrier.carrier = before


@pytest.mark.parallel(2)
def test_a_function_goes_on_after_an_error_in_any_call() -> None:
    grid = dc.ProcessGrid(height=2)
    for failing in range(4):
        torch.manual_seed(0)
        model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
        f = dc.compile(lambda x: model(x).square().mean())  # noqa: B023
        for i, (x, _) in enumerate(batches(grid)):
            if i == failing:
                with interrupted(grid), pytest.raises(ConnectionError):
                    f(x).backward()
            else:
                f(x).backward()
        assert identical(f(x).detach(), model(x).square().mean().detach())
        assert f.replays >= CALLS - 4


def random_network(rng: random.Random) -> Callable[[], nn.Module]:
    """Return what makes a random classifier, the same each time."""
    kinds: list[Callable[[int], nn.Module]] = [
        lambda c: nn.Conv2d(c, c, rng.choice([1, 3, 5]), padding="same"),
        lambda c: nn.Conv2d(c, c, 3, 2, 1, groups=rng.choice([1, c])),
        lambda c: nn.Conv2d(c, c, 3, 1, 2, 2),
        lambda c: nn.BatchNorm2d(c),
        lambda c: nn.GroupNorm(2, c),
        lambda c: nn.InstanceNorm2d(c),
        lambda c: nn.LocalResponseNorm(2),
        lambda c: rng.choice([nn.ReLU(inplace=True), nn.GELU(), nn.Tanh(), nn.Softmax(1)]),
        lambda c: nn.Dropout2d(0.2),
        lambda c: nn.MaxPool2d(2, ceil_mode=True),
        lambda c: nn.AvgPool2d(3, 2, 1),
        lambda c: nn.ConvTranspose2d(c, c, 3, 2, 1),
        lambda c: nn.Upsample(scale_factor=2, mode=rng.choice(["nearest", "bilinear"])),
        lambda c: nn.ReflectionPad2d(1),
        lambda c: Residual(c),
    ]
    layers = [rng.choice(kinds)(4) for _ in range(rng.randint(2, 6))]

    def network() -> nn.Module:
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *deepcopy(layers), *head)

    return network


@pytest.mark.parallel([2])
@pytest.mark.parametrize("seed", range(6))
def test_random_stacks_are_replayed_with_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng)
    rng.shuffle(axes := ["height", "width"])
    with dc.method(rng.choice(["assembled", "overlapped"])):
        assert check(plain, network, **{axes[0]: -1}).replays == CALLS - 2
