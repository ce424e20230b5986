"""Weights sharded over the samples: results are the serial ones, memory is 1/P_N."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.planning.recorded_step import record_step
from tests.support.serial import deviation, raised_everywhere, same_gradients, same_state

WORLD = MPI.COMM_WORLD
GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"sample": 2}],
    3: [{"sample": 3}],
    4: [{"sample": 4}, {"sample": 2, "height": 2}],
    6: [{"sample": 3, "height": 2}],
}
both = pytest.mark.parametrize("shard", ["zero2", "zero3"])


class Net(nn.Module):
    """Weights that are longest along their first or second dimension, and vectors."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, wide, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.down = nn.Conv2d(wide, wide + 1, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(wide + 1, 5, 2, stride=2)
        self.slope = nn.PReLU(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.slope(self.up(checkpoint(self.down, x, use_reentrant=False)))
        return self.head(x.mean((2, 3)))


def net(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def batch(seed: int, shape: tuple[int, ...] = (7, 3, 8, 6)) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(y: Tensor) -> Tensor:
    return (y - 0.3).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, 0.01),
]


@pytest.mark.parallel([1, 2, 3, 4, 6])
@pytest.mark.parametrize("make", OPTIMIZERS)
@both
def test_five_steps_are_the_serial_ones(shard: str, make: Callable) -> None:
    for axes in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**axes)
        model, serial = dc.parallelize(net(), grid, shard=shard), net()
        mine, its = make(model.parameters()), make(serial.parameters())
        for seed in range(5):
            step(model, mine, dc.distribute_tensor(batch(seed), grid))
            step(serial, its, batch(seed))
        same_gradients(model, serial)
        same_state(model, serial, 1e-9)


@pytest.mark.parallel([2, 4])
@both
def test_a_rank_keeps_its_share_of_weights_gradients_and_state(shard: str) -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(net(lambda: Net(63)), grid, shard=shard)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, dc.distribute_tensor(batch(0), grid))
    kept = [*model.parameters()] + [p.grad for p in model.parameters()]
    kept += [x for s in optimizer.state.values() for x in s.values() if torch.is_tensor(x)]
    held = sum((x.shard if isinstance(x, dc.DistTensor) else x).nbytes for x in kept)
    assert held < 1.05 * sum(x.nbytes for x in kept) / grid.size


def saved_bytes(shard: str | None) -> int:
    layers = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    recording = record_step(model, [(8, 32, 8, 8)], {"sample": 8}, shard=shard)
    return sum(recording.kept.values())


def test_zero3_keeps_no_whole_weight_for_the_backward_pass() -> None:
    whole = 4 * 32 * 32 * 9 * 4
    assert saved_bytes("zero2") - saved_bytes("zero3") == whole


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x)[0]
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.recurrent(x)[0]
        return y


class Shared(nn.Module):
    """A tied weight, a layer called twice, and a weight that another module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.read = nn.Conv2d(3, 4, 1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.b(self.a(self.a(x))), self.read.weight * 2, self.read.bias)


WORDS, PLANES = (4, 6, 8), (4, 3, 8, 6)
NETS: list[Any] = [
    pytest.param(Attention, WORDS, id="attention"),
    pytest.param(Recurrent, WORDS, id="LSTM"),
    pytest.param(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), WORDS, id="encoder"
    ),
    pytest.param(Shared, PLANES, id="shared"),
    pytest.param(lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3))), PLANES, id="weight_norm"),
    pytest.param(lambda: nn.Conv2d(3, 4, 3), (1, 3, 8, 8), id="empty blocks"),
    pytest.param(
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), PLANES, id="channels_last"
    ),
]


@pytest.mark.parallel([2])
@pytest.mark.parametrize(("make", "shape"), NETS)
@both
def test_networks_of_every_kind(shard: str, make: Callable[[], nn.Module], shape: Any) -> None:
    grid = dc.ProcessGrid(sample=-1)
    model, serial = dc.parallelize(net(make), grid, shard=shard), net(make)
    loss_of(model(dc.distribute_tensor(batch(0, shape), grid))).backward()
    loss_of(serial(batch(0, shape))).backward()
    same_gradients(model, serial)


@pytest.mark.parallel([4])
@both
def test_beside_weights_sharded_over_channels(shard: str) -> None:
    grid = dc.ProcessGrid(sample=2, channel=2)
    model = dc.parallelize(net(), grid, shard=shard, shard_parameters=True)
    serial = net()
    loss_of(model(dc.distribute_tensor(batch(0), grid))).backward()
    loss_of(serial(batch(0))).backward()
    same_gradients(model, serial)


@pytest.mark.parallel([2])
def test_other_saved_tensors_go_to_the_hooks_around() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model, serial = dc.parallelize(net(), grid, shard="zero3"), net()
    x = dc.distribute_tensor(batch(0), grid)
    seen: list[tuple[int, ...]] = []
    with saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        model(x)
    assert (4, 8, 8, 6) in seen or (3, 8, 8, 6) in seen
    assert tuple(model.up.weight.shape) not in seen
    with save_on_cpu():
        loss_of(model(x)).backward()
    loss_of(serial(batch(0))).backward()
    same_gradients(model, serial)


@pytest.mark.parallel([2])
def test_autocast_saves_no_converted_weight() -> None:
    grid = dc.ProcessGrid(sample=-1)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x, gradients = dc.distribute_tensor(batch(0).float(), grid), []
    for shard in (None, "zero3"):
        model = dc.parallelize(copy.deepcopy(plain), grid, shard=shard)
        seen: list[Any] = []
        with (
            saved_tensors_hooks(lambda t, seen=seen: seen.append(tuple(t.shape)) or t, lambda t: t),
            torch.autocast("cpu", torch.bfloat16),
        ):
            loss_of(model(x).float()).backward()
        assert ((4, 8, 3, 3) in seen) == (shard is None)
        gradients.append(
            [p.grad.full_tensor() if shard and p.dim() > 1 else p.grad for p in model.parameters()]
        )
    assert max(map(deviation, *gradients)) < 1e-6


@pytest.mark.parallel([2])
@both
def test_accumulated_copied_and_ordinary_again(shard: str) -> None:
    grid = dc.ProcessGrid(sample=-1)
    model, serial = dc.parallelize(net(), grid, shard=shard).eval(), net().eval()
    x = dc.distribute_tensor(batch(0), grid)
    with dc.no_sync(model):
        loss_of(model(x)).backward()
    loss_of(model(2 * x)).backward()
    loss_of(serial(batch(0))).backward()
    loss_of(serial(2 * batch(0))).backward()
    same_gradients(model, serial)
    with torch.no_grad():
        expected = serial(batch(0))
        assert deviation(copy.deepcopy(model)(x).full_tensor(), expected) < 1e-12
        assert deviation(model(x).full_tensor(), expected) < 1e-12
    dc.unparallelize(model)
    assert deviation(model(batch(0)), serial(batch(0))) < 1e-12


@pytest.mark.parallel([2])
def test_a_weight_written_before_the_backward_pass_raises() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(net(), grid, shard="zero3")
    loss = loss_of(model(dc.distribute_tensor(batch(0), grid)))
    with torch.no_grad():
        model.head.weight.mul_(2)
    message = raised_everywhere(RuntimeError, loss.backward)
    assert "has been written since the forward pass" in message


@pytest.mark.parallel([1, 2])
def test_other_choices_are_refused() -> None:
    grid = dc.ProcessGrid(sample=-1)
    message = raised_everywhere(ValueError, lambda: dc.parallelize(net(), grid, shard="zero1"))
    assert "shard='zero1'; expected one of zero2, zero3" in message


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_resumes_on_another_grid(folder: Path, sharded: bool) -> None:
    model = dc.parallelize(net(), dc.ProcessGrid(sample=-1), shard="zero3")
    serial = net()
    mine, its = (torch.optim.Adam(m.parameters(), 0.01) for m in (model, serial))
    step(model, mine, dc.distribute_tensor(batch(0), dc.ProcessGrid(sample=-1)))
    step(serial, its, batch(0))
    dc.save_checkpoint(folder, model, mine, step=1, sharded=sharded)
    for axes, shard in (({"height": -1}, None), ({"sample": 2, "height": -1}, "zero2")):
        grid = dc.ProcessGrid(**axes)
        other = dc.parallelize(net(), grid, shard=shard)
        optimizer = torch.optim.Adam(other.parameters(), 0.01)
        dc.load_checkpoint(folder, other, optimizer)
        twin = copy.deepcopy(serial)
        its_twin = torch.optim.Adam(twin.parameters(), 0.01)
        its_twin.load_state_dict(copy.deepcopy(its.state_dict()))
        step(other, optimizer, dc.distribute_tensor(batch(1), grid))
        step(twin, its_twin, batch(1))
        same_state(other, twin, 1e-9)


@pytest.mark.parallel([2])
def test_checkpoints_of_torch_hold_the_whole_tensors(folder: Path) -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(net(), grid, shard="zero3")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    step(model, optimizer, dc.distribute_tensor(batch(0), grid))
    assert grid.device_mesh.ndim == 1
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder / "torch")
    step(model, optimizer, dc.distribute_tensor(batch(1), grid))
    for axes, shard in (({"height": -1}, None), ({"sample": -1}, "zero2")):
        grid = dc.ProcessGrid(**axes)
        other = dc.parallelize(net(), grid, shard=shard)
        its = torch.optim.Adam(other.parameters(), 0.01)
        step(other, its, dc.distribute_tensor(batch(2), grid))
        read = {"model": other.state_dict(), "optimizer": its.state_dict()}
        dcp.load(read, checkpoint_id=folder / "torch")
        other.load_state_dict(read["model"])
        its.load_state_dict(read["optimizer"])
        step(other, its, dc.distribute_tensor(batch(1), grid))
        found, expected = dc.full_state_dict(other), dc.full_state_dict(model)
        assert max(deviation(found[name], expected[name]) for name in found) < 1e-9


@pytest.mark.parallel([2])
def test_checkpoints_of_torch_ask_for_a_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dc.parallelize(net(), dc.ProcessGrid(sample=-1), shard="zero2")
    weight: Any = model.up.weight
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    message = raised_everywhere(RuntimeError, lambda: weight.__create_write_items__("up", weight))
    assert "ask for grid.device_mesh before" in message


class _Complex(nn.Module):
    """Saves views of a complex weight: conjugated, and of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 6, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.view_as_real(self.w)
        squares = torch.einsum("nchw,cd->ndhw", x, parts[..., 0] * parts[..., 1])
        turned = torch.complex(x, x).sum((2, 3)).unsqueeze(-1) * self.w.conj()
        return squares.mean((2, 3)) + (turned.abs().sum(1) * (self.w.real * self.w.imag).sum(0))


@pytest.mark.parallel([2, 4])
@both
def test_views_of_complex_weights(shard: str) -> None:
    grid = dc.ProcessGrid(sample=2, height=-1)
    torch.manual_seed(0)
    serial = _Complex()
    model = dc.parallelize(copy.deepcopy(serial), grid, shard=shard)
    loss_of(serial(batch(0))).backward()
    loss_of(model(dc.distribute_tensor(batch(0), grid))).backward()
    same_gradients(model, serial)


class _Writing(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write()
        return super().forward(x)


class _Clamped(_Writing):
    def write(self) -> None:
        self.weight.clamp_(-0.1, 0.1)


class _Renormalized(_Writing):
    def write(self) -> None:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("kind", [_Clamped, _Renormalized])
@both
def test_a_module_that_writes_to_its_weight_raises(shard: str, kind: Callable) -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(net(lambda: kind(3, 4, 3)), grid, shard=shard)
    x = dc.distribute_tensor(batch(0), grid)
    message = raised_everywhere(RuntimeError, lambda: model(x))
    assert f"{kind.__name__} writes to a weight" in message
