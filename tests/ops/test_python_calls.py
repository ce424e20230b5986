"""The Python functions of a warm call: between two kernels a GPU waits for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from distconv.transport.launch import switched_on

CALLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "conv2d": (lambda x: F.conv2d(x, torch.ones(8, 8, 3, 3), padding=1), 112),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), 104),
    "batch_norm": (lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True), 112),
    "relu": (F.relu, 28),
}
"""Functions on a tensor with a neighbour, with the most Python functions that each may call."""


@pytest.mark.skipif(switched_on("DISTCONV_DEBUG"), reason="DISTCONV_DEBUG=1 compares all calls")
@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_of_a_cut_tensor_calls_few_python_functions(name: str) -> None:
    call, most = CALLS[name]
    grid = dc.ProcessGrid(height=2)
    x = dc.distribute_tensor(torch.ones(1, 8, 64, 64), grid).requires_grad_()
    counted = 0

    def hear(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    before = sys.getprofile()
    with dc.method("assembled"):
        # Ranks compare the arguments of the first calls, and of some later ones.
        for _ in range(70):
            call(x)
        found = []
        for _ in range(5):
            counted = 0
            sys.setprofile(hear)
            try:
                call(x)
            finally:
                sys.setprofile(before)
            found.append(counted)
    assert min(found) <= most, found
