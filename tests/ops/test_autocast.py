"""Autocast gives results and gradients the types that serial torch gives them, on every rank."""

from __future__ import annotations

import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import distconv as dc
from distconv.planning.dry_run import DryRunGrid
from distconv.tensor import autocast
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


@pytest.mark.parallel([2])
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
            # Whole, and cut along the first dimension and the last.
            shape = cut[0].shape
            sizes = {None, *shape[:1], *shape[-1:]} if dtype == SINGLE else {*shape[:1]}
            for size in sizes or {None}:
                with noted(name, dtype, size):
                    blocks = [_cut(x, size, grid) for x in cut]
                    try:
                        got = _outcome(partial(sample.call, name), *blocks, *plain)
                    except dc.UnsupportedOperation:
                        continue
                    assert _types(got) == _types(expected)


@contextmanager
def _on_gpus(dtype: torch.dtype) -> Iterator[None]:
    """Set autocast for GPUs, also where there are none."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


ON_GPUS: dict[str, tuple[Callable[..., Any], list[torch.dtype], list[torch.dtype]]] = {
    "products are of half types": (torch.mv, [SINGLE, SINGLE], [HALF, HALF]),
    "operands of norms are single": (torch.cdist, [HALF, HALF], [SINGLE, SINGLE]),
    "sums add up single numbers": (torch.sum, [HALF], [SINGLE]),
    "the widest type wins": (torch.dot, [HALF, SINGLE], [SINGLE, SINGLE]),
    "others stay": (torch.mul, [HALF, SINGLE], [HALF, SINGLE]),
}


@pytest.mark.parametrize("case", ON_GPUS)
def test_operands_on_a_gpu_are_converted_by_its_own_lists(case: str) -> None:
    function, given, expected = ON_GPUS[case]
    grid = DryRunGrid({"height": 2}, 0, gpu=True)
    shapes = {torch.mv: ((4, 4), (4,)), torch.dot: ((4,), (4,))}.get(function, ((4, 4), (4, 4)))
    tensors = [grid.tensor(s, None, t) for s, t in zip(shapes, given, strict=False)]
    seen: list[torch.dtype] = []
    with _on_gpus(HALF):
        rule = autocast.under_autocast(
            lambda *t: seen.extend(x.dtype for x in t), function, tensors
        )
        rule(*tensors)
    assert seen == expected


@pytest.mark.parametrize("gpu", [True, False])
def test_blocks_of_a_dry_run_are_converted_by_the_lists_of_their_own_device(gpu: bool) -> None:
    grid = DryRunGrid({"height": 2}, 0, gpu=gpu)
    x = dc.DistTensor(torch.ones(1, 2, 3, 4), (1, 2, 6, 4), ((), (), ("height",), ()), grid)
    with torch.autocast("cpu", HALF):
        made = torch.nn.functional.conv2d(x, torch.ones(2, 2, 1, 1), torch.ones(2))
    assert made.dtype == made.shard.dtype == HALF


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return the lists that torch tests its autocast on GPUs with: names, arguments, options."""
    name = "torch.testing._internal.common_utils"  # which asks for packages that are not here
    needed = {"TEST_WITH_ROCM": False, "TestCase": unittest.TestCase}
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**needed))
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    return vars(AutocastTestLists("cpu"))


OF_KIND = {
    "torch_expect_builtin_promote": None,
    "methods_expect_builtin_promote": None,
    "torch_fp16": torch.float16,
    "methods_fp16": torch.float16,
    "nn_fp16": torch.float16,
    "linalg_fp16": torch.float16,
    "torch_fp32": SINGLE,
    "methods_fp32": SINGLE,
    "nn_fp32": SINGLE,
    "torch_need_autocast_promote": SINGLE,
    "banned": None,
}
"""The type that operands get which are of another, by the name of torch's list."""

ON_GPUS_ALONE = {"cudnn_convolution", "cudnn_convolution_transpose", "gru_cell"} | (
    {"rms_norm", "cosine_similarity"} if not torch.cuda.is_available() else set()
)
"""Functions that torch cannot try on tensors without elements."""

IMAGE = torch.rand(2, 2, 3, 4, 4, dtype=torch.float16)
NOT_LISTED: dict[str, list[tuple[Any, ...]]] = {
    "nn_fp32": [
        ("huber_loss", (IMAGE, IMAGE)),
        *((f"upsample_{n}2d", (IMAGE[0], (8, 8), False)) for n in ("bilinear", "bicubic")),
        *((f"_upsample_{n}2d_aa", (IMAGE[0], (8, 8), False)) for n in ("bilinear", "bicubic")),
        *((f"{n}1d", (IMAGE[0, 0], (8,))) for n in ("upsample_nearest", "_upsample_nearest_exact")),
        *((f"{n}2d", (IMAGE[0], (8, 8))) for n in ("upsample_nearest", "_upsample_nearest_exact")),
        *((f"{n}3d", (IMAGE, (8, 8, 8))) for n in ("upsample_nearest", "_upsample_nearest_exact")),
        ("upsample_linear1d", (IMAGE[0, 0], (8,), False)),
        ("upsample_trilinear3d", (IMAGE, (8, 8, 8), False)),
    ],
    "torch_fp32": [
        ("frobenius_norm", (IMAGE, (0, 1))),
        ("nuclear_norm", (IMAGE, (0, 1))),
        ("native_layer_norm", (IMAGE, (4,), None, None, 1e-5)),
        ("linalg_vector_norm", (IMAGE,)),
        ("linalg_matrix_norm", (IMAGE,)),
    ],
}
"""Functions that torch's dispatcher converts for, and torch's tests leave out."""

WITHIN_OTHERS = {
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
}
"""Functions that convert tensors which they make."""


def _function(name: str, kind: str) -> Any:
    where: list[Any] = [torch.Tensor] if kind.startswith("methods") else [torch._C._nn]
    for holder in (*where, torch._C._linalg, torch, torch._C._nn):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


def test_every_function_of_the_lists_for_gpus_has_the_types_of_its_list(
    lists: dict[str, list[Any]],
) -> None:
    key = "AutocastCUDA"
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    named = {entry[0] for of in (*lists.values(), *NOT_LISTED.values()) for entry in of}
    bare = {name.split("::")[1].split(".")[0] for name in registered}
    assert bare - named == WITHIN_OTHERS
    for kind, wanted in OF_KIND.items():
        for name, args, *options in (*lists[kind], *NOT_LISTED.get(kind, ())):
            if name == "einsum":
                args, options = ("bkhd,bqhd->bqkh", IMAGE[0].float(), IMAGE[0].float()), []
            function = _function(name, kind)
            if function is None or name in ON_GPUS_ALONE:
                assert name in {"__div__", *ON_GPUS_ALONE}
                continue
            named_options = options[0] if options and isinstance(options[0], dict) else {}
            with noted(kind, name), _on_gpus(torch.float16):
                found = autocast._types(function, args, named_options, "cuda")
            if kind == "banned" or name == "equal":
                assert found is None
                continue
            assert found is not None and not found.others, name
            given = [x.dtype for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)]
            assert found.operands == tuple(
                wanted if wanted != t and t.is_floating_point else None for t in given
            ), name
