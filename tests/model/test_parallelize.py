"""A parallelized model trains with the gradients of the serial one."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrizations, prune

import distconv as dc
from distconv.model import gradient_reduction
from tests.support.serial import (
    deviation,
    raised_everywhere,
    random_grid,
    random_layout,
    random_tensor,
    same_gradients,
    same_state,
)

RANKS = [1, 2, 4]
WORLD = MPI.COMM_WORLD


class Net(nn.Module):
    """Convolutions, a norm with buffers, a shared and an unused parameter, and a head."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a norm has no gradient but rounding errors.
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.again.weight = self.conv.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.again(F.relu(self.conv(x)))
        return self.head(x.mean((2, 3)))


class Branching(nn.Module):
    """A network that runs one of two convolutions, by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(3, 2, 3, padding=1) for _ in range(2)])
        self.choice = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[self.choice](x).mean((2, 3))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(seed: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    rng = random.Random(seed)
    return random_tensor(rng, (samples, 3, 9, 7)), torch.tensor([0, 1, 1, 0])[:samples]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Twins:
    """A serial model and its parallelized copy, which see the same batches."""

    def __init__(self, grid: dc.ProcessGrid, make: Callable[..., nn.Module] = net, **options: Any):
        self.grid = grid
        self.serial = make()
        self.parallel = dc.parallelize(make(WORLD.rank), grid, **options)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor]:
        x, y = batch(seed)
        cut = dc.Layout(sample="sample")
        return dc.distribute_tensor(x, self.grid), dc.distribute_tensor(y, self.grid, cut)

    def backward(self, seed: int, **options: bool) -> None:
        loss_of(self.serial, *batch(seed)).backward(**options)
        loss_of(self.parallel, *self.inputs(seed)).backward(**options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for model in (self.serial, self.parallel):
            model.zero_grad(set_to_none)

    def check(self, tolerance: float = 1e-10) -> None:
        """Assert that parameters, buffers and gradients are the serial ones on every rank."""
        same_state(self.parallel, self.serial, tolerance)
        same_gradients(self.parallel, self.serial, tolerance)


def grids(seed: int, n: int = 3) -> list[dc.ProcessGrid]:
    rng = random.Random(seed)
    return [random_grid(rng, ("sample", "height", "width")) for _ in range(n)]


# The gradients


@pytest.mark.parallel(RANKS)
def test_parameters_and_buffers_become_those_of_rank_0() -> None:
    model = net(WORLD.rank)
    for value in model.buffers():
        value += WORLD.rank
    assert dc.parallelize(model, grids(0)[0]) is model
    for name, value in net(0).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 2**30])
def test_gradients_are_the_serial_ones_when_backward_returns(bucket_bytes: int) -> None:
    for grid in grids(1):
        twins = Twins(grid, bucket_bytes=bucket_bytes)
        for seed in range(2):
            twins.backward(seed)
            twins.check()
            twins.zero_grad()
        assert twins.parallel.unused.grad is None


@pytest.mark.parallel(RANKS)
def test_parameters_are_frozen_unfrozen_and_swapped_between_passes() -> None:
    for grid in grids(3):
        twins = Twins(grid, bucket_bytes=300)
        parts = ["stem", "conv", "head"]
        for seed, frozen in enumerate([["stem"], [], ["conv"], ["head"], parts, ["stem"]]):
            for model in (twins.serial, twins.parallel):
                for part in parts:
                    getattr(model, part).requires_grad_(part not in frozen)
            twins.backward(seed)
            twins.check()
            twins.zero_grad(set_to_none=seed % 2 == 0)


# Accumulation


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "passes", ["sss", "nns", "snns", "nssns", "szs", "s0ss", "nzs", "n0s", "sn0s", "nsz0s"]
)
def test_accumulated_gradients_are_serial_with_and_without_no_sync(passes: str) -> None:
    """Go through passes: s as usual, n under no_sync, z sets gradients to None, 0 to zero."""
    for grid in grids(6, 2):
        twins = Twins(grid, bucket_bytes=500)
        for seed, kind in enumerate(passes):
            if kind == "n":
                with dc.no_sync(twins.parallel):
                    twins.backward(seed)
            elif kind == "s":
                twins.backward(seed)
                twins.check()
            else:
                twins.zero_grad(kind == "z")


@pytest.mark.parallel(RANKS)
def test_asking_autograd_for_gradients_leaves_those_of_the_parameters_alone() -> None:
    twins = Twins(grids(10)[0])
    twins.backward(0)
    loss_of(twins.serial, *batch(1))
    loss = loss_of(twins.parallel, *twins.inputs(1)).to_local()
    torch.autograd.grad(loss, twins.parallel.head.weight)
    twins.check()
    twins.backward(2)
    twins.check()


# What is refused


@pytest.mark.parallel([2, 4])
def test_sums_of_gradients_cannot_be_differentiated() -> None:
    twins = Twins(grids(16)[0])
    loss = loss_of(twins.parallel, *twins.inputs(0))
    with pytest.warns(UserWarning, match="create_graph"):
        message = raised_everywhere(RuntimeError, lambda: loss.backward(create_graph=True))
    assert "cannot be differentiated" in message


@pytest.mark.parallel([1])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_on_one_rank_can_be_differentiated_as_in_serial_torch() -> None:
    twins = Twins(grids(16)[0])
    twins.backward(0, create_graph=True)
    pairs = zip(twins.serial.parameters(), twins.parallel.parameters(), strict=True)
    gradients = [(own.grad, serial.grad) for serial, own in pairs if serial.grad is not None]
    assert gradients
    for own, serial in gradients:
        assert own.requires_grad
        assert deviation(own.detach(), serial.detach()) <= 1e-10


# The module stays what it was


@pytest.mark.parallel([2, 3])
def test_a_parameter_that_outlives_its_module_gets_no_part_in_silence() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)
    scale = nn.Parameter(torch.ones(1))
    module = dc.parallelize(nn.ParameterList([scale]), grid)
    loss = (x * scale).sum()
    del module
    with pytest.raises(
        RuntimeError, match="the parallelized module of a parameter no longer exists"
    ):
        loss.backward()


@pytest.mark.parallel(RANKS)
def test_the_state_dict_is_that_of_the_plain_module() -> None:
    twins = Twins(grids(13)[0])
    twins.backward(0)
    state = twins.parallel.state_dict()
    plain = net(5)
    plain.load_state_dict(state)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[name])
    other = net(6)
    twins.parallel.load_state_dict(other.state_dict())
    twins.serial.load_state_dict(other.state_dict())
    twins.zero_grad()
    twins.backward(1)
    twins.check()


@pytest.mark.parallel(RANKS)
def test_a_copy_is_a_plain_module_of_its_own_and_made_in_silence() -> None:
    twins = Twins(grids(15)[0])
    twins.backward(0)
    if WORLD.rank == 0:
        alone = copy.deepcopy(twins.parallel)
        assert loss_of(alone, *batch(1)).item() == pytest.approx(
            loss_of(copy.deepcopy(twins.serial), *batch(1)).item()
        )
        assert all(
            p is not q for p, q in zip(alone.parameters(), twins.parallel.parameters(), strict=True)
        )
    twins.check()
    loss_of(copy.deepcopy(twins.parallel), *batch(2)).backward()
    twins.check()


# Errors, on every rank


class Frozen(nn.Conv2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.bias.requires_grad_(False)


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda: nn.Conv2d(3, 4, 5), "weight"),
        (lambda: nn.Conv2d(3, 4, 3, bias=False), "bias"),
        (lambda: nn.Conv2d(3, 4, 3).double(), "weight"),
        (lambda: Frozen(3, 4, 3), "bias"),
        (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), "weight"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), "weight"),
        (lambda: nn.LazyConv2d(4, 3), "weight"),
    ],
)
def test_modules_that_differ_between_ranks_are_refused(other: Callable, name: str) -> None:
    module = other() if WORLD.rank == 1 else nn.Conv2d(3, 4, 3)
    message = raised_everywhere(ValueError, dc.parallelize, module, dc.ProcessGrid(sample=-1))
    assert f"parallelize: {name} is " in message and " and " in message
    assert "on rank 1" in message
    assert "build the same module on every rank" in message


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("shard", [False, True])
def test_modules_without_shape_are_refused_until_they_have_been_called(shard: bool) -> None:
    grid = dc.ProcessGrid(channel=-1)
    module = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    message = raised_everywhere(
        ValueError, lambda: dc.parallelize(module, grid, shard_parameters=shard)
    )
    assert "without shape yet: 0.weight, 0.bias, 1.weight" in message
    assert "1.running_mean" in message and "small plain tensor" in message
    whole = torch.ones(2, 3, 8, 8)
    module(whole)
    dc.parallelize(module, grid, shard_parameters=shard)
    assert module(dc.distribute_tensor(whole, grid)).shape == (2, 4, 6, 6)


@pytest.mark.parallel([2])
def test_modules_in_another_order_are_refused() -> None:
    names = ["a", "b"] if WORLD.rank == 1 else ["b", "a"]
    module = nn.ModuleDict({name: nn.Conv2d(1, 1, 1) for name in names})
    message = raised_everywhere(ValueError, dc.parallelize, module, dc.ProcessGrid(sample=-1))
    assert "order" in message and "build the same module on every rank" in message


@pytest.mark.parallel(RANKS)
def test_a_module_is_parallelized_once() -> None:
    grid = dc.ProcessGrid(sample=-1)
    shared = nn.Conv2d(3, 4, 3)
    whole = nn.Sequential(shared, nn.ReLU())
    dc.parallelize(shared, grid)
    for module in (shared, whole):
        message = raised_everywhere(ValueError, dc.parallelize, module, grid)
        assert "already parallelized" in message and "unparallelize(module)" in message
    whole = dc.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3)), grid)
    tied = nn.Conv2d(3, 4, 3)
    tied.weight = whole[0].weight
    for module in (whole[0], tied):
        message = raised_everywhere(ValueError, dc.parallelize, module, grid)
        assert "already parallelized" in message


@pytest.mark.parallel([1, 2])
def test_plain_inputs_are_refused_where_gradients_would_be_counted_once_a_rank() -> None:
    twins = Twins(dc.ProcessGrid(sample=-1))
    x, y = batch(0)
    message = raised_everywhere(TypeError, twins.parallel, x)
    assert "distconv.distribute_tensor(x, grid)" in message and "no_grad" in message
    with torch.no_grad():
        assert deviation(twins.parallel.eval()(x), twins.serial.eval()(x)) <= 1e-12
    for model in (twins.parallel, twins.serial):
        model.train()
    dc.distribute_tensor(x, twins.grid, dc.Layout()).requires_grad_().to_local()
    twins.backward(1)
    twins.check()


@pytest.mark.parallel([1, 2])
def test_no_sync_is_for_parallelized_modules() -> None:
    with pytest.raises(ValueError, match="call parallelize"), dc.no_sync(nn.Linear(2, 2)):
        pass


@pytest.mark.parallel([2, 4])
def test_a_module_that_has_got_other_parameters_says_so() -> None:
    twins = Twins(dc.ProcessGrid(sample=-1))
    x = twins.inputs(0)[0]
    twins.parallel(x)
    head, twins.parallel.head = twins.parallel.head, nn.Linear(4, 2).double()
    assert "parallelize(distconv.unparallelize(model)" in raised_everywhere(
        RuntimeError, twins.parallel, x
    )
    twins.parallel.head = head
    twins.parallel(x)
    head.late = nn.Identity()
    twins.parallel(x)
    head.late.scale = nn.Parameter(torch.ones(()))
    assert "parallelize(distconv.unparallelize(model)" in raised_everywhere(
        RuntimeError, twins.parallel, x
    )


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "options", [{"bucket_bytes": 1}, {"shard_parameters": True}, {"wire": "float16"}]
)
def test_ranks_that_ask_for_different_things_are_told(options: dict[str, Any]) -> None:
    grid = dc.ProcessGrid(height=-1)
    own = options if grid.rank == 1 else {}

    def call() -> None:
        dc.parallelize(net(), grid, **own)

    message = raised_everywhere(ValueError, call)
    assert next(iter(options)) in message and "on rank 1" in message


@pytest.mark.parallel([2, 4])
def test_inputs_have_to_live_on_the_grid_of_the_module() -> None:
    twins = Twins(dc.ProcessGrid(sample=-1))
    x = dc.distribute_tensor(batch(0)[0], dc.ProcessGrid(height=-1))
    assert "use one grid for both" in raised_everywhere(ValueError, twins.parallel, x)


@pytest.mark.parallel([1, 2, 4])
def test_inputs_in_random_layouts_have_and_give_the_serial_gradients() -> None:
    rng = random.Random(15)
    for _ in range(4):
        grid = random_grid(rng)
        twins = Twins(grid)
        x, y = batch(0)
        loss_of(twins.serial, x.requires_grad_(), y).backward()
        d = dc.distribute_tensor(x.detach(), grid, random_layout(rng, grid, x.shape))
        loss_of(twins.parallel, d.requires_grad_(), y).backward()
        assert deviation(d.grad.full_tensor(), x.grad) <= 1e-10
        twins.check()


@pytest.mark.parallel([2, 3])
def test_gradients_are_accumulated_on_the_stream_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch's nodes stay on the stream on which they were made, and captured graphs on theirs.
    first, second = (torch.Stream(stream_id=n, device_index=0, device_type=1) for n in (3, 4))
    current = [first]
    number, gpu = gradient_reduction.number_of_stream, torch.device("cuda:0")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[0])
    monkeypatch.setattr(gradient_reduction, "number_of_stream", lambda device: number(gpu))
    serial, model = net(), dc.parallelize(net(), dc.ProcessGrid(height=-1))
    x = torch.ones(2, 3, 8, 8).double()

    def made_before() -> set[bool]:
        nodes = [get_gradient_edge(p).node.metadata for p in model.parameters()]
        known = {"known" in notes for notes in nodes}
        for notes in nodes:
            notes["known"] = True
        return known

    for _ in range(2):
        for stream, renewed in ((first, True), (first, False), (second, True)):
            current[0] = stream
            serial(x).square().sum().backward()
            loss = model(dc.distribute_tensor(x, dc.ProcessGrid(height=-1))).square().sum()
            assert made_before() == {not renewed}
            loss.backward()
            del loss
    same_gradients(model, serial)


# Another structure, or another grid


class LowRank(nn.Module):
    """A layer with a trained addition of low rank, while its own weights rest (LoRA)."""

    def __init__(self, layer: nn.Conv2d):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Conv2d(layer.in_channels, 1, 1, bias=False)
        self.up = nn.Conv2d(1, layer.out_channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def another_head(model: nn.Module) -> None:
    model.head = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def low_rank(model: nn.Module) -> None:
    model.stem = LowRank(model.stem).double()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "another head": another_head,
    "pruning": lambda m: prune.l1_unstructured(m.stem, "weight", 0.5),
    "parametrization": lambda m: parametrizations.weight_norm(m.stem),
    "low rank": low_rank,
    "other types and layout": lambda m: m.float().double().to(memory_format=torch.channels_last),
}


def changed(model: nn.Module, change: str) -> nn.Module:
    torch.manual_seed(5)
    CHANGES[change](model)
    return model


@pytest.mark.parallel([2])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shard", [False, True])
def test_a_module_is_parallelized_anew_after_a_change(change: str, shard: bool) -> None:
    layouts = {"[ca]*": dc.Layout(channel="height")} if shard else {}
    grid = dc.ProcessGrid(height=-1)
    twins = Twins(grid, layouts=layouts, shard_parameters=shard)
    kept = twins.parallel.norm.weight
    twins.backward(0)
    twins.check()
    loss_of(twins.serial, *batch(1))
    loss = loss_of(twins.parallel, *twins.inputs(1))  # whose graph is still there
    assert dc.unparallelize(twins.parallel) is twins.parallel
    twins.check()
    # Of an ordinary module in between every rank has the whole gradient.
    for model in (twins.serial, twins.parallel):
        loss_of(changed(model, change), *batch(1)).backward()
    twins.check()
    twins.zero_grad()
    if not change.startswith("other"):
        assert twins.parallel.norm.weight is kept
    twins.grid = dc.ProcessGrid(sample=-1)
    dc.parallelize(twins.parallel, twins.grid)
    del loss
    for seed in range(2):
        twins.backward(seed)
        twins.check()


@pytest.mark.parallel([2, 4])
def test_a_graph_of_an_earlier_time_does_not_stand_in_the_way() -> None:
    twins = Twins(dc.ProcessGrid(height=-1))
    loss = loss_of(twins.parallel, *twins.inputs(0))
    dc.parallelize(dc.unparallelize(twins.parallel), twins.grid)
    loss_of(twins.serial, *batch(0)).backward()
    loss.backward()
    twins.check()
    twins.backward(1)
    twins.check()


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("shard", [False, True])
def test_a_copy_is_parallelized_and_the_original_stays_as_it_is(shard: bool) -> None:
    layouts = {"[ca]*": dc.Layout(channel="height")} if shard else {}
    twins = Twins(dc.ProcessGrid(height=-1), layouts=layouts, shard_parameters=shard)
    twins.backward(0)
    twin = Twins(twins.grid)
    twin.serial = copy.deepcopy(twins.serial)
    twin.parallel = copy.deepcopy(twins.parallel)
    twin.grid = dc.ProcessGrid(sample=-1)
    dc.parallelize(twin.parallel, twin.grid)
    for seed in range(1, 3):
        twins.backward(seed)
        twin.backward(seed)
    twins.check()
    twin.check()


@pytest.mark.parallel([1, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_copy_made_ordinary_goes_to_other_tools() -> None:
    twins = Twins(dc.ProcessGrid(height=-1))
    plain = dc.unparallelize(copy.deepcopy(twins.parallel)).eval()
    x, _ = batch(0)
    expected = twins.serial.eval()(x)
    for run in (torch.jit.script(plain.norm), pickle.loads(pickle.dumps(plain.norm))):
        y = torch.ones(1, 4, 2, 2).double()
        assert deviation(run(y), plain.norm(y)) == 0
    assert deviation(torch.export.export(plain, (x,), strict=True).module()(x), expected) <= 1e-12
    twins.serial.train()
    twins.backward(0)
    twins.check()


@pytest.mark.parallel([2])
def test_a_part_or_parts_of_sums_stay_parallelized() -> None:
    twins = Twins(dc.ProcessGrid(height=-1))
    message = raised_everywhere(ValueError, dc.unparallelize, twins.parallel.head)
    assert "is a submodule of a parallelized module" in message
    with dc.no_sync(twins.parallel):
        twins.backward(0)
    message = raised_everywhere(RuntimeError, dc.unparallelize, twins.parallel)
    assert "within no_sync" in message
    twins.backward(1)
    twins.check()


@pytest.mark.parallel([2, 4])
def test_parts_that_outlive_their_whole_are_parallelized() -> None:
    twins = Twins(dc.ProcessGrid(height=-1))
    head, serial = twins.parallel.head, twins.serial.head
    del twins.parallel
    gc.collect()
    x = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4)
    dc.parallelize(head, twins.grid)
    head(dc.distribute_tensor(x, twins.grid)).square().sum().backward()
    serial(x).square().sum().backward()
    assert deviation(head.weight.grad, serial.weight.grad) <= 1e-12


@pytest.mark.parallel([2, 4])
@pytest.mark.filterwarnings("error:.*received a gradient on")
def test_empty_blocks_are_no_reason_to_warn_of_gradients_on_some_ranks() -> None:
    grid = dc.ProcessGrid(height=-1)
    torch.manual_seed(0)
    down = nn.Conv2d(3, 3, 3, stride=2, padding=1)
    norms = nn.BatchNorm2d(3), nn.PReLU(3), nn.GroupNorm(3, 3), nn.ConvTranspose2d(3, 3, 1)
    model = dc.parallelize(nn.Sequential(nn.Conv2d(2, 3, 1), down, *norms, nn.Linear(4, 2)), grid)
    for height in (1, 2, 3):
        x = dc.distribute_tensor(torch.rand(2, 2, height, 8), grid)
        y = model(x)
        (y.square().mean() + y[:, :, :1].sum()).backward()
        assert all(p.grad is not None for p in model.parameters())
