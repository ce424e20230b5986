"""The usual parts of training loops work on parallelized modules as they do serially."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import distconv as dc
from tests.support.serial import deviation, noted, same_gradients

RANKS = [1, 2, 4]


class Net(nn.Module):
    """A smooth network: convolutions, a normalisation, a matrix, and no maxima that could tie."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.ConvTranspose2d(4, 3, 2, 2),
            nn.GroupNorm(1, 3),
            nn.GELU(),
        )
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def grid() -> dc.ProcessGrid:
    return dc.ProcessGrid(height=-1)


def twins(make: Callable[[], nn.Module] = Net, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """Return the same module twice, serial and parallelized."""
    torch.manual_seed(0)
    serial = make().to(dtype)
    return serial, dc.parallelize(copy.deepcopy(serial), grid())


def batch(i: int = 0, dtype: Any = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(4, 2, 9, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(2, (4,), generator=generator)


def distributed(*tensors: Tensor) -> list[dc.DistTensor]:
    return [dc.distribute_tensor(t, grid()) for t in tensors]


def agree(serial: nn.Module, model: nn.Module, tolerance: float = 1e-9) -> None:
    state = model.state_dict()
    for name, wanted in serial.state_dict().items():
        assert deviation(state[name], wanted) <= tolerance, name


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "Muon")
}


@pytest.mark.parallel([1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_the_serial_steps(name: str) -> None:
    serial, model = twins()
    arguments = {"lr": 1e-2, "foreach": True} if name != "LBFGS" else {"lr": 0.1, "max_iter": 3}
    for m, cut in ((serial, lambda *t: t), (model, distributed)):
        optimizer = OPTIMIZERS[name](m.parameters(), **arguments)

        def closure(m: Any = m, optimizer: Any = optimizer, cut: Any = cut) -> Tensor:
            x, y = cut(*batch())
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    agree(serial, model)


@pytest.mark.parallel(RANKS)
def test_clipping_schedules_and_averages_are_the_serial_ones() -> None:
    results = []
    for m, cut in zip(twins(), (lambda *t: t, distributed), strict=True):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=5)
        average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        norms = []
        for i in range(4):
            for j in range(2):  # accumulated
                x, y = cut(*batch(2 * i + j))
                (F.cross_entropy(m(x), y) / 2).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            torch.nn.utils.clip_grad_value_(m.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(m)
        with torch.no_grad():
            update_bn([cut(*batch(9))], average)
        results.append((m, average, torch.stack(norms)))
    for serial, model in zip(*(r[:2] for r in results), strict=True):
        agree(serial, model)
    assert deviation(results[1][2], results[0][2]) <= 1e-9


@pytest.mark.parallel(RANKS)
def test_hooks_of_modules_see_and_replace_distributed_tensors() -> None:
    serial, model = twins()
    seen: list[list[Tensor]] = [[], []]
    for m, (x, _), kept in zip(
        (serial, model), (batch(), distributed(*batch())), seen, strict=True
    ):
        pool = m.features[3]
        pool.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        pool.register_forward_hook(lambda _m, _i, y, kept=kept: kept.append(y.detach()) or y.sin())
        m.features[0].register_forward_hook(
            lambda _m, _i, y, kept=kept: y.register_hook(lambda g: kept.append(g.clone())) and None
        )
        m(x).square().sum().backward()
    agree(serial, model)
    for expected, actual in zip(*seen, strict=True):
        assert isinstance(actual, dc.DistTensor)
        assert deviation(actual.full_tensor(), expected) <= 1e-9
    same_gradients(model, serial, 1e-9)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast_and_scaled_gradients_agree_within_the_rounding_of_half_types(kind: Any) -> None:
    exact, _ = twins()
    x, y = batch()
    F.cross_entropy(exact(x), y).backward()
    errors: list[list[float]] = []
    for m, cut in zip(twins(dtype=torch.float32), (lambda *t: t, distributed), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        x, y = cut(*batch(dtype=torch.float32))
        with torch.autocast("cpu", kind):
            out = m(x)
            loss = F.cross_entropy(out, y)
        assert (out.dtype, loss.dtype) == (kind, torch.float32)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        errors.append(
            [
                deviation(p.grad.double(), q.grad)
                for p, q in zip(m.parameters(), exact.parameters(), strict=True)
            ]
        )
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**10
    eps = torch.finfo(kind).eps
    for (name, _), serial, actual in zip(exact.named_parameters(), *errors, strict=True):
        with noted(name, serial, actual):
            assert actual <= 3 * serial + 16 * eps


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("asked", [None, "1"])
def test_parameters_keep_the_strides_that_programs_view_as_vectors(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked:
        monkeypatch.setenv("DISTCONV_CHANNELS_LAST", asked)
    serial, model = twins(dtype=torch.float32)
    for name, x in model.state_dict().items():  # safetensors writes contiguous tensors only
        assert x.is_contiguous() and x.stride() == serial.state_dict()[name].stride(), name
    x, labels = batch(dtype=torch.float32)
    for module, given in ((serial, [x, labels]), (model, distributed(x, labels))):
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

        def closure(
            module: nn.Module = module, given: Any = given, optimizer: Any = optimizer
        ) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(given[0]), given[1])
            loss.backward()
            return loss

        optimizer.step(closure)
        prune.global_unstructured(
            [(module.features[0], "weight")], prune.L1Unstructured, amount=0.25
        )
    agree(serial, model, 1e-4)
    mine, wanted = (
        [parameters_to_vector(m.parameters()), torch.cat([p.grad.view(-1) for p in m.parameters()])]
        for m in (model, serial)
    )
    for vector, expected in zip(mine, wanted, strict=True):
        assert deviation(vector, expected) <= 1e-4
