"""Programs have the same bits with compiled steps as without, whatever their habits."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.compiling.test_compile import identical
from tests.support.serial import told_once

CALLS = 14

Compile = Callable[[Any], Any]
Program = Callable[[Compile, dc.ProcessGrid], Iterator[Any]]


def run(program: Program, compiled: bool) -> tuple[list[Any], list[Any]]:
    """Return the numbers that a program yields, and its compiled steps."""
    torch.manual_seed(0)
    steps: list[Any] = []

    def compile(step: Any) -> Any:
        if not compiled:
            return step
        steps.append(dc.compile(step))
        return steps[-1]

    found = [
        x.detach().clone() if isinstance(x, Tensor) else x
        for x in program(compile, dc.ProcessGrid(height=-1))
    ]
    return found, steps


def replays_of(program: Program) -> list[int]:
    """Check that a program yields the same bits with compiled steps; return their replays."""
    expected = run(program, False)[0]
    actual, steps = run(program, True)
    assert [
        i for i, (x, y) in enumerate(zip(actual, expected, strict=True)) if not identical(x, y)
    ] == []
    return [step.replays for step in steps]


def network(grid: dc.ProcessGrid, channels: int = 2) -> nn.Module:
    """Return a parallelized network in double precision."""
    layers = nn.Conv2d(channels, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1)
    return dc.parallelize(nn.Sequential(*layers).double(), grid)


def batches(grid: dc.ProcessGrid) -> Iterator[tuple[dc.DistTensor, dc.DistTensor]]:
    """Yield mini-batches with two channels, and their targets."""
    for seed in range(CALLS):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 2, 2, 6, 5, generator=g, dtype=torch.float64)
        yield dc.distribute_tensor(x, grid), dc.distribute_tensor(y, grid)


def gradients(*models: nn.Module) -> list[Tensor | None]:
    return [p.grad for model in models for p in model.parameters()]


# Gradients


def accumulates(set_to_none: bool) -> Program:
    def program(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
        model = network(grid)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        @compile
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for i, batch in enumerate(batches(grid)):
            yield step(*batch)
            yield from gradients(model)
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none)

    return program


@pytest.mark.parallel(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up_over_calls(set_to_none: bool) -> None:
    # Three calls each of the first of a sum, and of the others.
    assert replays_of(accumulates(set_to_none)) == [CALLS - (5 if set_to_none else 3)]


def adversaries(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
    """Train two networks in turns, one of them in every other call."""
    maker, critic = network(grid), network(grid)
    first, second = (torch.optim.Adam(m.parameters(), 0.1) for m in (maker, critic))

    @compile
    def judge(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            made = maker(x)
        second.zero_grad()
        loss = F.softplus(critic(made)).mean() + F.softplus(-critic(y)).mean()
        loss.backward()
        second.step()
        return loss

    @compile
    def make(x: Tensor) -> Tensor:
        first.zero_grad()
        loss = F.softplus(-critic(maker(x))).mean()
        loss.backward()
        first.step()
        return loss

    for i, (x, y) in enumerate(batches(grid)):
        yield judge(x, y)
        if i % 2:
            yield make(x)
    yield from gradients(maker, critic)


@pytest.mark.parallel(2)
def test_two_networks_are_trained_in_turns() -> None:
    assert replays_of(adversaries) == [CALLS - 4, CALLS // 2 - 3]


def halves(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
    """Zero in one step the gradients to which another one adds."""
    model = dc.parallelize(nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1) for _ in "ab"]), grid)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def one(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model[0](x), y).backward()

    @compile
    def other(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model[1](x), y).backward()

    for batch in batches(grid):
        one(*batch)
        other(*batch)
        yield from gradients(model)
        optimizer.step()


@pytest.mark.parallel(2)
def test_gradients_of_other_parts_are_zeroed_in_replays() -> None:
    assert replays_of(halves) == [CALLS - 3, CALLS - 3]


def scaled(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
    """Train a tensor that belongs to no module, whose gradient is kept after some calls."""
    model, scale = network(grid), torch.ones((), requires_grad=True, dtype=torch.float64)

    @compile
    def step(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x).detach() * scale, y).backward()

    for i, batch in enumerate(batches(grid)):
        step(*batch)
        yield scale.grad
        if i < 5 or i == 9:
            scale.grad = None


@pytest.mark.parallel(2)
def test_the_gradient_of_a_tensor_outside_of_modules_adds_up() -> None:
    assert replays_of(scaled)[0] > CALLS // 2


# What a replay would not see


class Varied(nn.Module):
    """Holds parts in lists, one whose weight alone is used, and settings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.parts = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()])
        self.unregistered = [nn.Tanh()]
        self.used = nn.Conv2d(4, 2, 1)
        self.stage, self.settings = 0, {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in [*self.parts, *self.unregistered]:
            x = part(x)
        x = x * self.settings["scale"] * FACTOR
        return F.conv2d(x, self.used.weight) if self.stage == 0 else self.used(x) * 2


RATE = FACTOR = 1.0


class Trainer:
    """A program whose step reads its variables in many places."""

    def __init__(self, grid: dc.ProcessGrid) -> None:
        global RATE, FACTOR
        RATE, FACTOR, self.grid, self.step = 1.0, 1.0, grid, 0
        self.model: Any = dc.parallelize(Varied().double(), grid)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.weight, self.settings = 1.0, {"power": 2, "scale": 1.0}
        self.scale = torch.ones(1, dtype=torch.float64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        difference = (x - y) * self.scale * self.settings["scale"] * RATE
        return difference.pow(self.settings["power"]).mean() * self.weight

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def weighs(t: Trainer) -> None:
    t.weight = 0.5


def sets(t: Trainer) -> None:
    t.settings["scale"] = 0.5


def sets_a_global_variable(t: Trainer) -> None:
    global RATE
    RATE = 0.5


def sets_within_a_module(t: Trainer) -> None:
    t.model.settings["scale"] = 0.5


def sets_what_a_module_reads(t: Trainer) -> None:
    global FACTOR
    FACTOR = 0.5


def scales(t: Trainer) -> None:
    t.scale = t.scale * 2


def optimizes_otherwise(t: Trainer) -> None:
    t.optimizer = torch.optim.AdamW(t.model.parameters(), 0.01)


def begins_anew(t: Trainer) -> None:
    t.model = dc.parallelize(Varied().double(), t.grid)


def swaps_a_part(t: Trainer) -> None:
    t.model.parts[1] = nn.ReLU()


def swaps_in_a_list(t: Trainer) -> None:
    t.model.unregistered[0] = nn.ReLU()


def freezes(t: Trainer) -> None:
    t.model.used.requires_grad_(False)


def counts_stages(t: Trainer) -> None:
    t.model.stage = 1


def dilates(t: Trainer) -> None:
    t.model.first.dilation = t.model.first.padding = (2, 2)


def hooks_a_module(t: Trainer) -> None:
    t.model.first.register_forward_hook(lambda module, given, result: result * 2)


def hooks_a_parameter(t: Trainer) -> None:
    t.model.first.bias.register_hook(lambda gradient: gradient * 2)


def is_channels_last(t: Trainer) -> None:
    t.model.to(memory_format=torch.channels_last)


CHANGES = (
    *(weighs, sets, sets_a_global_variable, scales, optimizes_otherwise, begins_anew),
    *(swaps_a_part, swaps_in_a_list, freezes, counts_stages, dilates, hooks_a_module),
    *(hooks_a_parameter, is_channels_last, sets_within_a_module, sets_what_a_module_reads),
)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("change", [sets_within_a_module, sets_what_a_module_reads, swaps_a_part])
def test_changes_of_a_compiled_module_are_seen(change: Callable[[Trainer], None]) -> None:
    def program(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
        trainer = Trainer(grid)
        model = compile(trainer.model)
        for i, (x, y) in enumerate(batches(grid)):
            if i == CALLS // 2:
                change(trainer)
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                yield model(x)
        yield from gradients(trainer.model)

    assert replays_of(program) == [CALLS - 6]


@pytest.mark.parallel(2)
@pytest.mark.filterwarnings("ignore:compile")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_between_calls_are_seen(change: Callable[[Trainer], None]) -> None:
    def program(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
        trainer = Trainer(grid)
        step = compile(trainer)
        for i, batch in enumerate(batches(grid)):
            if i == CALLS // 2:
                change(trainer)
            yield step(*batch)
            trainer.step += 1
        yield from gradients(trainer.model)

    # Other tensors are traced at once, other cases when they come for the second time. With a hook
    # of a parameter, whose sum is read for it, the step goes on as it is.
    lost = {scales: 5, hooks_a_parameter: 3 + CALLS // 2}.get(change, 6)
    assert replays_of(program) == [CALLS - lost]


def accumulates_by_a_counter(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
    """Let the optimizer step in every third call, and scale the loss by a variable around it."""
    model, count = network(grid), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if count == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step = compile(step)
    for batch in [*batches(grid)] * 2:
        yield step(*batch)
        count = (count + 1) % 3


@pytest.mark.parallel(2)
def test_a_variable_around_the_step_is_seen() -> None:
    assert replays_of(accumulates_by_a_counter) == [2 * CALLS - 9]


@pytest.mark.parallel(2)
def test_a_step_is_a_method_and_takes_models_optimizers_and_losses() -> None:
    def weighted(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: F.mse_loss(x, y) * weight

    def program(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
        class Training:
            def __init__(self) -> None:
                self.model = network(grid)
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

            @compile
            def step(self, model: Any, optimizer: Any, x: Tensor, y: Tensor, loss: Any) -> Tensor:
                self.optimizer.zero_grad()
                found = loss(model(x), y)
                found.backward()
                optimizer.step()
                return found

        one, other = Training(), Training()
        for i, (x, y) in enumerate(batches(grid)):
            for t in (one, other):
                yield t.step(t.model, t.optimizer, x, y, weighted(1.0 if i < CALLS // 2 else 0.5))
        yield from gradients(one.model, other.model)
        kept = [getattr(t.step, "replays", CALLS - 6) for t in (one, other)]
        assert kept == [CALLS - 6, CALLS - 6]

    replays_of(program)


@pytest.mark.parallel(2)
def test_results_keep_their_types() -> None:
    class Losses(NamedTuple):
        whole: Tensor
        parts: OrderedDict[str, Tensor]

    def program(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
        model = network(grid)

        @compile
        def step(x: Tensor) -> Losses:
            loss = model(x).square().mean()
            return Losses(loss * 2, OrderedDict(part=loss))

        for x, _ in batches(grid):
            losses = step(x)
            losses.parts.move_to_end("part")
            yield losses.whole

    assert replays_of(program) == [CALLS - 3]


@pytest.mark.parallel(2)
def test_a_copy_of_a_compiled_module_is_of_a_copy_of_the_module() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = network(grid)
    x, _ = next(batches(grid))
    step = dc.compile(lambda x: model(x).square().mean().backward())
    compiled = dc.compile(model)
    for _ in range(4):
        step(x)
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
        other = deepcopy(compiled)
        expected = model(x).to_local()
        for p in model.parameters():
            p.zero_()
        assert torch.equal(other(x).to_local(), expected)
    deepcopy(step)(x)
    assert torch.count_nonzero(model[2].bias.grad) > 0


# Steps that go on as they are


def counts(trainer: Trainer, x: Tensor, y: Tensor) -> Any:
    trainer.weight += 1
    return trainer(x, y)


def keeps(trainer: Trainer, x: Tensor, y: Tensor) -> Any:
    trainer.settings["last"] = trainer(x, y)
    return trainer.settings["last"]


def draws(trainer: Trainer, x: Tensor, y: Tensor) -> Any:
    return trainer(x * (2 if random.random() < 0.2 else 1), y)


def reports_rates(trainer: Trainer, x: Tensor, y: Tensor) -> Any:
    rate = trainer.optimizer.param_groups[0]["lr"]
    return [trainer(x, y), rate]


def scales_losses(trainer: Trainer, x: Tensor, y: Tensor) -> Any:
    trainer.optimizer.zero_grad()
    SCALER.scale(trainer.loss(trainer.model(x), y)).backward()
    SCALER.step(trainer.optimizer)
    SCALER.update()


def follows_a_schedule(trainer: Trainer, x: Tensor, y: Tensor) -> Any:
    trainer.optimizer.param_groups[0]["lr"] = next(trainer.rates)
    return trainer(x, y)


def sets_modes(trainer: Trainer, x: Tensor, y: Tensor) -> Any:
    trainer.model.train(next(trainer.turns))
    return trainer(x, y)


SCALER = torch.amp.GradScaler("cpu", init_scale=16.0)

LEFT = {
    counts: "it changes 'weight'",
    keeps: "it changes 'settings'",
    draws: "draws random numbers",
    reports_rates: "returns a fraction",
    scales_losses: "a GradScaler lets",
    follows_a_schedule: "settings of an optimizer",
    sets_modes: "settings of modules",
}


@pytest.mark.parallel(2)
@pytest.mark.parametrize("habit", LEFT, ids=lambda f: f.__name__)
def test_steps_that_a_replay_would_get_wrong_go_on_as_they_are(habit: Callable[..., Any]) -> None:
    def program(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
        random.seed(0)
        trainer: Any = Trainer(grid)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1, fused=True)
        trainer.rates = iter([1 / (1 + i) for i in range(CALLS)])
        trainer.turns = cycle([False, True])
        step = compile(lambda x, y: habit(trainer, x, y))
        for batch in batches(grid):
            result = step(*batch)
            yield from result if isinstance(result, list) else [result]
        yield from gradients(trainer.model)

    with told_once("compile: ") as said:
        assert replays_of(program) == [0]
    assert LEFT[habit] in said[0]
