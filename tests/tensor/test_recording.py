"""Calls that could lose or misplace gradients are recorded right, or refused on every rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc


def case() -> tuple[torch.Tensor, dc.ProcessGrid]:
    torch.manual_seed(1)
    return torch.randn(2, 2, 7, 5, dtype=torch.float64), dc.ProcessGrid(height=-1)


@pytest.mark.parallel([1, 2])
def test_a_copy_has_to_be_parallelized_before_it_is_trained() -> None:
    x, grid = case()
    model = dc.parallelize(nn.Conv2d(2, 3, 3, dtype=torch.float64), grid)
    twin = copy.deepcopy(model)
    y = dc.distribute_tensor(x, grid)
    with pytest.raises(RuntimeError, match="copy of a parallelized module"):
        twin(y)
    with torch.no_grad():
        assert torch.equal(twin(y).full_tensor(), model(y).full_tensor())
    dc.parallelize(twin, grid)
    twin(y).mean().backward()
    model(y).mean().backward()
    assert torch.equal(twin.weight.grad, model.weight.grad)


@pytest.mark.parallel([2])
def test_parts_are_not_forgotten_when_their_parameter_is_frozen() -> None:
    x, grid = case()
    model = dc.parallelize(nn.Conv2d(2, 3, 3, dtype=torch.float64), grid)
    y = dc.distribute_tensor(x, grid)
    with dc.no_sync(model):
        model(y).mean().backward()
    model.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen while gradients computed within no_sync"):
        model(y)


@pytest.mark.parallel([2])
def test_within_a_module_replicated_values_stay_distributed() -> None:
    x, grid = case()

    class Head(nn.Module):
        def __init__(self, leaks: bool):
            super().__init__()
            self.fc = nn.Linear(70, 1, dtype=torch.float64)
            self.leaks = leaks

        def forward(self, x: Any) -> torch.Tensor:
            if self.leaks:
                return self.fc.weight.sum() + 0 * x.shard.sum()
            return self.fc(x.full_tensor().flatten(1))

    y = dc.distribute_tensor(x, grid)
    with pytest.raises(dc.UnsupportedOperation, match="must remain a DistTensor"):
        dc.parallelize(Head(False), grid)(y)
    with pytest.raises(TypeError, match="returned a plain tensor that requires gradients"):
        dc.parallelize(Head(True), grid)(y)


@pytest.mark.parallel([2])
def test_what_to_do_instead_is_said_of_functions_that_need_more_than_the_whole_tensor() -> None:
    x, grid = case()
    y = dc.distribute_tensor(x, grid).requires_grad_()
    with pytest.raises(dc.UnsupportedOperation, match="Save x.full_tensor()"):
        pickle.dumps(y)
    with pytest.raises(TypeError, match="pass torch.as_tensor"):
        dc.distribute_tensor([1.0], grid)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch.strided is not a Layout; .* or x.grid_layout"):
        y.redistribute(y.layout)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a Layout"):
        y.redistribute("height")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is not a torch.nn.Module"):
        dc.parallelize(print, grid)  # type: ignore[type-var]
