"""Each private part of torch is there, and does what distconv relies on."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, distributions, nn
from torch.autograd import Function, forward_ad
from torch.profiler import profile
from torch.utils import checkpoint

from distconv import torch_private as private

ROOT = Path(__file__).parents[1]


class Double(Function):
    """An ordinary function of a program."""

    passes: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Double.passes.append(private.backward_pass())
        return 2 * gradients[0]


class Halved(Function):
    """A function that torch.compile can trace."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


class Heard(Tensor):
    """A subclass that notes the functions for which torch asks it."""

    asked: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        with private.without_torch_function():
            return func(*args, **(kwargs or {}))


class Strict(Tensor):
    """A subclass that torch does not ask, but below its functions."""

    __torch_function__ = private.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("below")


@pytest.fixture(autouse=True)
def _nothing_heard() -> None:
    Heard.asked.clear()
    Double.passes.clear()


def leaf(*shape: int) -> Tensor:
    """Return a leaf of ones that requires gradients."""
    return torch.ones(*shape, requires_grad=True)


def test_every_entry_has_a_test() -> None:
    entries = set()
    for node in ast.parse((ROOT / "distconv" / "torch_private.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            entries.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            entries |= {ast.unparse(x) for x in targets}
    tested = {
        node.attr
        for function in ast.parse(Path(__file__).read_text()).body
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_")
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "private"
    }
    public = {name for name in entries if not name.startswith("_")} - {"Called"}
    assert len(public) > 50
    assert sorted(public - tested) == []


# Patches

STATE = """
import sys, warnings, torch, torch.distributed.tensor, torch.utils.checkpoint

def state():
    return {
        (name, owner.__name__, attribute): value
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "torch" and module is not None
        for owner in (module, *(x for x in list(vars(module).values()) if type(x) is type))
        for attribute, value in list(vars(owner).items())
    }

def changed(before):
    after = state()
    return {where for where, value in before.items() if after.get(where) is not value}

def added(before):
    return {where[1:] for where in set(state()) - set(before) if where[1] in ("Tensor", "Function")}

warnings.simplefilter("ignore")
torch.Tensor.__torch_function__, torch.autograd.Function.apply
before = state()
import distconv.layers, distconv.planning, distconv.training, distconv.horovod, distconv.lbann
assert changed(before) == set(), changed(before)
assert vars(torch.Tensor).get("data") is None
"""

DRY_RUN = """
from distconv.planning.dry_run import DryRunGrid
DryRunGrid({"height": 2})
"""

REAL = """
distconv.ProcessGrid()
"""

PATCHED = """
assert vars(torch.Tensor).get("data") is not None
kinds = {kind for _, kind, name in changed(before) if name in ("apply", "save_inputs")}
new = {kind.__name__ for kind in torch.autograd.Function.__mro__ if "apply" in vars(kind)}
assert len(new) > 1 or "Function" in kinds, (kinds, new)
"""


def run_alone(program: str) -> None:
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert end.returncode == 0, end.stderr


@pytest.mark.parametrize("grid", [REAL, DRY_RUN])
def test_torch_is_patched_by_the_first_grid_and_not_by_an_import(grid: str) -> None:
    run_alone(STATE + grid + PATCHED)
    assert private.at_first_grid and private.install_patches


def test_a_patch_that_comes_after_the_first_grid_is_installed_at_once() -> None:
    private.install_patches()
    installed = []
    private.at_first_grid(lambda: installed.append(1))
    private.install_patches()
    assert installed == [1]


def test_data_are_set_by_the_function_that_replaces_torchs() -> None:
    run_alone(
        "import torch\n"
        "from distconv import torch_private as private\n"
        "seen = []\n"
        "def assign(x, value): seen.append(value); private.set_data(x, value)\n"
        "private.replace_data_setter(assign)\n"
        "x, y = torch.nn.Parameter(torch.zeros(2)), torch.ones(3)\n"
        "x.data = y\n"
        "assert len(seen) == 1 and seen[0] is y and x.data.tolist() == [1, 1, 1]\n"
        "assert torch.Tensor.data is vars(torch._C.TensorBase)['data']\n"
    )
    assert private.set_data and private.replace_data_setter


def test_functions_are_applied_by_the_function_that_replaces_torchs() -> None:
    run_alone(
        "import torch\n"
        "from distconv import torch_private as private\n"
        "from tests.test_torch_private import Double\n"
        "seen = []\n"
        "def apply(cls, *x): seen.append(cls); return private.apply_of_torch(cls)(*x)\n"
        "private.replace_apply(apply)\n"
        "assert Double.apply(torch.ones(1)).item() == 2 and seen == [Double]\n"
    )
    assert private.replace_apply and private.apply_of_torch


def test_checkpoints_keep_what_their_inputs_are_replaced_by() -> None:
    run_alone(
        "import torch\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "from distconv import torch_private as private\n"
        "seen = []\n"
        "def save(inputs): seen.append('save'); return list(inputs[::-1]), len(inputs)\n"
        "def restore(x, n): seen.append(n); return x[::-1]\n"
        "private.replace_saved_inputs(save, restore)\n"
        "x, y = torch.ones(1, requires_grad=True), torch.full((1,), 2.0)\n"
        "checkpoint(lambda a, b: (a * b).sin(), x, y, use_reentrant=False).sum().backward()\n"
        "assert abs(x.grad.item() - 2 * torch.tensor(2.0).cos().item()) < 1e-6\n"
        "keeps = hasattr(torch.utils.checkpoint._CheckpointFrame, 'save_inputs')\n"
        "assert seen == (['save', 2] if keeps else []), seen\n"
    )
    assert private.replace_saved_inputs


def test_the_function_by_which_checkpoints_keep_inputs_is_known() -> None:
    kept = getattr(checkpoint, "_NoopSaveInputs", None)
    assert kept is None or private.keeps_inputs(kept) == (torch.__version__ >= "2.11")
    assert not private.keeps_inputs(Double)
    assert not private.keeps_inputs(checkpoint.CheckpointFunction)


def test_a_profiler_is_refused_within_the_context_only() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("one at a time")

    assert not private.is_profiling()
    with (
        private.profiler_refused(refuse),
        pytest.raises(RuntimeError, match="one at a time"),
        profile(),
    ):
        pass
    with profile():
        assert private.is_profiling()


# Autograd


def test_each_backward_pass_has_a_number() -> None:
    assert private.backward_pass() == -1
    x = Double.apply(leaf(1))
    (x + Double.apply(x)).sum().backward()
    Double.apply(leaf(1)).backward()
    first, second, third = Double.passes
    assert first == second >= 0 and third not in (-1, first)


def test_a_hook_knows_the_node_that_runs_and_its_number() -> None:
    assert private.current_node() is None
    number = private.next_node_number()
    x = leaf(1) * 3
    later = x.sin()
    seen = []
    x.register_hook(lambda _: seen.append(private.current_node()))
    later.backward()
    assert seen[0] is not None
    first, second = private.node_number(x.grad_fn), private.node_number(later.grad_fn)
    assert first is not None and second is not None and number <= first < second
    accumulates = x.grad_fn.next_functions[0][0]
    assert private.node_number(accumulates) is None and private.node_number(None) is None


def test_a_callback_comes_when_a_backward_pass_is_at_its_end() -> None:
    x, seen = leaf(1), []
    y = x * 2
    y.register_hook(lambda _: private.at_end_of_backward(lambda: seen.append(x.grad is not None)))
    y.backward()
    assert seen == [True]


def test_the_compiled_apply_records_a_function() -> None:
    y = private.compiled_apply.__get__(None, Double)(leaf(1))
    assert y.item() == 2 and type(y.grad_fn).__name__ == "DoubleBackward"

    class Triple(private.ShardFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 3 * x

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return 3 * dy

    x = leaf(1)
    Triple.apply(x).backward()
    assert x.grad is not None and x.grad.item() == 3


def test_the_roots_of_a_backward_pass_are_found_also_from_another_thread() -> None:
    assert private.roots_of_backward() == []
    x, seen = leaf(1), []

    def look() -> None:
        seen.append(private.roots_of_backward())

    def look_from_a_thread(_: Tensor) -> None:
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    x.register_hook(look_from_a_thread)
    y = (x * 2).sum()
    y.backward()
    assert [[root is y for root in roots] for roots in seen] == [[True], [True]]


# Tensors


def test_a_wrapper_has_a_shape_and_no_memory() -> None:
    x = private.make_wrapper(Strict, (10**6, 10**6), dtype=torch.half, device="cpu")
    assert type(x) is Strict and x.shape == (10**6, 10**6) and x.dtype == torch.half


def test_views_know_their_base() -> None:
    x = torch.ones(4)
    assert private.is_view(x[:2]) and private.base_of(x[:2]) is x
    assert not private.is_view(x) and private.base_of(x) is None


def test_zeros_without_memory_are_known() -> None:
    assert private.is_zero_tensor(torch._efficientzerotensor((2,)))
    assert not private.is_zero_tensor(torch.zeros(2))


def test_hooks_are_listed() -> None:
    x = leaf(2)
    assert not private.hooks_of(x) and not private.accumulation_hooks_of(x)
    x.register_hook(lambda g: g)
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert len(private.hooks_of(x)) == len(private.accumulation_hooks_of(x)) == 1


def test_memory_has_a_number_and_users() -> None:
    x = torch.ones(4)
    assert private.address_of_memory(x) != private.address_of_memory(torch.ones(4))
    assert (private.users_of_memory(x), private.users_of(x)) == (2, 1)
    view = x[1:]
    assert private.users_of_memory(x) > 2
    assert private.address_of_memory(view) == private.address_of_memory(x)
    hollow = torch.empty(4, device="meta")
    assert private.address_of_memory(hollow) == private.address_of_memory(hollow[1:])
    saved = leaf(4).mul(x)
    assert private.users_of(x) > 1 and saved is not None


def test_a_marked_tensor_is_a_parameter_of_modules() -> None:
    x = torch.ones(2).as_subclass(Heard).requires_grad_()
    assert not private.is_marked_parameter(x)
    private.mark_parameter(x)
    assert private.is_marked_parameter(x) and isinstance(x, nn.Parameter)
    module = nn.Module()
    module.register_parameter("x", x)  # type: ignore[arg-type]
    assert next(module.parameters()) is x


# Dispatch


def test_subclasses_are_passed_by() -> None:
    x = private.make_wrapper(Strict, (2, 3), dtype=torch.float32, device="cpu")
    with pytest.raises(RuntimeError, match="below"):
        x.t_()
    with torch.no_grad(), private.without_torch_function(), private.without_torch_dispatch():
        x.t_()
    assert x.shape == (3, 2)
    assert private.no_torch_function(torch.add, (), (torch.ones(1), 1)).item() == 2


def test_modes_see_operators_unless_they_are_off() -> None:
    seen = []

    class Look(private.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    assert private.count_modes() == 0
    with Look():
        assert private.count_modes() == 1 and private.tracing_mode() == ""
        torch.ones(1).half()
        with private.without_modes():
            assert private.count_modes() == 0
            torch.zeros(1)
    assert seen == [torch.ops.aten.ones.default, private.conversion]


def test_autocast_is_seen_on_any_device() -> None:
    assert not private.autocast_is_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.autocast_is_on()


def test_tracers_and_transforms_are_seen() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    seen: dict[str, Any] = {}

    def look(name: str, x: Tensor) -> Tensor:
        seen[name] = (
            private.innermost_transform() is not None,
            private.tracing_mode(),
            private.make_fx_before_dispatch() is not None,
        )
        return x + 1

    x = torch.ones(2)
    look("nothing", x)
    traced = torch.jit.trace(lambda x: x + (2 if private.is_traced_by_jit() else 1), x)
    assert traced(x)[0].item() == 3 and not private.is_traced_by_jit()
    torch.func.vmap(lambda x: look("vmap", x))(x)
    make_fx(lambda x: look("make_fx", x))(x)
    make_fx(lambda x: look("before dispatch", x), pre_dispatch=True)(x)
    with FakeTensorMode():
        look("fake", torch.ones(2))
    assert seen["nothing"] == (False, "", False)
    assert seen["vmap"][0] and seen["make_fx"][1] == "make_fx"
    assert seen["before dispatch"][2] and "FakeTensorMode" in seen["fake"][1]


def test_a_function_that_runs_eagerly_breaks_the_graph_of_a_compiler() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @private.run_eagerly
    def within(x: Tensor) -> Tensor:
        return x.sin()

    @torch.compile(backend=backend)
    def whole(x: Tensor) -> Tensor:
        return within(x + 1) * 2

    try:
        assert torch.equal(whole(torch.ones(2)), torch.full((2,), 2.0).sin() * 2)
    finally:
        torch.compiler.reset()
    assert len(graphs) == 2
    assert not any("sin" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_guards_see_hooks_and_defaults() -> None:
    module, graphs = nn.Linear(2, 2), []

    def scaled(x: Tensor, factor: float = 1.0) -> Tensor:
        return x * factor

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def whole(x: Tensor) -> Tensor:
        return scaled(module(x))

    compiled = torch.compile(whole, backend=backend, fullgraph=True)
    x, ours = torch.ones(1, 2), True
    try:
        private.guard_exactly(lambda: ours)
        assert torch.equal(compiled(x), whole(x))
        module.register_forward_hook(lambda module, given, result: result * 2)
        assert torch.equal(compiled(x), whole(x))
        scaled.__defaults__ = (3.0,)
        assert torch.equal(compiled(x), whole(x))
    finally:
        ours = False
        torch.compiler.reset()
    assert len(graphs) == 3


def test_tensors_of_a_trace_are_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert private.is_fake(torch.ones(1))
    assert not private.is_fake(torch.ones(1))


def test_checkpoints_in_graphs_are_torchs_and_other_graphs_in_graphs_are_named() -> None:
    found, graphs = [], []

    def backend(graph: Any, _: Any) -> Any:
        found.append(private.unknown_in_graph(graph))
        graphs.append(graph)
        graph.recompile()
        return graph.forward

    def once(x: Tensor) -> Tensor:
        return checkpoint.checkpoint(torch.sin, x, use_reentrant=False) * 2

    x = leaf(2)
    try:
        torch.compile(once, backend=backend, fullgraph=True)(x)
        torch.compile(lambda x: Halved.apply(x), backend=backend, fullgraph=True)(x)
    finally:
        torch.compiler.reset()
    assert found[0] == "" and "autograd_function_apply" in found[1]
    x.grad = None
    (result,) = graphs[0](x)
    result.sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach().cos())


def test_a_backend_takes_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import _dynamo
    from torch._dynamo.backends.registry import register_backend

    monkeypatch.setattr(_dynamo, "optimize", _dynamo.optimize)
    register_backend(lambda graph, inputs: graph.forward, name="distconv_test")
    private.register_backend("distconv_test", lambda program: ("taken", program))
    module = nn.Linear(1, 1)
    assert torch.compile(module, backend="distconv_test") == ("taken", module)
    assert torch.compile(module, backend="eager")(torch.ones(1, 1)).shape == (1, 1)


def test_operators_say_whether_they_write() -> None:
    assert isinstance(torch.ops.aten.add_.Tensor, private.Operator)
    assert private.is_mutable(torch.ops.aten.add_.Tensor)
    assert not private.is_mutable(torch.ops.aten.add.Tensor)


def test_operators_show_their_signature() -> None:
    aten = torch.ops.aten
    assert private.signature_of(aten.neg.default) == "(Tensor self) -> Tensor"


# Functions and kernels


@pytest.mark.parametrize("n", [2, 3])
def test_pooling_kernels_give_maxima_and_places(n: int) -> None:
    x = torch.randn(1, 2, *(6, 5, 4)[:n])
    expected = getattr(F, f"max_pool{n}d")(x, 2, 1, return_indices=True)
    actual = private.max_pool_with_places[n](x, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    expected = getattr(F, f"adaptive_max_pool{n}d")(x, 2, return_indices=True)
    actual = private.adaptive_max_pool[n](x, (2,) * n)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_padding_has_a_second_name() -> None:
    x = torch.ones(2)
    assert torch.equal(private.pad(x, (1, 0)), F.pad(x, (1, 0)))


@pytest.mark.parametrize(
    ("mode", "antialias", "n"),
    [
        *(("nearest", False, n) for n in (1, 2, 3)),
        *(("nearest-exact", False, n) for n in (1, 2, 3)),
        *(("linear", False, 1), ("bilinear", False, 2), ("trilinear", False, 3)),
        *(("bicubic", False, 2), ("bilinear", True, 2), ("bicubic", True, 2)),
    ],
)
def test_upsampling_takes_sizes_and_scales(mode: str, antialias: bool, n: int) -> None:
    x = torch.randn(1, 2, *(6, 5, 4)[:n])
    scales = (1.5, 2.2, 1.7)[:n]
    size = [int(a * s) for a, s in zip(x.shape[2:], scales, strict=True)]
    corners = () if "nearest" in mode else (False,)
    expected = F.interpolate(x, scale_factor=scales, mode=mode, antialias=antialias)
    actual = private.upsampling(mode, antialias, n)(x, size, *corners, *scales)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_halves_of_the_keys_adds_up_to_attention_to_all(causal: bool) -> None:
    q, k, v, seed = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.7)
    expected.backward(seed)
    whole, sums = private.flash_attention((q, k, v), causal, 0.7)
    torch.testing.assert_close(whole, expected.detach())
    parts = [private.flash_attention((q, k[..., s, :], v[..., s, :]), False, 0.7) for s in HALVES]
    both = torch.stack([lse for _, lse in parts]).logsumexp(0)
    if not causal:
        total = sum(out * (lse - both).exp().unsqueeze(-1) for out, lse in parts)
        torch.testing.assert_close(total, whole)
        found = [
            private.flash_attention_backward(
                (seed, q, k[..., s, :], v[..., s, :], whole), both, False, 0.7
            )
            for s in HALVES
        ]
        dq = found[0][0] + found[1][0]
        dk, dv = (torch.cat([part[i] for part in found], -2) for i in (1, 2))
    else:
        dq, dk, dv = private.flash_attention_backward((seed, q, k, v, whole), sums, True, 0.7)
    for got, leaf in zip((dq, dk, dv), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad)


HALVES = (slice(0, 2), slice(2, 6))


def test_distributions_check_and_draw_by_these_functions() -> None:
    x = torch.full((2, 3), 2.0)
    called: Any = (private.is_all_true, private.standard_gamma, private.sample_dirichlet)
    with ExitStack() as stack:
        spies = [
            stack.enter_context(mock.patch.object(torch, function.__name__, wraps=function))
            for function in called
        ]
        distributions.Gamma(x, x, validate_args=True).sample()
        distributions.Dirichlet(x, validate_args=True).sample()
    assert [spy.called for spy in spies] == [True] * 3
    bits = torch.tensor([True, False])
    assert private.is_any_true(bits) and not private.is_all_true(bits)
    concentration = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    drawn = private.standard_gamma(concentration)
    (slope,) = torch.autograd.grad(drawn.sum(), concentration)
    assert torch.equal(private.standard_gamma_grad(concentration.detach(), drawn), slope)
    drawn = private.sample_dirichlet(concentration)
    total = concentration.detach().sum().expand(3)
    assert private.dirichlet_grad(drawn.detach(), concentration.detach(), total).shape == (3,)


def test_functions_of_lists_and_checks_compute_what_their_names_say() -> None:
    private.assert_async(torch.ones(1), "not reached")
    with pytest.raises(RuntimeError, match="a reason"):
        private.assert_async(torch.zeros(1), "a reason")
    x = [torch.full((4,), 2.0), torch.ones(1)]
    assert [n.item() for n in private.of_lists("norm")(x)] == [4.0, 1.0]
    private.of_lists("add_")(x, 1)
    assert [y[0].item() for y in x] == [3.0, 2.0]
    found = torch.zeros(1)
    private.unscale_gradients(x, found, torch.full((1,), 0.5))
    assert found.item() == 0 and [y[0].item() for y in x] == [1.5, 1.0]
    private.unscale_gradients([torch.tensor([torch.inf])], found, torch.ones(1))
    assert found.item() == 1


def test_fused_optimizers_step_by_these_functions() -> None:
    x = torch.ones(2).as_subclass(Heard).requires_grad_()
    for name, optimizer in (
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("adagrad", torch.optim.Adagrad),
        ("sgd", torch.optim.SGD),
    ):
        x.grad = torch.ones(2).as_subclass(Heard)
        Heard.asked.clear()
        optimizer([x], lr=0.1, fused=True).step()
        assert private.fused_step(name) in Heard.asked


def test_refused_functions_are_asked_for_by_their_private_names() -> None:
    x = torch.ones(2).as_subclass(Heard)
    with forward_ad.dual_level():
        forward_ad.make_dual(x, torch.ones(2))
    assert private.make_dual in Heard.asked
    Heard.asked.clear()
    torch.atleast_1d([x, x])
    assert private.of_sequence("atleast_1d") in Heard.asked
    torch.meshgrid([x, x], indexing="ij")
    assert private.of_sequence("meshgrid") in Heard.asked
    Heard.asked.clear()
    module, p = nn.Module(), x.clone().as_subclass(Heard).requires_grad_()
    private.mark_parameter(p)
    module.register_parameter("p", p)  # type: ignore[arg-type]
    module.double()
    assert private.compatible_types in Heard.asked


def test_arguments_of_losses_and_unpooling_are_read_as_by_torch() -> None:
    assert private.reduction_of_flags(False, None, emit_warning=False) == "sum"
    x = torch.ones(1, 1, 3, 3)
    assert list(private.unpooled_size(x, [2, 2], [2, 2], [0, 0], None)) == [6, 6]
    with pytest.raises(ValueError, match="output_size"):
        private.unpooled_size(x, [2, 2], [2, 2], [0, 0], [9, 9])
    assert private.fans(torch.ones(6, 4, 3, 3)) == (36, 54)


def test_functions_that_only_raise_are_known() -> None:
    assert not private.only_raises(torch.linalg.inv)
    for name in ("lu", "svd", "qr", "slogdet"):
        if private.only_raises(getattr(torch, name)):
            with pytest.raises(RuntimeError):
                getattr(torch, name)(torch.eye(2))


def test_a_weight_is_found_that_torch_does_not_hand_on() -> None:
    seen = []

    class Weighted(Heard):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append((kwargs or {}).get("weight", private.dropped_weight(F.l1_loss)))
            return torch.ones(1)

    x, weight = torch.ones(2).as_subclass(Weighted), torch.rand(2)
    F.l1_loss(x, torch.ones(2), weight=weight)
    F.l1_loss(x, torch.ones(2))
    assert seen[0] is weight and seen[1] is None
    assert private.dropped_weight(F.l1_loss) is None


def test_a_composition_hands_over_what_it_calls() -> None:
    x = torch.randn(3, 1, 4).as_subclass(Heard)
    attention = nn.MultiheadAttention(4, 2)
    arguments = (x, x, x, 4, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False)
    more = (0.0, attention.out_proj.weight, attention.out_proj.bias)
    Heard.asked.clear()
    expected = F.multi_head_attention_forward(*arguments, *more)
    assert F.multi_head_attention_forward in Heard.asked and F.linear not in Heard.asked
    Heard.asked.clear()
    actual = private.composition(F.multi_head_attention_forward)(*arguments, *more)
    assert F.linear in Heard.asked and F.multi_head_attention_forward not in Heard.asked
    assert torch.equal(actual[0].as_subclass(Tensor), expected[0].as_subclass(Tensor))


# Modules


def test_modules_show_what_they_hold() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    assert private.parts_and_parameters(module) == ({}, {"0": module[0]})
    parameters, _ = private.parts_and_parameters(module[0])
    assert list(parameters) == ["weight", "bias"]
    before = module.register_forward_pre_hook(lambda *_: None)
    after = module.register_forward_hook(lambda *_: None)
    assert [list(hooks) for hooks in private.hooks_of_module(module)] == [[before.id], [after.id]]
    assert all(isinstance(k(1), private.BatchNorm) for k in (nn.BatchNorm3d, nn.SyncBatchNorm))


def test_the_call_of_a_module_is_on_the_stack() -> None:
    class Look(nn.Module):
        def forward(self) -> list[nn.Module]:
            frame: Any = sys._getframe(0)
            found = []
            while frame is not None:
                if frame.f_code is private.CODE_OF_MODULE_CALL:
                    found.append(frame.f_locals["self"])
                frame = frame.f_back
            return found

    module = Look()
    assert module() == [module]


def test_states_carry_versions() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    versions = private.versions_in_state(state)
    assert versions[""]["version"] == 2
    assert private.versions_in_state({}) is None
    copied: Any = OrderedDict(state)
    private.set_versions_in_state(copied, versions)
    assert private.versions_in_state(copied) is versions


def test_schedulers_within_a_scheduler_are_known() -> None:
    opt = torch.optim.SGD([torch.ones(1)])
    inner = [torch.optim.lr_scheduler.ConstantLR(opt), torch.optim.lr_scheduler.StepLR(opt, 2)]
    joined: Any = torch.optim.lr_scheduler.SequentialLR(opt, inner, milestones=[2])
    assert private.inner_schedulers(joined) == inner
    assert private.inner_schedulers(torch.optim.lr_scheduler.ChainedScheduler(inner)) == inner
    assert private.inner_schedulers(inner[0]) == []


def test_wrappers_are_known() -> None:
    assert not private.in_data_parallel()
    seen: list[Any] = []
    make = nn.parallel.DistributedDataParallel.__init__
    try:
        private.before_data_parallel(lambda *given: seen.append(given[1:]))
        module = nn.Linear(1, 1)
        with pytest.raises((ValueError, RuntimeError)):
            nn.parallel.DistributedDataParallel(module=module)
        assert seen == [("module", module)]
    finally:
        nn.parallel.DistributedDataParallel.__init__ = make
    assert not private.is_flat_parameter(torch.ones(1))
    flat: Any = torch.ones(1)
    flat._is_flat_param = True
    assert private.is_flat_parameter(flat)
    from torch.distributed.fsdp import _flat_param

    assert "_is_flat_param" in Path(_flat_param.__file__).read_text()


def test_flex_attention_calls_its_replacement() -> None:
    run_alone(
        "import torch\n"
        "from torch.nn.attention.flex_attention import flex_attention\n"  # before the patch
        "from inspect import signature\n"
        "from distconv import torch_private as private\n"
        "seen, before = [], signature(flex_attention)\n"
        "own = private.flex_attention_of_torch\n"
        "def replacement(*x, **named): seen.append(len(x)); return own(*x, **named)\n"
        "private.replace_flex_attention(replacement)\n"
        "assert signature(flex_attention) == before\n"
        "x = torch.ones(1, 1, 2, 4)\n"
        "assert torch.allclose(flex_attention(x, x, value=x), x) and seen == [2], seen\n"
    )
    assert private.replace_flex_attention and private.flex_attention_of_torch


def test_fully_shard_asks_first() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    init = _fsdp_state.FSDPState.init
    seen: list[Any] = []
    try:
        private.before_fully_shard(seen.append)
        if hasattr(init, "__wrapped__"):
            return  # by an earlier call of parallelize
        private.before_fully_shard(seen.append)
        module, state = nn.Linear(1, 1), _fsdp_state.FSDPState()
        with pytest.raises(TypeError):
            state.init((module,))
        assert seen == [module]
    finally:
        _fsdp_state.FSDPState.init = init


def test_policies_of_checkpoints_are_noticed() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    assert not private.in_selective_checkpoint()
    for context in create_selective_checkpoint_contexts([torch.ops.aten.add.Tensor]):
        with context:
            assert private.in_selective_checkpoint()


def test_hooks_for_saved_tensors_know_those_around_them() -> None:
    assert private.innermost_saved_hooks() is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert private.innermost_saved_hooks() == (pack, unpack)


# torch.distributed


def test_groups_of_torch_take_what_is_private_of_them() -> None:
    group = distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=9))
    gathered = torch.zeros(2)
    private.gather_flat(group)(gathered, torch.ones(2)).wait()
    assert gathered.tolist() == [1, 1]
    options = distributed.ProcessGroupGloo._Options()
    private.set_limit(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


@pytest.mark.parametrize("underscore", ["", "_"])
def test_groups_are_ended_by_the_names_of_either_torch(underscore: str) -> None:
    ended: list[str] = []
    names = {f"{underscore}{name}": partial(ended.append, name) for name in ("abort", "shutdown")}
    private.end_group(SimpleNamespace(**names), abort=True)
    private.end_group(SimpleNamespace(**names), abort=False)
    private.end_group(SimpleNamespace(), abort=False)
    assert ended == ["abort", "shutdown"]
    assert {"abort", "shutdown"} <= set(dir(distributed.ProcessGroupGloo))


def test_messages_are_batched_by_the_group() -> None:
    group = distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=9))
    with pytest.raises(RuntimeError, match="gloo does not implement startCoalescing"):
        private.start_batch(group)
    with pytest.raises(RuntimeError, match="gloo does not implement endCoalescing"):
        private.end_batch(group)


def test_the_store_of_the_default_group_is_found() -> None:
    run_alone(
        "from torch import distributed\n"
        "from distconv import torch_private as private\n"
        "store = distributed.HashStore()\n"
        "distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "private.default_store().set('key', 'value')\n"
        "distributed.destroy_process_group()\n"
    )
    assert private.default_store
