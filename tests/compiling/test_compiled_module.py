"""A compiled module gives what the module gives, and its backward pass the same gradients."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from tests.compiling.test_compile import (
    CALLS,
    batches,
    classifier,
    identical,
    random_network,
    same_bits,
    volume,
)
from tests.support.serial import raised_everywhere, told_once

Loop = Callable[[Any, nn.Module, dc.ProcessGrid], list[Any]]
"""Trains a module by the calls of another one, which is compiled or not."""


def compared(loop: Loop, network: Callable[[], nn.Module] = classifier, **axes: int) -> Any:
    """Check that a loop has the same bits with the compiled module; return it."""
    grid = dc.ProcessGrid(**(axes or {"height": -1}))

    def run(compiled: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = dc.parallelize(network(), grid)
        called: Any = dc.compile(model) if compiled else model
        torch.manual_seed(1)
        found = loop(called, model, grid)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*found, *model.state_dict().values(), *gradients], called

    return same_bits(run)


def plain(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Train as most programs do, which zero gradients before the backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches(grid):
        loss = F.cross_entropy(f(x), y)
        optimizer.zero_grad()
        loss.backward()
        dc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def with_accumulation(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Train with two forward passes before the first of their backward passes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches(grid):
        with dc.no_sync(model):
            first, second = F.cross_entropy(f(x), y), F.cross_entropy(f(x * 0.5), y)
            first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [first.detach(), second.detach()]
    return losses


def with_autocast(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Train in bfloat16."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(f(x), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches(grid):
        found = loss(*batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.detach())
    return losses


def differentiating_inputs(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Compute the gradients of the inputs, and go through some graphs twice."""
    found = []
    for x, y in batches(grid):
        x.requires_grad_()
        loss = F.cross_entropy(f(x), y)
        (loss * 2).backward(retain_graph=True)
        loss.backward()
        found.append(x.grad)
    return found


def evaluating_between(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Train, evaluate and freeze in turns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for turn in range(3):
        for x, y in batches(grid):
            loss = F.cross_entropy(f(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found += [loss.detach(), f(x)]
            model.train()
        next(model.children()).requires_grad_(turn == 1)
    return found


def with_hooks(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Train with hooks of parameters, of which one comes later."""
    first, *_, last = model.parameters()
    first.register_hook(lambda g: g * 2)
    found = plain(f, model, grid)
    last.register_hook(lambda g: g.abs())
    return found + plain(f, model, grid)


def of_volumes(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Train on volumes."""
    found = []
    for x, _ in batches(grid, (2, 1, 8, 12, 8)):
        loss = f(x).square().mean()
        loss.backward()
        found.append(loss.detach())
    return found


LOOPS = (
    *(plain, with_accumulation, with_autocast, differentiating_inputs),
    *(evaluating_between, with_hooks),
)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_a_replayed_module_has_the_same_bits(loop: Loop) -> None:
    assert compared(loop).replays >= CALLS - 2


@pytest.mark.parallel([2])
def test_a_replayed_module_of_volumes_has_the_same_bits() -> None:
    assert compared(of_volumes, volume).replays == CALLS - 2


@pytest.mark.parallel(4)
@pytest.mark.parametrize("axes", [{"height": 2, "width": 2}, {"height": 2, "filter": 2}], ids=str)
def test_a_module_is_replayed_on_any_grid(axes: Mapping[str, int]) -> None:
    assert compared(plain, **axes).replays == CALLS - 2


class Several(nn.Module):
    """Returns tensors in a dictionary: one twice, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        y = self.conv(x) * scale
        return {"y": y, "again": [y, x], "largest": y.detach().amax(1)}


@pytest.mark.parallel([2])
def test_results_are_found_in_their_structure() -> None:
    def loop(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
        found = []
        for x, _ in batches(grid):
            result = f(x, scale=0.5)
            again, same = result["again"]
            assert not result["largest"].requires_grad and not same.requires_grad
            result["y"].mul_(2.0)  # as other programs do
            (result["y"].square().mean() + again.mean()).backward()
            found += [result["y"].detach(), again.detach(), same, result["largest"]]
        return found

    assert compared(loop, Several).replays == CALLS - 2


class Two(nn.Module):
    """Takes two tensors and a number, and has two heads and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.act = nn.ReLU()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, y: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        return self.act(self.a(x)) * self.scale + self.b(y), self.b(x) * float(sum(more))


def changing(f: Any, model: Any, grid: dc.ProcessGrid) -> list[Any]:
    """Change after some calls what a case has to tell apart."""
    found = []

    def call(x: Tensor, *more: Any) -> None:
        model.zero_grad()
        loss = f(x, *more)[0].square().mean()
        loss.backward()
        found.append(loss.detach())
        found.append([p.grad is None for p in model.parameters()])

    for change in ("nothing", "apart", "buffer", "part", "type"):
        if change == "buffer":
            model.scale = torch.full((1,), 2.0)
        if change == "part":
            model.act = nn.Tanh()
        if change == "type":
            model.double()
        for x, _ in batches(grid):
            x = x.double() if change == "type" else x
            call(x, x * 0.5 if change == "apart" else x)
    return found


def sums_first(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Begin with a loss whose gradient is one number in all places."""
    for i, (x, _) in enumerate(batches(grid)):
        y = f(x, x)[0]
        (y.sum() if i < 4 else y.square().sum()).backward()
    return []


@pytest.mark.parallel([2])
@pytest.mark.parametrize("loop", [changing, sums_first])
def test_changes_are_cases_of_their_own(loop: Loop) -> None:
    assert compared(loop, Two).replays >= CALLS - 2


@pytest.mark.parallel([2])
def test_another_loss_in_a_replay_is_an_error() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(Two(), grid)
    compiled = dc.compile(model)

    def loss_of(x: Tensor, head: int) -> None:
        compiled(x, x, 1.0)[head].square().mean().backward()

    for x, _ in batches(grid):
        loss_of(x, 0)
    assert compiled.replays == CALLS - 2
    assert "other outputs" in raised_everywhere(RuntimeError, loss_of, x, 1)


class Number:
    """A number that may change."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __radd__(self, other: float) -> float:
        return other + self.value


@pytest.mark.parallel([2])
def test_objects_among_the_arguments_are_guarded() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(Two(), grid)
    f, number = dc.compile(model), Number(1.0)
    for i, (x, _) in enumerate(batches(grid)):
        number.value = 1.0 if i < 3 else 2.0
        y = f(x, x, number)[1]
        assert identical(y.detach(), model(x, x, number.value)[1].detach())
        y.sum().backward()
    assert f.replays == CALLS - 4


class Flattens(nn.Module):
    """Returns positions in one dimension, of which no rank has a block, and takes such."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.linear(x)
        return self.conv(x).flatten(2).transpose(1, 2)


@pytest.mark.parallel([2])
def test_merged_dimensions_are_returned_and_taken() -> None:
    def loop(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
        found = []
        for x, _ in batches(grid):
            loss = f(f(x.requires_grad_())).square().mean()
            loss.backward()
            found += [loss.detach(), x.grad]
        return found

    with told_once("tensor with merged"):
        assert compared(loop, Flattens, width=2).replays == CALLS - 2


@pytest.mark.parallel([2])
def test_the_gradient_of_a_replicated_argument_is_summed_once() -> None:
    def loop(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
        found = []
        for x, _ in batches(grid):
            scale = dc.distribute_tensor(torch.ones(3, 1, 1), grid, dc.Layout()).requires_grad_()
            f(x * scale).square().mean().backward()
            again = scale.detach().requires_grad_()
            f(again).square().mean().backward()
            found += [scale.grad, again.grad]
        return found

    compared(loop, lambda: nn.Sequential(nn.Flatten(0), nn.ReLU()))


@pytest.mark.parallel([2])
def test_a_backward_pass_does_not_use_what_has_changed() -> None:
    """A replay refuses what autograd refuses, in the same words."""
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(
        nn.Sequential(nn.Conv2d(3, 2, 3), nn.Sigmoid(), nn.Conv2d(2, 2, 3)), grid
    )
    compiled = dc.compile(model)

    def change(x: Tensor) -> None:
        loss = compiled(x).square().mean()
        with torch.no_grad():
            model[2].weight.mul_(2.0)
        loss.backward()

    def repeat(x: Tensor) -> None:
        loss = compiled(x).square().mean()
        loss.backward()
        loss.backward()

    for x, _ in batches(grid):
        compiled(x).square().mean().backward()
    assert compiled.replays == CALLS - 2
    assert "modified by an inplace operation" in raised_everywhere(RuntimeError, change, x)
    assert "second time" in raised_everywhere(RuntimeError, repeat, x)


@pytest.mark.parallel([2])
def test_compiled_programs_within_a_compiled_one_are_part_of_it() -> None:
    grid = dc.ProcessGrid(height=2)

    def run(compiled: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = dc.parallelize(nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU()), grid)
        f: Any = dc.compile(model) if compiled else model

        def loss_of(x: Tensor) -> Tensor:
            return f(x).square().mean()

        inner: Any = dc.compile(loss_of) if compiled else loss_of
        whole: Any = dc.compile(lambda x: inner(x) * 2) if compiled else lambda x: inner(x) * 2
        losses = []
        for x, _ in batches(grid):
            losses.append(whole(x))
            losses[-1].backward()
        return [*(x.detach() for x in losses), *(p.grad for p in model.parameters())], whole

    assert same_bits(run).replays == CALLS - 2


@pytest.mark.parallel([2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_within_a_module_have_the_same_gradients(reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            part, rest = self[0], self[1]
            options: Any = {"use_reentrant": reentrant, "preserve_rng_state": False}
            return rest(checkpoint(part, x, **options))

    def loop(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
        for x, _ in batches(grid):
            f(x.requires_grad_()).square().mean().backward()
        return []

    network = Checkpointed(nn.Conv2d(3, 2, 3), nn.Conv2d(2, 2, 3))
    assert compared(loop, lambda: deepcopy(network)).replays == CALLS - 2


@pytest.mark.parallel(2)
def test_the_result_behaves_like_the_module(tmp_path: Path) -> None:
    grid = dc.ProcessGrid(height=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2))
    compiled = dc.compile(dc.parallelize(model, grid))
    assert isinstance(compiled, nn.Sequential) and list(compiled.state_dict()) == list(
        model.state_dict()
    )
    assert [*map(id, compiled.parameters())] == [*map(id, model.parameters())]
    compiled.eval()
    assert not model.training and not model[1].training
    compiled.train()
    compiled.note = 1.0
    assert model.note == 1.0 and compiled[0] is model[0] and compiled._orig_mod is model
    x = dc.distribute_tensor(torch.randn(1, 3, 8, 8), grid)
    with dc.no_sync(compiled):
        compiled(x).sum().backward()
    compiled(x).sum().backward()
    compiled.zero_grad()
    assert model[0].weight.grad is None
    with torch.no_grad():
        other = deepcopy(compiled)
        expected = model.eval()(x).to_local()
        other.eval()
        for p in model.parameters():
            p.zero_()
        for _ in range(3):
            assert torch.equal(other(x).to_local(), expected)
    assert other.replays == 1
    torch.save(compiled.state_dict(), tmp_path / f"state{grid.rank}.pt")
    other.load_state_dict(torch.load(tmp_path / f"state{grid.rank}.pt"))
    assert not any(p.any() for p in other.parameters())
    plain_one = dc.compile(nn.Linear(2, 2))
    torch.save(plain_one, tmp_path / f"{grid.rank}.pt")
    again = torch.load(tmp_path / f"{grid.rank}.pt", weights_only=False)
    assert torch.equal(again.weight, plain_one.weight) and again.replays == 0


@pytest.mark.parallel(2)
def test_parameters_that_move_are_found() -> None:
    def loop(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
        found = []
        for i, (x, _) in enumerate(batches(grid)):
            if i == 3:
                for p in model.parameters():
                    p.data = p.data * 0.5
            if i == 5:
                model[0].weight.data.mul_(2.0)  # type: ignore[index, union-attr, operator]
            y = f(x)
            y.square().mean().backward()
            found.append(y.detach())
        return found

    assert compared(loop, lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Tanh())).replays > 0


@pytest.mark.parallel([2])
@pytest.mark.parametrize("as_a_function", [False, True])
def test_a_dropped_program_frees_its_memory(as_a_function: bool) -> None:
    grid = dc.ProcessGrid(height=-1)

    def used() -> list[Any]:
        model = dc.parallelize(classifier(), grid)
        called: Any = dc.compile(lambda x: model(x)) if as_a_function else dc.compile(model)
        for x, _ in batches(grid):
            step_of(called, x)
        assert called.replays > 0
        return [ref(model), *map(ref, model.parameters())]

    held = used()
    gc.collect()
    assert not any(each() is not None for each in held)


# Modules that go on as they are


class Reads(nn.Module):
    """Does as the elements say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if y.mean() > 0 else -y


class Writes(Reads):
    """Writes to its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mul_(1.0))


def step_of(f: Any, x: Tensor) -> None:
    """Run both passes."""
    y = f(x)
    (y[0] if isinstance(y, tuple) else y).square().mean().backward()


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("network", "why"),
    [(Reads, "branching"), (Writes, "writes to one of its arguments")],
)
def test_other_modules_go_on_as_they_are_and_say_why(
    network: Callable[[], nn.Module], why: str
) -> None:
    def loop(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
        for x, _ in batches(grid):
            step_of(f, x)
        return []

    with told_once("compile: ") as said:
        assert compared(loop, network).replays == 0
    assert why in said[0]


@pytest.mark.parallel([2])
def test_a_module_without_a_backward_pass_goes_on_as_it_is() -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Conv2d(3, 2, 3), grid)
    compiled = dc.compile(model)
    x = dc.distribute_tensor(torch.randn(1, 3, 8, 8), grid)
    with told_once("no backward pass followed"):
        found = [compiled(x) for _ in range(12)]
    assert all(identical(y.detach(), found[0].detach()) for y in found)
    found[-1].sum().backward()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("seed", range(4))
def test_random_stacks_are_replayed_with_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng)
    rng.shuffle(axes := ["height", "width"])
    with dc.method(rng.choice(["assembled", "overlapped"])):
        assert compared(plain, network, **{axes[0]: -1}).replays == CALLS - 2


@pytest.mark.parallel(2)
def test_no_more_graphs_are_made_than_torch_allows() -> None:
    most = torch._dynamo.config.recompile_limit
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    f = dc.compile(model)
    with told_once("recompile_limit"):
        for height in range(8, 8 + most + 2):
            x = dc.distribute_tensor(torch.ones(1, 3, height, 4), grid)
            for _ in range(3):
                before = f.replays
                y = f(x)
                assert identical(y.detach(), model(x).detach())
                y.sum().backward()
            assert (f.replays > before) == (height < 8 + most), height


class Modes(nn.Module):
    """Pass on the lowest modes of planes in a new spectrum of zeros, as Fourier operators do."""

    def forward(self, x: Tensor, others: Tensor | None = None) -> Tensor:
        f = torch.fft.rfft2(x)
        spectrum = torch.zeros(f.shape, dtype=f.dtype)
        if others is not None and self.training:
            spectrum = others.expand(f.shape).to(f.dtype)
        elif others is not None:
            spectrum.data[..., 4:, 4:] = others  # changes no version of the spectrum
        spectrum[..., :3, :3] = f[..., :3, :3] * (2 + 1j)
        return torch.fft.irfft2(spectrum, s=x.shape[-2:])


def modes_classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), Modes(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parallel([2, 3])
def test_few_modes_are_replayed_with_the_same_bits_and_bytes() -> None:
    assert compared(plain, modes_classifier).replays == CALLS - 2
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(Modes(), grid)
    compiled = dc.compile(model)
    x = dc.distribute_tensor(torch.randn(1, 2, 12, 12), grid).requires_grad_()
    moved = []
    for call in (model, compiled, compiled):
        dc.redistributions(reset=True)
        call(x).sum().backward()
        moved.append({r.operator: r.bytes for r in dc.redistributions(reset=True)})
    assert moved[2] == moved[1] == moved[0]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("training", [True, False])
def test_a_spectrum_that_was_zero_in_the_traced_call_may_hold_other_values(training: bool) -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(Modes().train(training), grid)
    compiled = dc.compile(model)
    x = dc.distribute_tensor(torch.randn(1, 2, 12, 12), grid).requires_grad_()
    for value in (0.0, 0.0, 1.0, 2.0):
        y, expected = (f(x, torch.tensor(value)) for f in (compiled, model))
        torch.testing.assert_close(y.full_tensor(), expected.full_tensor())
        y.sum().backward()
    assert compiled.replays == 2
