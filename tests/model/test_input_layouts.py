"""Modules that take their inputs in a layout of their own compute and train as serially."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.comm.ledger import trace_movements
from distconv.layers import Redistribute
from tests.support.serial import deviation, random_tensor, same_gradients, same_state

WORLD = MPI.COMM_WORLD
CHANNELS = dc.Layout(channel="height")
ROWS = dc.Layout(height="height")


class Block(nn.Module):
    """A residual block, whose input has two consumers."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, 3, padding=1)
        self.norm = nn.BatchNorm2d(filters)
        self.skip = nn.Conv2d(channels, filters, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) + self.skip(x)


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(3, 5), Block(5, 7)
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


def made(make: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


def trained(model: nn.Module, x: Tensor, steps: int = 2) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
    return output.detach()


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "layouts",
    [
        {"second": CHANNELS},
        {"second.*": CHANNELS, "head": dc.Layout()},
        {"first": CHANNELS, "second": ROWS},
        {"*": CHANNELS, "second.skip": ROWS, "first.norm": dc.Layout(width="height")},
    ],
)
@pytest.mark.parametrize("shard", [False, True])
def test_a_model_with_layouts_of_its_layers_trains_as_serially(
    layouts: dict[str, dc.Layout], shard: bool
) -> None:
    x = random_tensor(random.Random(0), (2, 3, 9, 7))
    serial = made()
    expected = trained(serial, x)
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(made(), grid, layouts=layouts, shard_parameters=shard)
    assert deviation(trained(model, dc.distribute_tensor(x, grid)).full_tensor(), expected) <= 1e-10
    same_state(model, serial)


@pytest.mark.parallel([2, 3])
def test_several_consumers_share_one_redistribution() -> None:
    grid = dc.ProcessGrid(height=-1)
    layouts = {"second.conv": CHANNELS, "second.skip": CHANNELS}
    model = dc.parallelize(made(), grid, layouts=layouts)
    x = dc.distribute_tensor(random_tensor(random.Random(2), (2, 3, 9, 7)), grid)
    with trace_movements() as movements:
        model(x)
    moved = [m for m in movements if m.operator.startswith("layouts") and m.bytes]
    assert [m.operator for m in moved] == ["layouts, second.conv"]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_redistributed_goes_when_the_outermost_call_ends(fails: bool) -> None:
    grid = dc.ProcessGrid(height=-1)
    copies, alive_within = [], []

    class Reuse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.first.register_forward_hook(lambda m, args, out: copies.append(ref(args[0].shard)))

        def forward(self, x: Tensor, deeper: bool = True) -> Tensor:
            y = self(x, deeper=False) if deeper else self.first(x) + self.second(x)
            gc.collect()
            alive_within.append(copies[0]() is not None)
            if fails and deeper:
                raise ArithmeticError
            return y

    model = dc.parallelize(Reuse(), grid, layouts={"first": CHANNELS, "second": CHANNELS})
    x = dc.distribute_tensor(torch.ones(2, 3, 9, 7), grid)
    with torch.no_grad():
        if fails:
            with pytest.raises(ArithmeticError):
                model(x)
        else:
            model(x)
    gc.collect()
    assert alive_within == [True, True]
    assert [copy() for copy in copies] == [None]


@pytest.mark.parallel([1, 2, 3])
def test_a_shared_redistribution_follows_its_tensor() -> None:
    grid = dc.ProcessGrid(height=-1)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            with torch.no_grad():
                y = self.b(x)
            y = y + self.a(x).clone()
            x += 1
            return y + self.b(x)

    x = random_tensor(random.Random(3), (2, 3, 9, 7))
    serial = made(Twice)
    expected = serial(x)
    expected.sum().backward()
    model = dc.parallelize(made(Twice), grid, layouts={"?": CHANNELS})
    output = model(dc.distribute_tensor(x, grid))
    output.sum().backward()
    assert deviation(output.detach().full_tensor(), expected.detach()) <= 1e-10
    same_gradients(model, serial)


@pytest.mark.parallel([2, 3])
def test_a_module_writes_to_its_input_in_another_layout() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.ReLU(inplace=True), grid, layouts={"": CHANNELS})
    serial = torch.arange(96.0).view(2, 3, 4, 4) - 40
    x = dc.distribute_tensor(serial, grid)
    assert torch.equal(model(x).full_tensor(), serial.relu())
    assert torch.equal(x.full_tensor(), serial.relu())


@pytest.mark.parallel([1, 2])
def test_wrong_layouts_are_refused_by_name() -> None:
    grid = dc.ProcessGrid(height=-1)
    with pytest.raises(ValueError, match=r"no module's name matches 'third\.\*'"):
        dc.parallelize(made(), grid, layouts={"third.*": CHANNELS})
    with pytest.raises(TypeError, match=r"layouts\['first'\]='height' is not a Layout"):
        dc.parallelize(made(), grid, layouts={"first": "height"})
    with pytest.raises(TypeError, match="3 is not a pattern of module names"):
        dc.parallelize(made(), grid, layouts={3: CHANNELS})
    with pytest.raises(TypeError, match="is not a dictionary"):
        dc.parallelize(made(), grid, layouts=[CHANNELS])
    model = dc.parallelize(made(), grid, layouts={"head": ROWS})
    with pytest.raises(ValueError, match="a tensor of 2 dimensions has"):
        model(dc.distribute_tensor(torch.ones(2, 3, 4, 4, dtype=torch.float64), grid))


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    "take",
    [
        lambda grid, layout: dc.distribute_tensor(torch.ones(2, 3), grid, layout),
        lambda grid, layout: dc.DistTensor.from_local(torch.ones(2, 3), grid, layout),
        lambda grid, layout: dc.distribute_tensor(torch.ones(2, 3), grid).redistribute(layout),
        lambda grid, layout: dc.local_box((2, 3), grid, layout),
        lambda grid, layout: dc.parallelize(made(), grid, layouts={"": layout}),
        lambda grid, layout: Redistribute(layout),
        lambda grid, layout: dc.explain(nn.ReLU(), (2, 3), grid, layout=layout),
        lambda grid, layout: dc.verify(nn.ReLU(), torch.ones(2, 3), grid, layout=layout),
    ],
)
def test_whatever_takes_a_layout_refuses_what_is_none(take: Callable[..., object]) -> None:
    grid = dc.ProcessGrid(height=-1)
    with pytest.raises(TypeError, match=r"'chanel' is not a Layout; write Layout\("):
        take(grid, "chanel")
    with pytest.raises(ValueError, match="channel='chanel' is not a grid axis; choose from"):
        take(grid, dc.Layout(channel="chanel"))


@pytest.mark.parallel([1, 2, 4])
def test_an_axis_of_one_rank_cuts_nothing_so_that_scripts_run_on_any_grid() -> None:
    grid = dc.ProcessGrid(height=-1)
    named = dc.Layout(height="height", channel="channel", width=("filter", "depth"))
    effective = ROWS if grid.size > 1 else dc.Layout()
    x = random_tensor(random.Random(5), (2, 3, 9, 7))
    cut = dc.distribute_tensor(x, grid, named)
    several = (
        cut,
        dc.DistTensor.from_local(cut.to_local(), grid, named),
        dc.distribute_tensor(x, grid, dc.Layout()).redistribute(named),
        Redistribute(named)(dc.distribute_tensor(x, grid, CHANNELS)),
    )
    for each in several:
        assert each.grid_layout == effective and torch.equal(each.full_tensor(), x)
    serial = made()
    expected = trained(serial, x)
    layouts = {"first": named, "second": dc.Layout(channel=("channel", "height"))}
    model = dc.parallelize(made(), grid, layouts=layouts, shard_parameters=True)
    assert deviation(trained(model, cut).full_tensor(), expected) <= 1e-10
    same_state(model, serial)


@pytest.mark.parallel([1, 2, 4])
def test_a_tensor_is_redistributed_anew_in_every_call() -> None:
    grid = dc.ProcessGrid(height=-1)
    torch.manual_seed(0)
    serial = nn.Conv2d(2, 3, 3, padding=1).double()
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1).double())
    model[0].load_state_dict(serial.state_dict())
    model = dc.parallelize(model, grid, layouts={"0": dc.Layout(width="height")})
    values = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    buffer = dc.distribute_tensor(values, grid).to_local().numpy()
    x = dc.DistTensor.from_local(torch.from_numpy(buffer), grid)
    assert deviation(model(x).detach().full_tensor(), serial(values)) <= 1e-12
    # Nobody is told that a reader has put the next batch there.
    buffer *= 2
    assert deviation(model(x).detach().full_tensor(), serial(2 * values)) <= 1e-12
    x.requires_grad_()
    model(x).sum().backward()
    leaf = (2 * values).requires_grad_()
    serial(leaf).sum().backward()
    assert deviation(x.grad.full_tensor(), leaf.grad) <= 1e-12


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("last", ["first", "second"])
def test_a_module_with_two_names_takes_the_layout_of_the_last_pattern(last: str) -> None:
    grid = dc.ProcessGrid(channel=-1)
    shared = nn.Conv2d(4, 4, 1)
    model = nn.ModuleDict({"first": shared, "second": shared})
    other = {"first": "second", "second": "first"}[last]
    layouts = {other: dc.Layout(height="channel"), last: dc.Layout(channel="channel")}
    dc.parallelize(model, grid, layouts=layouts, shard_parameters=True)
    assert isinstance(shared.weight, dc.DistTensor) == (grid.size > 1)
    x = dc.distribute_tensor(torch.randn(2, 4, 8, 3), grid, dc.Layout())
    assert shared(x).grid_layout == (dc.Layout(channel="channel") if grid.size > 1 else dc.Layout())
