"""On CPUs samples are distributed with channels last, which what follows keeps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from distconv.ops.norm import statistics
from tests.support.serial import deviation, same_gradients

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)

RANKS = [1, 2, 4]
GRIDS: list[dict[str, int]] = [{"sample": -1}, {"height": -1}, {"width": -1}]
LAST = {"memory_format": torch.channels_last}
CLOSE = 2e-5


class Branches(nn.Module):
    """What keeps the memory format, and what meets another: the sample itself, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 8, 5, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)
        self.places = nn.Parameter(torch.randn(1, 8, 24, 16))
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).relu() + self.places
        z = self.up(F.max_pool2d(self.down(y), 3, 1, 1))
        return x + self.last(torch.cat([y, z], 1)).sigmoid()


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small samples have channels last as well."""
    monkeypatch.setattr("distconv.tensor.memory_format.FEWEST_ELEMENTS", 0)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let norms divide small samples into runs, as they do large ones."""
    for module, name, few in [
        (statistics, "_PIECE", 64),
        (statistics, "_ROW", 8),
        (statistics, "_COLUMNS", 48),
        (statistics, "_COLUMN", 4),
        (statistics, "_FEWEST", 0),
        (statistics, "_FEW", 0),
    ]:
        monkeypatch.setattr(module, name, few)
    statistics._divided.cache_clear()
    yield
    statistics._divided.cache_clear()


def is_last(x: Any) -> bool:
    return bool(x.shard.is_contiguous(**LAST)) and not x.shard.is_contiguous()


def contiguous(x: dc.DistTensor) -> dc.DistTensor:
    """Return the same sample with channels first, as a program's own blocks may come."""
    return dc.DistTensor.from_local(x.to_local().contiguous(), x.grid, x.grid_layout)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("extents", GRIDS, ids=str)
@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.usefixtures("any_size")
def test_networks_train_as_serial_ones(extents: dict[str, int], loss: Any, last: bool) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(**extents, device="cpu")
    serial = Branches()
    model = dc.parallelize(copy.deepcopy(serial), grid)
    x, y = torch.randn(4, 4, 24, 16), torch.rand(4, 4, 24, 16)
    d, e = dc.distribute_tensor(x, grid), dc.distribute_tensor(y, grid)
    if not last:
        d, e = contiguous(d), contiguous(e)
    seen: list[bool] = []
    for part in (model.first, model.norm, model.down, model.up):
        part.register_forward_hook(lambda _m, _i, made: seen.append(is_last(made)))
    made = model(d)
    assert seen == [last] * 4 and is_last(d) == last
    loss(made, e).backward()
    expected = serial(x)
    loss(expected, y).backward()
    whole = made.full_tensor()
    assert whole.is_contiguous()
    assert deviation(whole, expected) <= CLOSE
    for p, wanted in zip(model.parameters(), serial.parameters(), strict=True):
        assert p.grad is not None and wanted.grad is not None and p.grad.stride() == p.stride()
        assert deviation(p.grad, wanted.grad) <= 10 * CLOSE


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("extents", [{"height": -1}, {"sample": -1}], ids=str)
@pytest.mark.parametrize("method", ["assembled", "overlapped"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.usefixtures("any_size")
def test_activations_and_their_gradients_keep_one_format_behind_any_stem(
    extents: dict[str, int], method: str, channels: int
) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(**extents, device="cpu")
    serial = nn.Sequential(
        *(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1, bias=False)),
        *(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, padding=1)),
    )
    model = dc.parallelize(copy.deepcopy(serial), grid)
    x = torch.randn(4, channels, 16, 8)
    seen: list[bool] = []

    def look(_m: Any, _i: Any, made: Any) -> None:
        seen.append(is_last(made))
        made.register_hook(lambda gradient: seen.append(is_last(gradient)))

    for part in model:
        part.register_forward_hook(look)
    with dc.method(method):
        made = model(2 * dc.distribute_tensor(x, grid))
        made.square().sum().backward()
    assert seen == [True] * 14
    expected = serial(2 * x)
    expected.square().sum().backward()
    assert deviation(made.full_tensor(), expected) <= CLOSE
    same_gradients(model, serial, 10 * CLOSE)


@pytest.mark.parallel([1, 2])
@pytest.mark.usefixtures("any_size")
def test_functions_of_ones_own_get_contiguous_blocks() -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    given: list[bool] = []

    @dc.elementwise
    def twice(x: Tensor) -> Tensor:
        given.append(x.is_contiguous())
        return 2 * x

    @dc.windowed(kernel=2, stride=2)
    def corners(x: Tensor) -> Tensor:
        given.append(x.is_contiguous())
        return x.mul_(3)[..., ::2, ::2]

    x = torch.randn(1, 3, 8, 8)
    made = F.conv2d(dc.distribute_tensor(x, grid), torch.randn(4, 3, 3, 3), padding=1)
    assert is_last(made)
    before = made.full_tensor()
    assert deviation(twice(made).full_tensor(), 2 * before) == 0
    result: Any = corners(made)
    assert deviation(result.full_tensor(), 3 * before[..., ::2, ::2]) == 0
    assert torch.equal(made.full_tensor(), before)
    assert given == [True, True]
    first = dc.distribute_tensor(before, grid)
    result = corners(first)
    assert torch.equal(first.full_tensor(), before)
    assert made.flatten(2).full_tensor().is_contiguous()


@pytest.mark.parallel([1, 2])
@pytest.mark.usefixtures("any_size")
def test_a_change_of_format_is_written_to_where_it_is_alone() -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    x = dc.distribute_tensor(torch.randn(1, 3, 8, 8), grid)
    made = F.conv2d(x, torch.randn(4, 3, 3, 3), padding=1)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        other = made.to(memory_format=memory_format)
        with pytest.raises(dc.UnsupportedOperation, match="written in place"):
            other.add_(1)
        alone = made.clone().to(memory_format=memory_format)
        alone.add_(1)
        assert deviation(alone.full_tensor(), made.full_tensor() + 1) == 0


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_gradients_of_overlapped_pooling_keep_channels_last(pool: Any) -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    x = dc.distribute_tensor(torch.randn(1, 3, 16, 8), grid).contiguous(**LAST).requires_grad_()
    with dc.method("overlapped"):
        made = pool(x, 3, 2, 1)
    (made * made).sum().backward()
    assert is_last(made) and is_last(x.grad)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("channels", [3, 33])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.usefixtures("short_runs")
def test_norms_add_up_runs(norm: str, last: bool, channels: int, samples: int) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1, device="cpu")
    x = (torch.randn(samples, channels, 24, 8, dtype=torch.float64) + 5).requires_grad_()
    weight, bias = torch.randn(2, channels, dtype=torch.float64)
    by = torch.randn(x.shape, dtype=torch.float64)

    def normalized(x: Tensor) -> Tensor:
        if norm == "batch":
            return F.batch_norm(x, None, None, weight, bias, training=True)
        return F.group_norm(x, 3, weight, bias)

    expected = normalized(x)
    (of_x,) = torch.autograd.grad((expected * by).sum(), x)
    d = dc.distribute_tensor(x.detach(), grid)
    d = (d.contiguous(**LAST) if last else d).requires_grad_()
    made = normalized(d)
    assert is_last(made) is last
    assert deviation(made.full_tensor(), expected) <= 1e-10
    (got,) = torch.autograd.grad((made * dc.distribute_tensor(by, grid)).sum(), d)
    assert deviation(got.full_tensor(), of_x) <= 1e-10 and is_last(got) is last


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("shape", [(1, 32, 48, 32), (3, 40, 6, 5), (2, 64, 6, 5, 4)], ids=str)
def test_batch_norm_of_many_channels_has_the_statistics_of_float64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1, device="cpu")
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = 3 * torch.randn(shape) + 10
    block = dc.distribute_tensor(x, grid).to_local().contiguous(memory_format=memory_format)
    d = dc.DistTensor.from_local(block, grid)
    mean, variance = torch.zeros(2, shape[1])
    F.batch_norm(d, mean, variance, training=True, momentum=1.0)
    over = (0, *range(2, len(shape)))
    assert deviation(mean, x.double().mean(over)) <= CLOSE
    assert deviation(variance, x.double().var(over)) <= CLOSE


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("chosen", ["1", "0"])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.usefixtures("any_size")
def test_a_variable_decides_for_planes_and_volumes(
    dims: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCONV_CHANNELS_LAST", chosen)
    torch.manual_seed(0)
    last_format = [torch.channels_last, torch.channels_last_3d][dims - 2]
    convolution: Any = [nn.Conv2d, nn.Conv3d][dims - 2]
    transposed: Any = [nn.ConvTranspose2d, nn.ConvTranspose3d][dims - 2]
    serial = nn.Sequential(convolution(3, 6, 3, padding=1), nn.ReLU(), transposed(6, 2, 2, 2))
    grid = dc.ProcessGrid(height=-1, device="cpu")
    model = dc.parallelize(copy.deepcopy(serial), grid)
    x = torch.randn(2, 3, *(8, 6, 4)[:dims])
    d = dc.distribute_tensor(x, grid)
    last = chosen == "1"
    made, expected = model(d), serial(x)
    for t in (d.shard, made.shard):
        assert t.is_contiguous(memory_format=last_format) is last and t.is_contiguous() is not last
    assert all(p.is_contiguous() for p in model.parameters())
    made.square().sum().backward()
    expected.square().sum().backward()
    assert deviation(made.full_tensor(), expected) <= CLOSE
    same_gradients(model, serial, 10 * CLOSE)
