"""The Python functions, and the files, of a warm call: between two kernels a GPU waits for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from distconv.transport.launch import switched_on

FOLDER = str(Path(dc.__file__).parent)

BOTH_PASSES = 255
"""The most functions of the library that a parallelized convolution calls, forward and backward."""


def _step(x: Tensor) -> None:
    weight = torch.ones(8, 8, 3, 3)
    y = F.conv2d(x, weight, padding=1)
    y = F.batch_norm(y, torch.zeros(8), torch.ones(8), training=True)
    y = F.max_pool2d(F.relu(y), 3, 2, 1)
    F.conv2d(y, weight, padding=1).sum().backward()


CALLS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    "conv2d": (lambda x: F.conv2d(x, torch.ones(8, 8, 3, 3), padding=1), 63, 13),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), 68, 13),
    "batch_norm": (lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True), 66, 12),
    "relu": (F.relu, 16, 6),
    "step": (_step, 576, 30),
}
"""Functions of a tensor with a neighbour, with the most Python functions that each may call, and
the most files of the library from which they may come."""


def _files_of_calls(run: Callable[[], object]) -> list[str]:
    """Return the file of each Python function that a warm call of `run` calls."""
    called: list[str] = []

    def hear(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_filename)

    # Ranks compare the arguments of the first calls, and of some later ones.
    for _ in range(70):
        run()
    found, before = [], sys.getprofile()
    for _ in range(5):
        called = []
        sys.setprofile(hear)
        try:
            run()
        finally:
            sys.setprofile(before)
        found.append(called)
    return min(found, key=len)


@pytest.mark.skipif(switched_on("DISTCONV_DEBUG"), reason="DISTCONV_DEBUG=1 compares all calls")
@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_of_a_cut_tensor_calls_few_python_functions(name: str) -> None:
    call, most, most_files = CALLS[name]
    grid = dc.ProcessGrid(height=2)
    x = dc.distribute_tensor(torch.ones(1, 8, 64, 64), grid).requires_grad_()
    with dc.method("assembled"):
        called = _files_of_calls(lambda: call(x))
    assert len(called) <= most
    assert len({file for file in called if file.startswith(FOLDER)}) <= most_files


@pytest.mark.skipif(switched_on("DISTCONV_DEBUG"), reason="DISTCONV_DEBUG=1 compares all calls")
@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["assembled", "overlapped"])
def test_both_passes_of_a_cut_convolution_call_few_functions_of_the_library(name: str) -> None:
    grid = dc.ProcessGrid(height=2)
    layer = dc.parallelize(nn.Conv2d(8, 8, 3, padding=1), grid)
    x = dc.distribute_tensor(torch.ones(1, 8, 64, 64), grid).requires_grad_()
    dy = dc.distribute_tensor(torch.ones(1, 8, 64, 64), grid)
    with dc.method(name):
        called = _files_of_calls(lambda: layer(x).backward(dy))
    assert len([file for file in called if file.startswith(FOLDER)]) <= BOTH_PASSES


# A training step on one rank, whose operators are those of plain torch.

ONE_RANK_STEP = 227
"""The most Python functions that a step of 18 layers calls beside the 215 of plain torch."""


def _layers() -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(6):
        parts += [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*parts)


def _calls_of_step(model: nn.Module, x: Tensor) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    return len(_files_of_calls(step))


@pytest.mark.parallel([1])
def test_a_step_on_one_rank_calls_few_python_functions_beside_those_of_torch() -> None:
    x, grid = torch.ones(2, 8, 16, 16), dc.ProcessGrid(height=-1)
    plain = _calls_of_step(_layers(), x)
    own = _calls_of_step(dc.parallelize(_layers(), grid), dc.distribute_tensor(x, grid)) - plain
    assert own <= ONE_RANK_STEP, own
