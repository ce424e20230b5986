"""Tools that take programs apart leave distconv's functions whole, or say what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 1, 3)
    return nn.Sequential(*layers).double()


def case() -> tuple[torch.Tensor, dc.DistTensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 2, 7, 5, dtype=torch.float64)
    return x, dc.distribute_tensor(x, dc.ProcessGrid(height=-1))


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_compiled_network_runs_eagerly_and_right(compiled_first: bool) -> None:
    torch.compiler.reset()
    x, d = case()
    serial = network()
    model = copy.deepcopy(serial)
    if compiled_first:
        model.compile(backend="eager")
        dc.parallelize(model, d.grid)
        run: Callable[..., Any] = model
    else:
        run = torch.compile(dc.parallelize(model, d.grid), backend="eager")
    for _ in range(2):
        loss = serial(x).pow(2).mean()
        loss.backward()
        result = run(d).pow(2).mean()
        result.backward()
        torch.testing.assert_close(result.full_tensor(), loss.detach(), rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parallel([1, 2])
def test_a_compiled_function_of_distributed_and_plain_tensors_is_right() -> None:
    torch.compiler.reset()
    x, d = case()

    @torch.compile(backend="eager")
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scale = (w * 2).exp() + 1
        return (x * scale).relu().amax((2, 3)).sum(0)

    w = torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(f(d, w).full_tensor(), f(x, w), rtol=1e-12, atol=0)


TOOLS: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "export": (lambda m, d: torch.export.export(m, (d,)), "torch.export looks beneath"),
    "trace": (lambda m, d: torch.jit.trace(m, (d,)), "torch.jit.trace, or a tool"),
    "script": (lambda m, d: torch.jit.script(m)(d), "as it was before torch.jit.script"),
    "grad": (lambda m, d: torch.func.grad(lambda x: m(x).sum())(d), "torch.func's transforms"),
    "vmap": (lambda m, d: torch.func.vmap(lambda x: x * 2)(d), "torch.func's transforms"),
    "jvp": (lambda m, d: torch.func.jvp(m, (d,), (d,)), "forward-mode derivatives are not"),
    "storage": (lambda m, d: d.untyped_storage(), "this rank's part"),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_other_tools_are_refused_in_a_sentence(tool: str) -> None:
    use, sentence = TOOLS[tool]
    with pytest.raises(dc.UnsupportedOperation, match=sentence):
        use(network(), case()[1])
