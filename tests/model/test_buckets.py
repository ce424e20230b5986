"""Gradients live in the memory of their bucket, and look to the program like serial torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from benchmarks.measuring.memory import peak_of
from tests.model.test_parallelize import Branching, Twins, batch, grids, loss_of, net
from tests.support.serial import deviation

RANKS = [1, 2, 4]
SEVERAL = [2, 3, 4]


def place_of(module: nn.Module) -> range:
    """Return the addresses from the first to the last gradient."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    first = min(gradients, key=Tensor.data_ptr)
    last = max(gradients, key=Tensor.data_ptr)
    return range(first.data_ptr(), last.data_ptr() + last.numel() * last.element_size())


def size_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parallel(SEVERAL)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_a_bucket_lie_side_by_side(set_to_none: bool) -> None:
    twins = Twins(grids(20)[0])
    for seed in range(3):
        twins.backward(seed)
        twins.check()
        assert len(place_of(twins.parallel)) <= size_of(twins.parallel)
        place = place_of(twins.parallel)
        twins.zero_grad(set_to_none)
        if not set_to_none:
            assert place_of(twins.parallel) == place


@pytest.mark.parallel(SEVERAL)
def test_a_step_holds_one_copy_of_the_gradients() -> None:
    grid = dc.ProcessGrid(sample=-1)
    layers, width = 8, 256

    def make() -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        dc.parallelize(model, grid, bucket_bytes=4 * width**2)
        x = dc.DistTensor.from_local(torch.ones(1, width), grid)

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return step

    peak, matrix = peak_of(make), 4 * width**2
    # The parameters, as much again for the gradients, and a bucket on its way.
    assert 2 * layers * matrix <= peak.whole <= (2 * layers + 2.5) * matrix
    # zero_grad() has released the memory of those of the step before.
    assert peak.step >= layers * matrix


# What the program keeps


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda g: g,
    "detached": Tensor.detach,
    "flat": lambda g: g.flatten(),
    "last": lambda g: g.flatten()[-1:],
    "bytes": lambda g: g.view(torch.uint8),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("kept", list(KEPT))
@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_a_gradient_that_is_kept_over_zero_grad_keeps_its_values(
    kept: str, bucket_bytes: int
) -> None:
    twins = Twins(grids(21)[0], bucket_bytes=bucket_bytes)
    history: list[tuple[Tensor, Tensor]] = []
    for seed in range(4):
        twins.backward(seed)
        twins.check()
        for p in (twins.parallel.conv.weight, twins.parallel.head.bias):
            gradient = KEPT[kept](p.grad)
            history.append((gradient, gradient.clone()))
        for old, value in history:
            assert torch.equal(old, value)
        twins.zero_grad()


@pytest.mark.parallel(RANKS)
def test_a_gradient_that_is_kept_follows_what_is_accumulated_in_place() -> None:
    twins = Twins(grids(22)[0])
    twins.backward(0)
    kept = [p.grad for p in twins.parallel.parameters()]
    views = [p.grad.flatten() for p in twins.parallel.parameters() if p.grad is not None]
    other = twins.parallel.head.weight.grad
    for model in (twins.serial, twins.parallel):
        model.head.weight.grad = None
    with dc.no_sync(twins.parallel):
        twins.backward(1)
    twins.backward(2)
    twins.check()
    after = [p.grad for p in twins.parallel.parameters()]
    assert [a is b for a, b in zip(after, kept, strict=True)] == [
        b is not other or b is None for b in kept
    ]
    assert all(torch.equal(v, k.flatten()) for v, k in zip(views, filter(some, kept), strict=True))


def some(x: Tensor | None) -> bool:
    return x is not None


@pytest.mark.parallel(SEVERAL)
def test_parameters_without_a_part_in_a_pass_keep_their_gradient_to_the_bit() -> None:
    def make(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Branching().double()

    for set_to_none in (True, False):
        twins = Twins(grids(24)[0], make)
        for seed, choice in enumerate([0, 1, 1, 0]):
            idle = twins.parallel.branches[1 - choice].weight
            before = None if idle.grad is None else idle.grad.clone()
            twins.serial.choice = twins.parallel.choice = choice
            twins.backward(seed)
            twins.check()
            assert idle.grad is None if before is None else torch.equal(idle.grad, before)
            if seed == 2:
                for model in (twins.serial, twins.parallel):
                    model.branches[0].zero_grad(set_to_none)


@pytest.mark.parallel(SEVERAL)
def test_a_gradient_that_the_program_gives_an_idle_parameter_stays() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(Branching().double(), grid)
    idle = model.branches[1].weight
    # Of one element in memory, and another one on each rank.
    idle.grad = torch.full((), float(MPI.COMM_WORLD.rank)).double().expand_as(idle)
    model.choice = 0
    x, y = batch(0)
    loss_of(model, dc.distribute_tensor(x, grid), y).backward()
    assert idle.grad.eq(MPI.COMM_WORLD.rank).all()
    assert model.branches[0].weight.grad is not None


@pytest.mark.parallel(RANKS)
def test_parts_and_sums_side_by_side_become_sums() -> None:
    def make(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Branching().double()

    for bucket_bytes in (1, 2**30):
        twins = Twins(grids(25)[0], make, bucket_bytes=bucket_bytes)
        for seed, (choice, synchronized) in enumerate(
            [(0, True), (1, False), (0, True), (1, True), (0, False), (0, False), (1, True)]
        ):
            twins.serial.choice = twins.parallel.choice = choice
            if synchronized:
                twins.backward(seed)
                twins.check()
            else:
                with dc.no_sync(twins.parallel):
                    twins.backward(seed)


# What the program does with gradients


@pytest.mark.parallel(RANKS)
def test_a_gradient_of_the_program_stays_the_same_tensor() -> None:
    twins = Twins(grids(26)[0])
    own: list[list[Tensor]] = []
    twins.backward(0)
    for model in (twins.serial, twins.parallel):
        model.conv.weight.grad = model.conv.weight.grad * 2
        model.head.bias.grad = torch.full_like(model.head.bias, 3)
        own.append([model.conv.weight.grad, model.head.bias.grad])
    for seed in range(1, 3):
        twins.backward(seed)
        twins.check()
        for model, (weight, bias) in zip((twins.serial, twins.parallel), own, strict=True):
            assert model.conv.weight.grad is weight and model.head.bias.grad is bias
    twins.zero_grad()
    twins.backward(3)
    twins.check()
    for ours, theirs in zip(own[1], own[0], strict=True):
        assert deviation(ours, theirs) <= 1e-10


# Gradients of other types and strides


def gaps(seed: int = 0) -> nn.Module:
    """Make a net with a weight that is every second column of another tensor."""
    model = net(seed)
    wide = torch.randn(2, 8, dtype=torch.float64)
    model.head.weight = nn.Parameter(wide[:, ::2])
    return model


def channels_last(seed: int = 0) -> nn.Module:
    return net(seed).to(memory_format=torch.channels_last)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("make", [gaps, channels_last])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_have_the_strides_of_the_serial_ones(
    make: Callable[[int], nn.Module], set_to_none: bool
) -> None:
    twins = Twins(grids(29)[0], lambda seed=0: make(seed))
    for seed in range(3):
        twins.backward(seed)
        twins.check()
        assert [strides(p) for p in twins.parallel.parameters()] == [
            strides(p) for p in twins.serial.parameters()
        ]
        twins.zero_grad(set_to_none)


def strides(p: nn.Parameter) -> tuple[int, ...] | None:
    """Return the strides of the gradient in dimensions of several elements."""
    if p.grad is None:
        return None
    return tuple(s for s, n in zip(p.grad.stride(), p.shape, strict=True) if n > 1)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("passes", ["keep", "zero", "none"])
def test_types_and_memory_formats_change_between_passes(passes: str) -> None:
    twins = Twins(grids(30)[0], bucket_bytes=500)
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.float().double(),
    ]
    twins.backward(0)
    for seed, change in enumerate(changes, 1):
        for model in (twins.serial, twins.parallel):
            change(model)
        if passes != "keep":
            twins.zero_grad(passes == "none")
        kind = next(twins.serial.parameters()).dtype
        (x, y), (d, e) = batch(seed), twins.inputs(seed)
        loss_of(twins.serial, x.to(kind), y).backward()
        loss_of(twins.parallel, d.to(kind), e).backward()
        # What was rounded to single precision stays so.
        twins.check(1e-5)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("then", ["keep", "zero", "none"])
def test_what_a_failed_pass_has_added_up_counts_once(then: str) -> None:
    class Broken(nn.Module):
        """A module that fails in its backward pass, after the gradient of its last weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(3, 1, 1)) for _ in range(3)])
            self.broken = False

        def forward(self, x: Tensor) -> Tensor:
            for weight in list(self.weights)[:2]:
                x = x * weight
            shard = x.shard if isinstance(x, dc.DistTensor) else x
            if self.broken:
                shard.register_hook(fail)
            return (x * self.weights[2]).sum((2, 3))

    def fail(_: Tensor) -> None:
        raise ArithmeticError("broken on purpose")

    twins = Twins(grids(31)[0], lambda seed=0: Broken().double(), bucket_bytes=1)
    twins.backward(0)
    for model, of in ((twins.serial, batch), (twins.parallel, twins.inputs)):
        model.broken = True
        with pytest.raises(ArithmeticError, match="broken on purpose"):
            F.cross_entropy(model(of(1)[0])[:, :2], of(1)[1]).backward()
        model.broken = False
    if then != "keep":
        twins.zero_grad(then == "none")
    twins.backward(2)
    twins.check()
