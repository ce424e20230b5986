"""A roll moves each element once, also backward, where nothing is added."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import distconv as dc
from tests.support.serial import agrees, random_tensor


class _Kernels(TorchDispatchMode):
    """Counts the calls of torch's dispatcher by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shift", [1, -2, 5])
def test_gradients_are_rolled_back_without_sums(shift: int) -> None:
    grid, rng = dc.ProcessGrid(height=-1), random.Random(1)
    given, layout = random_tensor(rng, (1, 2, 7, 5)), dc.Layout(height="height")
    agrees(lambda x: x.roll((shift, 1), (2, 3)), [given], [], grid, rng, [layout])
    x = dc.distribute_tensor(given, grid).requires_grad_()
    y = x.roll((shift, 1), (2, 3))
    seed = torch.ones_like(y)
    with _Kernels() as kernels:
        y.backward(seed)
    assert not {"zero_", "add_", "index_add_"} & set(kernels.counts), kernels.counts


@pytest.mark.parallel([2, 3])
def test_second_derivatives_of_rolls_are_serial_ones() -> None:
    grid, rng = dc.ProcessGrid(height=-1), random.Random(2)

    def penalty(x: Tensor) -> Tensor:
        y = (x.roll(1, 2).sin() * x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return gradient.square().sum()

    x = random_tensor(rng, (1, 2, 7, 5))
    agrees(penalty, [x], [], grid, rng, [dc.Layout(height="height")])
