"""Norms as accelerators compute them, by stand-ins for torch's kernels, and their launches."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.comm.packing import CHANNELS_LAST
from distconv.ops.norm import synchronized
from distconv.planning.dry_run import DryRunGrid
from distconv.tensor.ownership import own
from tests.support.kernels import kernels_of
from tests.support.serial import agrees, deviation, random_tensor
from tests.support.strategies import Case, on_any_grid, sizes
from tests.support.synchronized_kernels import as_on_accelerators


@on_any_grid(9)
def test_batch_norm_by_kernels_of_accelerators_equals_serial(case: Case) -> None:
    n = case.one_of(2, 1, 3)
    x = 3 * case.tensor(case.plane(n, smallest=3), "normal", "ties") + case.one_of(0, 7)
    parameters = [case.tensor(x.shape[1:2]) for _ in range(case.draw(sizes(0, 2)))]
    first = [case.tensor(x.shape[1:2]), case.tensor(x.shape[1:2], "positive")]
    tracked, last = case.flag(), case.flag() and n > 1
    used: list[list[Tensor]] = []

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        running = [r.clone() for r in first] if tracked else [None, None]
        used.append(running if tracked else [])  # type: ignore[arg-type]
        named: dict[str, Any] = dict(zip(("weight", "bias"), parameters, strict=False))
        if last:
            x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        return F.batch_norm(x, *running, **named, training=True, momentum=0.3)

    with as_on_accelerators():
        case.agrees(norm, x, *parameters, cut=case.one_of(None, [0]))
    for expected, actual in zip(used[0], used[-1], strict=True):
        assert deviation(actual, expected) <= 1e-12


@on_any_grid(9)
def test_group_norm_by_kernels_of_accelerators_equals_serial(case: Case) -> None:
    groups = case.one_of(1, 2, 3)
    shape = case.plane(case.one_of(2, 1, 3), groups * case.draw(sizes(1, 2)), smallest=3)
    x = case.tensor(shape, "normal", "ties")
    parameters = [case.tensor(shape[1:2]) for _ in range(case.draw(sizes(0, 2)))]
    last = case.flag() and len(shape) > 3

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        if last:
            x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        return F.group_norm(x, groups, *parameters)

    with as_on_accelerators():
        case.agrees(norm, x, *parameters, cut=case.one_of(None, [0]))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_channels_in_runs_equal_serial(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of uneven ranks lie on both sides of the limit, and are of both memory formats.
    monkeypatch.setattr(synchronized, "_MANY", 40)
    monkeypatch.setattr(synchronized, "_RUN", 5)
    grid, rng = dc.ProcessGrid(height=-1), random.Random(0)
    for shape in ((2, 4, 9, 8), (1, 6, 3, 5, 8), (1, 2, 5, 10)):
        x = random_tensor(rng, shape) + 2
        parameters = [random_tensor(rng, shape[1:2]) for _ in range(2)]
        norms = [
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            lambda x, w, b: F.group_norm(x, 2, w, b),
            lambda x, w, b: F.group_norm(x, 2) * w.mean() + b.mean(),
        ]
        for norm in norms:

            def call(x: Tensor, *p: Tensor, norm: Any = norm) -> Tensor:
                form = CHANNELS_LAST[x.dim()] if last else torch.contiguous_format
                return norm(x.contiguous(memory_format=form), *p)

            with as_on_accelerators():
                agrees(call, [x], parameters, grid, rng, [dc.Layout(height="height")])


@pytest.mark.parallel([2, 4])
def test_one_group_of_channels_equals_serial_in_every_memory_format() -> None:
    # The block of a statistic is expanded to its channels, which kernels read as they lie.
    for shape in ((1, 4, 2), (1, 4, 8), (2, 4, 6, 6), (1, 4, 4, 4, 4)):
        x = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape) ** 2
        for last in (False, True)[: 1 + (len(shape) > 3)]:

            def norm(x: Tensor, last: bool = last) -> Tensor:
                if last:
                    x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
                return F.group_norm(x, 1)

            layout = [dc.Layout(width="height")]
            agrees(norm, [x], [], dc.ProcessGrid(height=-1), random.Random(0), layout)


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
        lambda x, w: F.group_norm(x, 2, w),
    ],
    ids=["batch norm", "group norm"],
)
def test_norms_within_a_checkpoint_equal_serial(norm: Any) -> None:
    # A checkpoint hands out each tensor that was saved once.
    grid, rng = dc.ProcessGrid(height=-1), random.Random(1)
    inputs, weight = [random_tensor(rng, (2, 4, 6, 5))], [random_tensor(rng, (4,))]

    def call(x: Tensor, w: Tensor) -> Any:
        return checkpoint(norm, x, w, use_reentrant=False)

    with as_on_accelerators():
        agrees(call, inputs, weight, grid, rng, [dc.Layout(height="height")])


def launches(layer: nn.Module, shape: tuple[int, ...], cut: bool) -> Counter[str]:
    """Return the kernels of a layer's both passes on a rank between two others, or on one rank."""
    grid = DryRunGrid({"height": 4 if cut else 1})
    own(layer.parameters(), ranks=1)
    block = torch.randn(*shape[:2], 8, 8)
    whole = *shape[:2], 8 * grid.size, 8
    x = dc.DistTensor(block, whole, ((), (), ("height",) if cut else (), ()), grid)
    x.requires_grad_()
    dy = dc.DistTensor(torch.randn_like(block), whole, x.cuts, grid)
    return kernels_of(lambda: layer(x).backward(dy))


def plain_launches(layer: nn.Module, shape: tuple[int, ...]) -> Counter[str]:
    x = torch.randn(*shape[:2], 8, 8, requires_grad=True)
    dy = torch.randn_like(x.detach())
    return kernels_of(lambda: layer(x).backward(dy))


@pytest.mark.parametrize(
    ("layer", "on_cpus", "on_accelerators"),
    [(nn.BatchNorm2d(8), 13, 5), (nn.GroupNorm(2, 8), 15, 9), (nn.GroupNorm(8, 8), 10, 7)],
    ids=["batch norm", "group norm", "instance norm"],
)
def test_a_cut_norm_launches_few_kernels(
    layer: nn.Module, on_cpus: int, on_accelerators: int
) -> None:
    shape = 1, 8
    plain = plain_launches(layer, shape).total()
    assert launches(layer, shape, True).total() <= plain + on_cpus
    with as_on_accelerators():
        assert launches(layer, shape, True).total() <= plain + on_accelerators


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8)], ids=lambda m: type(m).__name__
)
def test_one_rank_launches_what_plain_torch_does(layer: nn.Module) -> None:
    # Large enough for the decomposed norm of CPUs.
    x = torch.randn(1, 8, 256, 256)
    grid = DryRunGrid({})
    own(layer.parameters(), ranks=1)
    d = dc.DistTensor(x, x.shape, ((),) * 4, grid)
    with as_on_accelerators():
        made = kernels_of(lambda: layer(d))
    assert made == kernels_of(lambda: layer(x))
