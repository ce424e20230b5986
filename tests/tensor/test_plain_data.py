"""Parameters and buffers take the elements of DistTensors, in each of torch's ways."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

import distconv as dc
from distconv.tensor import plain_copies
from tests.support.serial import deviation


def by_data(module: Any, value: Tensor) -> None:
    module.weight.data = value
    module.buffer.data = value.exp()


def by_copy(module: Any, value: Tensor) -> None:
    module.weight.data.copy_(value)
    with torch.no_grad():
        module.buffer[:] = value.exp()


def by_average(module: Any, value: Tensor) -> None:
    module.weight.data.mul_(0.9).add_(value, alpha=0.1)
    module.buffer.lerp_(value, 0.5)


def by_number(module: Any, value: Tensor) -> None:
    nn.init.constant_(module.weight, value.mean())
    module.buffer.fill_(value.sum())


def by_buffer(module: Any, value: Tensor) -> None:
    module.buffer = value
    module.register_buffer("other", value.sin())


def by_replacement(module: Any, value: Tensor) -> None:
    module.weight = nn.Parameter(value)


class Norm(nn.Module):
    """A layer that chooses its scale by the first batch, as those of normalizing flows do."""

    def __init__(self, assign: Callable[[Any, Tensor], None]):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 1, 1, dtype=torch.float64))
        self.register_buffer("buffer", torch.zeros(3, 1, 1, dtype=torch.float64))
        self.assign, self.fresh = assign, True

    def forward(self, x: Tensor) -> Tensor:
        if self.fresh:
            self.assign(self, x.detach().mean((0, 2, 3), keepdim=True)[0])
            self.fresh = False
        return x * self.weight.sin() + self.buffer


WAYS = (by_data, by_copy, by_average, by_number, by_buffer, by_replacement)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("axis", ["sample", "height", "channel"])
@pytest.mark.parametrize("assign", WAYS)
def test_a_layer_is_initialized_by_its_first_batch(assign: Any, axis: str) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    x = torch.randn(5, 3, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    serial, model = Norm(assign), Norm(assign)
    if assign is not by_replacement:
        dc.parallelize(model, grid)
    d = dc.distribute_tensor(x, grid)
    for _ in range(2):
        expected, actual = serial(x), model(d)
        assert deviation(actual.detach().full_tensor(), expected.detach()) < 1e-12
        expected.square().mean().backward()
        actual.square().mean().backward()
    for name in ("weight", "buffer"):
        got, wanted = getattr(model, name), getattr(serial, name)
        pairs = [(got.detach(), wanted.detach())]
        pairs += [(got.grad, wanted.grad)] if wanted.grad is not None else []
        for mine, yours in pairs:
            whole = mine.full_tensor() if isinstance(mine, dc.DistTensor) else mine
            assert deviation(whole, yours) < 1e-12


@pytest.mark.parallel([2, 3])
def test_data_of_another_type_are_an_error_that_leaves_the_parameter_whole() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(2, 3, 4, 4), grid)
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(dc.UnsupportedOperation, match="has reached an internal function of torch"):
        p.data.set_(x)
    with pytest.raises(dc.UnsupportedOperation, match="Convert a module before parallelize"):
        x.data = p
    assert p.sum().item() == 3.0
    p.data = x
    assert torch.equal(p, torch.ones(2, 3, 4, 4)) and type(p) is nn.Parameter


class _Scaled(nn.Module):
    """A network of which each operator needs its plain operand in the backward pass."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.PReLU(8), nn.GroupNorm(2, 8))
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.last, self.head = nn.Conv2d(8, 4, 1, bias=False), nn.Linear(4, 3)
        self.register_buffer("kernel", torch.randn(4, 4, 3, 3))
        self.leaf = torch.randn(4, 6, 1, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.conv2d(x * self.leaf, self.kernel, padding=1)
        y = self.last((self.layers(x) * self.scale).tanh())
        z: Tensor = self.head(y.movedim(1, -1))
        return z.square().sum()

    def operands(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers(), self.leaf]


def _exchanged(p: Tensor, other: Tensor) -> None:
    p.data, other.data = other.data, p.data


def _freed_and_restored(p: Tensor, other: Tensor) -> None:
    p.data = p.data.new_empty(0)
    p.data = other


CHANGES: list[Callable[[Tensor, Tensor], object]] = [
    lambda p, other: setattr(p, "data", other),
    _exchanged,
    _freed_and_restored,
    lambda p, other: p.data.copy_(other),
    lambda p, other: p.data.mul_(2),
    lambda p, other: (setattr(p, "data", other), p.data.mul_(2)),
]


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("parallelized", [True, False])
@pytest.mark.parametrize("axis", ["height", "channel"])
def test_data_set_before_the_backward_pass_are_those_that_serial_torch_uses(
    axis: str, parallelized: bool
) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64, generator=g)
    for change in CHANGES:
        torch.manual_seed(0)
        serial = _Scaled().double()
        model = deepcopy(serial)
        if parallelized:
            dc.parallelize(model, grid)
        for _ in range(2):
            given = x.clone().requires_grad_(), dc.distribute_tensor(x, grid).requires_grad_()
            for module, one in zip((serial, model), given, strict=True):
                loss = module(one)
                for p in module.operands():
                    change(p, p.detach().clone() + 0.5)
                loss.backward()
            expected, actual = (one.grad for one in given)
            assert deviation(actual.full_tensor(), expected) < 1e-12
            for mine, yours in zip(model.operands(), serial.operands(), strict=True):
                if yours.requires_grad:
                    assert deviation(mine.grad, yours.grad) < 1e-12


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("parallelized", [True, False])
@pytest.mark.parametrize("filters", [0, 3, 12])
def test_data_of_another_shape_make_the_backward_pass_raise_on_all_ranks(
    filters: int, parallelized: bool
) -> None:
    grid = dc.ProcessGrid(channel=-1)
    convolution = nn.Conv2d(4, 6, 3, padding=1)
    if parallelized:
        dc.parallelize(convolution, grid)
    x = dc.distribute_tensor(torch.ones(2, 4, 6, 5), grid).requires_grad_()
    loss = convolution(x).square().sum()
    convolution.weight.data = torch.ones(filters, 4, 3, 3)
    with pytest.raises(RuntimeError, match="(?i)float8"):
        loss.backward()


@pytest.mark.parallel([2])
def test_nothing_follows_once_its_graph_is_gone() -> None:
    grid = dc.ProcessGrid(channel=-1)
    before = len(plain_copies._COPIES)
    w = torch.ones(4, 1, 1, requires_grad=True)
    y = dc.distribute_tensor(torch.ones(2, 4, 6, 5), grid).requires_grad_() * w
    assert list(map(len, list(plain_copies._COPIES.values())[before:])) == [1]
    del y
    assert len(plain_copies._COPIES) == before
    swap_tensors(w, torch.zeros(2))  # which refuses tensors with weak references
