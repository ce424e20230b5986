"""Replayed steps have the bits of the steps that they are traced from; others go on as they are."""

from __future__ import annotations

import random
import warnings
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
from distconv.ops.conv import volumes
from tests.support.serial import raised_everywhere, told_once

RANKS = [1, 2, 4]
CALLS = 7

Step = Callable[..., Any]
MakeStep = Callable[[nn.Module, dc.ProcessGrid], Step]


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
    make_step: MakeStep,
    compiled: bool,
    grid: dc.ProcessGrid,
    network: Callable[[], nn.Module],
    backend: str | None = None,
) -> tuple[list[Any], Any]:
    """Return what the calls of a step return and the state at the end, and the step."""
    torch.manual_seed(0)
    model = dc.parallelize(network(), grid)
    step: Any = make_step(model, grid)
    step = dc.compile(step, backend=backend) if compiled else step
    torch.manual_seed(1)
    shape = (2, 1, 8, 12, 8) if network is volume else (4, 3, 24, 20)
    found = []
    for batch in batches(grid, shape):
        found.append(step(*batch))
        getattr(step, "after", lambda: None)()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    results = [x.full_tensor().clone() if isinstance(x, dc.DistTensor) else x for x in found]
    return [*results, *model.state_dict().values(), *gradients], step


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
    make_step: MakeStep,
    network: Callable[[], nn.Module] = classifier,
    backend: str | None = None,
    **axes: Any,
) -> Any:
    """Check that a compiled step has the bits of the step itself; return it."""
    grid = dc.ProcessGrid(**(axes or {"height": -1}))
    return same_bits(lambda compiled: trained(make_step, compiled, grid, network, backend))


def optimized(optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor]) -> Step:
    """Return a step in which an optimizer brings a loss down."""

    def step(*batch: Tensor) -> Tensor:
        found = loss(*batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step


def gradients_of(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Return a step without an optimizer, which leaves the gradients of a loss behind."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        found = loss(x, y)
        found.backward()
        return found

    return step


def plain(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step of a usual loss."""
    return gradients_of(model, lambda x, y: F.cross_entropy(model(x), y))


def of_volumes(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step for volumes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimized(optimizer, lambda x, y: model(x).square().mean())


def with_momentum(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step with momentum and clipped gradients; a scheduler changes the rate outside."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        dc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    step.after = scheduler.step
    return step


def with_accumulation(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that adds up the gradients of two halves of a mini-batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        with dc.no_sync(model):
            first = F.cross_entropy(model(x), y)
            (first / 2).backward()
        second = F.cross_entropy(model(x * 0.5), y)
        (second / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [first, second]

    return step


def with_autocast(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step in bfloat16."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return optimized(torch.optim.SGD(model.parameters(), lr=0.1), loss)


def of_halves(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step whose parameters, gradients and messages are in bfloat16."""
    model.bfloat16()
    return gradients_of(model, lambda x, y: F.cross_entropy(model(x.bfloat16()), y))


def with_average(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that keeps a running average of the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [p.detach().clone() for p in model.parameters()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        return average[0]

    return step


def predicting(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that evaluates."""
    model.eval()

    @torch.no_grad()
    def step(x: Tensor, y: Tensor) -> Tensor:
        return model(x)

    return step


def with_weights(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step whose loss looks up a weight for each class, which change in place."""
    weights = torch.ones(2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=weights)

    step: Any = gradients_of(model, loss)
    step.after = lambda: weights[0].mul_(1.5)
    return step


def stepping_outside(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return the passes of a step; the optimizer steps outside, and gradients end there."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    step.after = lambda: (optimizer.step(), optimizer.zero_grad())
    return step


class Doubled(torch.optim.SGD):
    """An optimizer whose step calls the step of its base class, which torch hooks as well."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2.0)
        return super().step(closure)


def with_subclass(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step of an optimizer that is derived from another one in use."""
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Doubled(model.parameters(), lr=0.1)
    return optimized(optimizer, lambda x, y: F.cross_entropy(model(x), y))


_STEPS = (
    *(plain, with_momentum, with_accumulation, with_autocast, of_halves, with_average),
    *(with_weights, stepping_outside, with_subclass, predicting),
)
STEPS = {step.__name__: step for step in _STEPS}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", STEPS)
def test_a_replayed_step_has_the_same_bits(name: str) -> None:
    assert check(STEPS[name]).replays == CALLS - 3


@pytest.mark.parallel([2])
def test_a_replayed_step_of_volumes_has_the_same_bits() -> None:
    assert check(of_volumes, volume, depth=-1).replays == CALLS - 3


@pytest.mark.parallel(2)
def test_kernels_are_chosen_as_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "_FEWEST_PRODUCTS", 0)
    volumes._pays.cache_clear()
    assert "mkldnn" in check(of_volumes, volume, depth=2).source
    volumes._pays.cache_clear()


@pytest.mark.parallel(4)
@pytest.mark.parametrize(
    "axes",
    [{"sample": 2, "height": 2}, {"height": 2, "width": 2}, {"channel": 2, "width": 2}],
    ids=str,
)
def test_a_step_is_replayed_on_any_grid(axes: Mapping[str, int]) -> None:
    assert check(with_momentum, **axes).replays == CALLS - 3


@pytest.mark.parallel([2])
@pytest.mark.parametrize("feedback", [False, True])
def test_gradients_travel_as_halves_in_replays_too(feedback: bool) -> None:
    """With error feedback a step keeps what rounding leaves out, and goes on as it is."""

    def run(compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        grid = dc.ProcessGrid(height=-1)
        model = dc.parallelize(classifier(), grid, wire="bfloat16", error_feedback=feedback)
        step: Any = with_momentum(model, grid)
        step = dc.compile(step) if compiled else step
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            losses = [step(*batch) for batch in batches(grid)]
        return [*losses, *model.state_dict().values()], step

    assert same_bits(run).replays == (0 if feedback else CALLS - 3)


@pytest.mark.parallel([2])
def test_a_step_of_sharded_weights_is_replayed() -> None:
    def run(compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        grid = dc.ProcessGrid(channel=-1)
        net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        model = dc.parallelize(net, grid, shard_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step: Any = optimized(optimizer, lambda x: model(x).square().mean())
        f = dc.compile(step) if compiled else step
        g = torch.Generator().manual_seed(0)
        x = [torch.randn(2, 4, 9, 8, generator=g) for _ in range(CALLS)]
        losses = [f(dc.distribute_tensor(each, grid)) for each in x]
        return [*losses, *dc.full_state_dict(model).values()], f

    assert same_bits(run).replays == CALLS - 3


@pytest.mark.parallel([2])
def test_cases_are_traced_apart() -> None:
    """Another mini-batch, a mode, frozen weights and no_sync are cases of their own."""

    def run(compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        grid = dc.ProcessGrid(height=-1)
        model = dc.parallelize(classifier(), grid)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
            loss = F.cross_entropy(model(x), y) * weight
            if torch.is_grad_enabled():
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss

        f: Any = dc.compile(step) if compiled else step
        torch.manual_seed(1)
        losses = []
        for turn in range(3):
            for size in (4, 4, 4, 4, 3):
                for x, y in [next(batches(grid, (size, 3, 24, 20)))]:
                    losses.append(f(x, y))
                    losses.append(f(x, y, weight=0.5))
            model.eval()
            with torch.no_grad():
                losses += [f(x, y) for _ in range(4)]
            model.train()
            model[0].requires_grad_(turn == 1)
        return [*losses, *model.state_dict().values()], f

    assert same_bits(run).replays > 10


def sets_rates(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[3].p, model[1].eps = 0.6, 0.1


def trains_more(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.2})


@pytest.mark.parallel([2])
@pytest.mark.parametrize("change", [sets_rates, trains_more], ids=lambda f: f.__name__)
def test_a_change_of_a_setting_is_another_case(change: Callable[..., None]) -> None:
    def make_step(model: Any, grid: dc.ProcessGrid) -> Step:
        optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
        calls = iter(range(CALLS))

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            return loss

        step.after = lambda: change(model, optimizer) if next(calls) == 3 else None
        return step

    assert 0 < check(make_step).replays < CALLS - 3


# Steps that go on as they are


def reads(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that prints a number."""

    def step(x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    return step


def counts(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step with a number that is another each time."""
    weights = iter(range(1, CALLS + 1))
    return gradients_of(model, lambda x, y: F.cross_entropy(model(x), y) * next(weights))


def replaces(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that keeps what it makes for the next time."""
    kept: list[Tensor] = [torch.zeros(())]

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        kept[0] = kept[0] * 0.9 + loss.detach().full_tensor() * 0.1
        return kept[0]

    return step


def schedules(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step within which a scheduler steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss

    return step


def sets_random_numbers(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step whose checkpoint draws the numbers of dropout again."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    return gradients_of(model, loss)


def chooses(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that does as the elements say."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return F.cross_entropy(z if x.mean() > 0 else -z, y)

    return gradients_of(model, loss)


def picks(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that takes some elements of a tensor, by their values."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return z[z > 0].sum()

    return gradients_of(model, loss)


def differentiates_inputs(model: nn.Module, grid: dc.ProcessGrid) -> Step:
    """Return a step that computes the gradient of its input, too."""
    return gradients_of(model, lambda x, y: F.cross_entropy(model(x.requires_grad_()), y))


LEFT = {
    reads: "reads elements",
    counts: "not the same each time",
    replaces: "it changes 'kept'",
    schedules: "settings of an optimizer",
    sets_random_numbers: "state of random numbers",
    chooses: "reads elements",
    picks: "reads elements",
    differentiates_inputs: "requires gradients",
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("make_step", LEFT, ids=lambda f: f.__name__)
def test_other_steps_go_on_as_they_are_and_say_why(make_step: MakeStep) -> None:
    with told_once("compile: ") as said:
        assert check(make_step).replays == 0
    assert LEFT[make_step] in said[0]


@pytest.mark.parallel(RANKS)
def test_a_step_needs_a_distributed_tensor() -> None:
    message = raised_everywhere(TypeError, dc.compile(lambda x: x), torch.zeros(1))
    assert "pass the batch" in message


# Replays


def adding(model: nn.Module, compiled: bool) -> Any:
    """Return a step, compiled or not, that adds to gradients which are there."""

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return dc.compile(step) if compiled else step


@pytest.mark.parallel([1, 2])
def test_gradients_that_are_there_are_a_case_of_their_own() -> None:
    """A step adds to gradients that the program has kept."""

    def run(compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        grid = dc.ProcessGrid(height=-1)
        model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
        f = adding(model, compiled)
        found = []
        for i, (x, _) in enumerate(batches(grid)):
            for _ in range(4):
                f(x)
            found += [p.grad.clone() for p in model.parameters()]
            if i % 2:
                model.zero_grad()
        return found, f

    same_bits(run)


@pytest.mark.parallel([2])
def test_parts_of_gradients_stay_parts_until_they_are_summed() -> None:
    """A mini-batch in no_sync around the step, and one without, make one sum."""

    def run(compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        grid = dc.ProcessGrid(height=-1)
        model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
        f = adding(model, compiled)
        found = []
        for x, _ in batches(grid):
            with dc.no_sync(model):
                f(x)
            f(x * 0.5)
            found += [p.grad for p in model.parameters()]
            model.zero_grad()
        return found, f

    assert same_bits(run).replays == 2 * CALLS - 6


@pytest.mark.parallel(2)
def test_a_replay_makes_no_call_of_a_module_and_shows_what_it_does() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    step = dc.compile(plain(nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten()), grid))
    for batch in batches(grid):
        step(*batch)
    assert len(calls) == 3
    lines = [line.split("(")[0].split()[-1] for line in step.source.splitlines()]
    assert [x.rpartition("_")[0] for x in lines].count("start_exchange") >= 1
    assert "convolution_backward" in step.source


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
def test_a_step_goes_on_after_an_error_in_any_call() -> None:
    grid = dc.ProcessGrid(height=2)
    for failing in range(5):
        torch.manual_seed(0)
        model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
        step = dc.compile(plain(nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten()), grid))
        for i, batch in enumerate(batches(grid)):
            if i == failing:
                with interrupted(grid), pytest.raises(ConnectionError):
                    step(*batch)
        eager = plain(nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten()), grid)
        assert identical(step(*batch), eager(*batch))


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
@pytest.mark.parametrize("seed", range(12))
def test_random_stacks_are_replayed_with_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng)
    rng.shuffle(axes := ["height", "width"])
    with dc.method(rng.choice(["assembled", "overlapped"])):
        assert check(plain, network, **{axes[0]: -1}).replays == CALLS - 3
