"""Replays call torch's Python functions where these make the traced call of the dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv as dc
from distconv.compiling.bindings import bound

aten = torch.ops.aten
X, ZERO = torch.ones(1, 2, 4), torch.zeros(())


@pytest.mark.parametrize(
    ("function", "arguments", "faster"),
    [
        (aten.mul.Tensor, (X, 0.5), torch.mul),
        (aten.add.Tensor, (X, ZERO), torch.add),
        (aten.pow.Tensor_Scalar, (X, 2), torch.pow),
        (aten.copy_.default, (X, X), Tensor.copy_),
        (aten.sum.dim_IntList, (X, [1], True), torch.sum),
        (aten.sum.default, (X,), torch.sum),
        (aten.convolution.default, (X, X, None, [1], [0], [1], False, [0], 1), torch.convolution),
        # A tensor without dimensions is not taken for the number that torch's function takes.
        (aten.fill_.Scalar, (X, 2), torch.fill_),
        (aten.fill_.Tensor, (X, ZERO), torch.fill_),
        (aten.slice.Tensor, (X, 2, 1, 3), aten.slice.Tensor),
        # torch's function computes something else with these.
        (aten._to_copy.default, (X,), aten._to_copy.default),
        (aten.split.Tensor, (X, 2, 2), aten.split.Tensor),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_is_called_by_the_faster_name(
    function: Any, arguments: Any, faster: Any
) -> None:
    before = X._version
    assert bound(function, arguments, {}) is faster
    assert X._version == before, "the trial has written to its argument"


@pytest.mark.parallel([2])
def test_a_replay_calls_no_dispatcher_where_torch_has_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = dc.ProcessGrid(height=2)
    model = dc.parallelize(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU()), grid)
    f = dc.compile(lambda x: model(x).square().mean())
    x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)
    for _ in range(3):
        f(x).backward()
    called: list[str] = []
    kind: Any = type(aten.mul.Tensor)
    run = kind.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self.overloadpacket.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", noted)
    f(x).backward()
    assert f.replays == 2
    assert "slice" in called
    assert not {"convolution", "empty", "relu", "copy_", "fill_", "permute"} & set(called), called
