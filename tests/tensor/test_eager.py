"""Tools that take programs apart leave distconv's functions whole, or say what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module, nop
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

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


W = torch.ones(3, 2, 3, 3, dtype=torch.float64)


def loss_of(w: torch.Tensor, d: dc.DistTensor) -> torch.Tensor:
    """Return a loss as a plain tensor of a plain weight and distributed samples."""
    return nn.functional.conv2d(d, w).square().sum().full_tensor()


def traced(mode: str = "real", before: bool = False) -> Callable[[nn.Module, Any], Any]:
    """Return what traces the gradients of a weight that meets distributed samples."""

    def trace(m: nn.Module, d: dc.DistTensor) -> Any:
        def gradient(w: torch.Tensor) -> Any:
            w = w.detach().requires_grad_()
            return torch.autograd.grad(nn.functional.conv2d(d, w).square().sum(), w)

        options = {"tracing_mode": mode, "pre_dispatch": before, "_allow_non_fake_inputs": True}
        return make_fx(gradient, **options)(W)

    return trace


def faked(m: nn.Module, d: dc.DistTensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return m(d)


def dual(m: nn.Module, d: dc.DistTensor) -> Any:
    with forward_ad.dual_level():
        return m(forward_ad.make_dual(d, d))


def whole(d: dc.DistTensor) -> torch.Tensor:
    """Return plain samples of which every rank has all."""
    return torch.ones(d.shape, dtype=d.dtype)


F, G = "torch.func's transforms", "make_fx, or a tool"
EXPORT = "torch.export, or a tool"
TRACE = "torch.jit.trace, or a tool"
TOOLS: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "export": (lambda m, d: torch.export.export(m, (d,)), EXPORT),
    "export plain": (lambda m, d: torch.export.export(m, (whole(d),)), "or a tool that uses it"),
    "trace": (lambda m, d: torch.jit.trace(m, (d,)), TRACE),
    "trace plain": (lambda m, d: torch.jit.trace(m, (whole(d),)), TRACE),
    "script": (lambda m, d: torch.jit.script(m), "jit.script: the module is parallelized"),
    "script a part": (lambda m, d: torch.jit.script(m[0]), "the module is parallelized"),
    "script within": (lambda m, d: torch.jit.script(nn.Sequential(m)), "is parallelized"),
    "scripted": (lambda m, d: torch.jit.script(network())(d), "as it was before torch.jit.script"),
    "make_fx": (traced(), G),
    "make_fx of samples": (lambda m, d: make_fx(m)(d), "storage_offset: there is no rule"),
    "make_fx before dispatch": (traced(before=True), G),
    "make_fx symbolic": (traced("symbolic"), "or a tool that uses it"),
    "make_fx distributes": (lambda m, d: make_fx(lambda x: dc.distribute_tensor(x, d.grid))(W), G),
    "make_fx from_local": (
        lambda m, d: make_fx(lambda x: dc.DistTensor.from_local(x, d.grid))(d.to_local()),
        G,
    ),
    "make_fx redistributes": (
        lambda m, d: make_fx(lambda w: d.redistribute(dc.Layout()).to_local() * w)(W[0, 0, 0, 0]),
        G,
    ),
    "aot_function": (lambda m, d: aot_function(lambda w: loss_of(w, d), nop)(W), "AOTAutograd"),
    "aot_module": (lambda m, d: aot_module(m, nop)(d), "or a tool that uses it"),
    "fake": (faked, EXPORT),
    "grad": (lambda m, d: torch.func.grad(lambda x: m(x).sum())(d), F),
    "grad of weights": (lambda m, d: torch.func.grad(loss_of)(W, d), F),
    "functional_call": (
        lambda m, d: torch.func.grad(lambda p: torch.func.functional_call(m, p, (d,)).sum())(
            dict(m.named_parameters())
        ),
        F,
    ),
    "jacrev": (lambda m, d: torch.func.jacrev(loss_of)(W, d), F),
    "vmap": (lambda m, d: torch.func.vmap(lambda x: x * 2)(d), F),
    "vmap plain": (lambda m, d: torch.func.vmap(lambda s: d.relu().sum() * s)(W[0, 0, 0]), F),
    "functionalize": (lambda m, d: torch.func.functionalize(loss_of)(W, d), F),
    "jvp": (lambda m, d: torch.func.jvp(m, (d,), (d,)), F),
    "dual": (dual, "forward-mode derivatives are not"),
    "storage": (lambda m, d: d.untyped_storage(), "this rank's block"),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_other_tools_are_refused_in_a_sentence(tool: str) -> None:
    use, sentence = TOOLS[tool]
    x, d = case()
    model = dc.parallelize(network(), d.grid)
    with pytest.raises(dc.UnsupportedOperation, match=sentence):
        use(model, d)
    # And all goes on as if nothing had been tried.
    serial = network()
    serial(x).square().mean().backward()
    loss = model(d).square().mean()
    loss.backward()
    assert loss.full_tensor() > 0
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parallel([1, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tools_take_a_parallelized_module_with_plain_tensors_and_without_gradients() -> None:
    x, d = case()
    model = dc.parallelize(network(), d.grid).eval()
    with torch.no_grad():
        expected = model(x)
        for run in (torch.export.export(model, (x,)).module(), torch.jit.trace(model, (x,))):
            torch.testing.assert_close(run(x), expected, rtol=1e-12, atol=0)


@pytest.mark.parallel([1, 2])
def test_modes_that_only_look_on_are_left_alone() -> None:
    x, d = case()
    with FlopCounterMode(display=False) as counted:
        loss = dc.parallelize(network(), d.grid)(d).sum()
    assert counted.get_total_flops() > 0
    torch.testing.assert_close(loss.full_tensor(), network()(x).sum().detach())
