"""What programs use first, on any grid of GPUs, equals serial torch on the same device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from examples.mesh_tangling.network import mesh_tangling_1k
from examples.unet3d.network import UNet3d
from tests.gpu.steps import RANKS
from tests.support.serial import deviation
from tests.support.verdicts import one_verdict, raise_together

pytestmark = pytest.mark.gpu

GRIDS: dict[str, dict[str, int]] = {
    "height": {"height": -1},
    "plane": {"height": 2, "width": 2},
    "samples": {"sample": 2, "height": 2},
    "channels": {"channel": 2, "filter": 2},
}
CLOSE = 1e-9
"""The largest deviation in float64 after some steps, relative to the largest entry."""


@pytest.fixture(params=GRIDS)
def grid(request: pytest.FixtureRequest) -> dc.ProcessGrid:
    """Make each grid that there are ranks for, with the default transport."""
    if request.param != "height" and MPI.COMM_WORLD.size != 4:
        pytest.skip("needs 4 ranks")
    return dc.ProcessGrid(**GRIDS[request.param])


@pytest.fixture
def line() -> dc.ProcessGrid:
    return dc.ProcessGrid(height=-1)


class Net(nn.Module):
    """Convolutions, norms and pooling in `n` dimensions; the tail may be computed twice."""

    def __init__(self, n: int = 2, checkpointed: bool = False):
        super().__init__()
        conv: Any = {2: nn.Conv2d, 3: nn.Conv3d}[n]
        norm: Any = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[n]
        pool: Any = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[n]
        self.head = nn.Sequential(conv(4, 8, 3, padding=1), norm(8), nn.ReLU(), pool(2))
        ending = nn.GroupNorm(2, 8), nn.SiLU(), conv(8, 4, 3, stride=2, padding=1)
        self.tail = nn.Sequential(conv(8, 8, 5, padding=2), *ending)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Any:
        x = self.head(x)
        return checkpoint(self.tail, x, use_reentrant=False) if self.checkpointed else self.tail(x)


def data(n: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return an input and a target of `Net`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, *[m] * n, generator=generator, dtype=dtype) for m in (16, 4)]


def losses(
    model: nn.Module,
    batch: Sequence[Tensor],
    steps: int = 3,
    half: torch.dtype | None = None,
    through: Callable[[Any], Any] = lambda module: module,
) -> list[float]:
    """Train with momentum, under autocast to `half` and with scaled gradients for float16."""
    device = batch[0].device.type
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    scaler = torch.amp.GradScaler(device, init_scale=64.0, enabled=half is torch.float16)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, half, enabled=half is not None):
            loss = F.mse_loss(called(x).to(y.dtype), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    called = through(model)
    return [step(*batch).item() for _ in range(steps)]


def trains(
    grid: dc.ProcessGrid,
    n: int = 2,
    tolerance: float = CLOSE,
    half: torch.dtype | None = None,
    checkpointed: bool = False,
    steps: int = 3,
    through: Callable[[Any], Any] = lambda module: module,
    **options: Any,
) -> nn.Module:
    """Train with `parallelize(..., **options)` as serially; return the parallelized network.

    `through` makes of it the module that is called.
    """
    torch.manual_seed(0)
    batch = data(n, torch.float32 if half else torch.float64)
    serial = Net(n, checkpointed).to(grid.device, batch[0].dtype)
    model = dc.parallelize(copy.deepcopy(serial), grid, **options)
    expected = losses(serial, [t.to(grid.device) for t in batch], steps, half)
    cut = [dc.distribute_tensor(t, grid) for t in batch]
    actual = losses(model, cut, steps, half, through)
    state = dc.full_state_dict(model)
    wrong = [
        f"{name} deviates by {far:.1e}"
        for name, value in serial.state_dict().items()
        if (far := deviation(state[name].to(grid.device), value)) > tolerance
    ]
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if not abs(mine - theirs) <= tolerance * abs(theirs):
            wrong.append(f"loss {mine} of step {i}, and {theirs} serially")
    raise_together(wrong)
    return model


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("n", [2, 3])
def test_steps_are_those_of_serial_torch(grid: dc.ProcessGrid, n: int) -> None:
    trains(grid, n)


@pytest.mark.parallel(RANKS)
def test_sharded_parameters_train_alike(grid: dc.ProcessGrid) -> None:
    trains(grid, shard_parameters=True)


@pytest.mark.parallel(RANKS)
def test_networks_are_verified(grid: dc.ProcessGrid) -> None:
    generator = torch.Generator().manual_seed(0)
    for network, shape in (
        (UNet3d(classes=3, width=1 / 16), (1, 1, 32, 32, 32)),
        (mesh_tangling_1k(1 / 16, 64), (2, 18, 64, 64)),
    ):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        result = dc.verify(network.double(), x, grid, show=False)
        raise_together([] if result.ok else [result.verdict])


@pytest.mark.parallel(RANKS)
def test_checkpointed_layers_are_computed_again(line: dc.ProcessGrid) -> None:
    trains(line, checkpointed=True)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_halves_train_to_their_rounding(line: dc.ProcessGrid, half: torch.dtype) -> None:
    trains(line, tolerance=0.2, half=half)


@pytest.mark.parallel(RANKS)
def test_gradients_travel_as_halves(line: dc.ProcessGrid) -> None:
    trains(line, tolerance=0.05, wire="bfloat16")


@pytest.mark.parallel(RANKS)
def test_compiled_modules_are_replayed(line: dc.ProcessGrid) -> None:
    made: list[Any] = []

    def through(module: Any) -> Any:
        made.append(dc.compile(module))
        return made[0]

    trains(line, steps=6, through=through)
    assert made[0].replays == 4


@pytest.mark.parallel(RANKS)
def test_checkpoints_are_read_as_written(line: dc.ProcessGrid, folder: Path) -> None:
    model = trains(line)
    dc.save_checkpoint(folder, model)
    torch.manual_seed(5)
    other = dc.parallelize(Net().double(), line)
    dc.load_checkpoint(folder, other)
    with one_verdict():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_adam_and_clipped_gradients_are_serial(line: dc.ProcessGrid, how: str) -> None:
    torch.manual_seed(0)
    serial = Net().to(line.device, torch.float64)
    model = dc.parallelize(copy.deepcopy(serial), line)
    batch = [t.to(line.device) for t in data()]
    for network, (x, y) in (
        (serial, batch),
        (model, [dc.distribute_tensor(t, line) for t in batch]),
    ):
        options: Any = {how: True}
        optimizer = torch.optim.Adam(network.parameters(), 1e-3, **options)
        F.mse_loss(network(x), y).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
    with one_verdict():
        for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
            assert deviation(mine, theirs) <= CLOSE


@pytest.mark.parallel(RANKS)
def test_training_is_that_on_the_cpu(line: dc.ProcessGrid) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 18, 64, 64, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    serial = mesh_tangling_1k(1 / 16, 64).double()
    model = dc.parallelize(copy.deepcopy(serial), line)
    y = torch.rand(serial(x).shape, generator=generator, dtype=torch.float64)
    wrong = []
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.01, 0.9)) for m in (serial, model)]
    batches = (x, y), tuple(dc.distribute_tensor(t, line) for t in (x, y))
    for i in range(4):  # each step makes the difference about ten times as large
        made = []
        for (network, optimizer), (inputs, targets) in zip(pairs, batches, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(network(inputs), targets)
            loss.backward()
            optimizer.step()
            made.append(loss.item())
        if not abs(made[1] - made[0]) <= 1e-8 * made[0]:
            wrong.append(f"step {i}: loss {made[1]}, and {made[0]} on the CPU")
    raise_together(wrong)
