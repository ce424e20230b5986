"""Autocast gives results and gradients the types that serial torch gives them, on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import distconv as dc
from distconv.planning.dry_run import DryRunGrid
from distconv.tensor.autocast import under_autocast
from tests.ops.test_coverage import SAMPLED
from tests.support.samples import Operand, samples_of
from tests.support.serial import noted

HALF = torch.bfloat16
SINGLE = torch.float32


def _value(operand: Operand, dtype: torch.dtype) -> Tensor:
    x = operand.values(random.Random(0), operand.shape)
    return x.to(dtype) if x.is_floating_point() else x


def _types(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return [*map(_types, result)]
    return result.dtype if isinstance(result, Tensor) else None


def _outcome(call: Callable[..., Any], *tensors: Tensor) -> Any:
    with torch.autocast("cpu", HALF):
        return call(*tensors)


def _cut(x: Tensor, sizes: int | None, grid: dc.ProcessGrid) -> Tensor:
    d = next((d for d, n in enumerate(x.shape) if n == sizes), None)
    return dc.distribute_tensor(
        x, grid, dc.Layout.of(tuple(("height",) * (i == d) for i in range(x.dim())))
    )


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("key", SAMPLED)
@pytest.mark.filterwarnings("ignore")
def test_results_have_the_types_of_serial_autocast(key: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    name = SAMPLED[key][0]
    for sample in samples_of(name):
        operands = [sample.operands(plain=plain) for plain in (False, True)]
        for dtype in (HALF, SINGLE, torch.float64):
            cut, plain = ([_value(o, dtype) for o in of] for of in operands)
            try:
                expected = _outcome(partial(sample.call, name), *cut, *plain)
            except RuntimeError:  # what serial torch has no kernel for
                continue
            for size in (None, *cut[0].shape):
                with noted(name, dtype, size):
                    blocks = [_cut(x, size, grid) for x in cut]
                    try:
                        got = _outcome(partial(sample.call, name), *blocks, *plain)
                    except dc.UnsupportedOperation:
                        continue
                    assert _types(got) == _types(expected)


ON_GPUS: dict[str, tuple[Callable[..., Any], list[torch.dtype], list[torch.dtype]]] = {
    "products are of half types": (torch.mv, [SINGLE, SINGLE], [HALF, HALF]),
    "operands of norms are single": (torch.cdist, [HALF, HALF], [SINGLE, SINGLE]),
    "sums add up single numbers": (torch.sum, [HALF], [SINGLE]),
    "the widest type wins": (torch.dot, [HALF, SINGLE], [SINGLE, SINGLE]),
    "others stay": (torch.mul, [HALF, SINGLE], [HALF, SINGLE]),
}


@pytest.mark.parametrize("case", ON_GPUS)
def test_operands_on_a_gpu_are_converted_by_its_own_lists(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, given, expected = ON_GPUS[case]
    grid = DryRunGrid({"height": 2}, 0)
    shapes = {torch.mv: ((4, 4), (4,)), torch.dot: ((4,), (4,))}.get(function, ((4, 4), (4, 4)))
    tensors = [grid.tensor(s, None, t) for s, t in zip(shapes, given, strict=False)]
    seen: list[torch.dtype] = []
    monkeypatch.setitem(grid.__dict__, "device", torch.device("cuda"))
    torch.set_autocast_enabled("cuda", True)
    try:
        torch.set_autocast_dtype("cuda", HALF)
        rule = under_autocast(lambda *t: seen.extend(x.dtype for x in t), function, tensors)
        rule(*tensors)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == expected
