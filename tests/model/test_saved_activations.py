"""torch's tools for saved activations work with parallelized modules: fewer bytes, same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import distconv as dc
from tests.support.serial import same_gradients

WORLD = MPI.COMM_WORLD
aten: Any = torch.ops.aten
GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"height": 2}, {"sample": 2}],
    4: [{"sample": 2, "height": 2}],
}


def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keep the results of convolutions, and compute all others again."""
    keeps = operator is aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, dict[str, Any] | None] = {
    "all kept": None,
    "checkpoint": {},
    "policy": {"context_fn": partial(create_selective_checkpoint_contexts, policy)},
    "list": {
        "context_fn": partial(
            create_selective_checkpoint_contexts, [aten.convolution.default, aten.sigmoid.default]
        )
    },
}


class Net(nn.Module):
    """Three blocks, each kept or computed again by one of `WAYS`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.options = WAYS[way]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Sigmoid(), nn.Dropout(0.0)
            )
            for _ in range(3)
        )
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.options is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, **self.options)
        y: Tensor = self.head(x)
        return y


def net(way: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(way).double()


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 16, 8, dtype=torch.float64, generator=generator)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("shard", [None, "zero3"])
@pytest.mark.parametrize("around", [None, save_on_cpu])
def test_gradients_are_the_serial_ones(way: str, shard: str | None, around: Any) -> None:
    for axes in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**axes)
        model, serial = dc.parallelize(net(way), grid, shard=shard), net("all kept")
        with around() if around else saved_tensors_hooks(lambda x: x, lambda x: x):
            loss = model(dc.distribute_tensor(batch(), grid)).square().mean()
        loss.backward()
        serial(batch()).square().mean().backward()
        same_gradients(model, serial)


@contextmanager
def live_convolutions() -> Iterator[list[int]]:
    """Return a list with the number of convolutions that run in the context."""
    from torch.utils._python_dispatch import TorchDispatchMode

    count = [0]

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            count[0] += func is aten.convolution.default
            return func(*args, **(kwargs or {}))

    with Counting():
        yield count


@pytest.mark.parallel([1, 2])
def test_a_policy_decides_which_operators_run_again() -> None:
    grid = dc.ProcessGrid(height=-1)
    again = {}
    for way in WAYS:
        model = dc.parallelize(net(way), grid)
        loss = model(dc.distribute_tensor(batch(), grid)).square().mean()
        with live_convolutions() as count:
            loss.backward()
        again[way] = count[0]
    assert again["checkpoint"] >= 3 and again["all kept"] == again["policy"] == again["list"] == 0
