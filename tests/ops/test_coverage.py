"""The page of functions is current; all functions with a rule have samples, which equal serial."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import get_overridable_functions

import distconv as dc
from tests.support.samples import (
    SAMPLES,
    Sample,
    bare,
    function_of,
    is_random,
    names,
    samples_of,
    with_rules,
)
from tests.support.serial import agrees, noted, random_grid
from tests.support.strategies import TIMES
from tests.support.supported import PAGE, RANKS, listed, page, release, status

NUMBERS = [2] if TIMES == 1 else [2, 3]
"""The numbers of ranks on which samples are compared by day, and at night."""

NAMELESS = {
    torch._C._nn.pad,
    torch.sparse.mm,
    flex_attention,
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    *(getattr(torch._C._VariableFunctions, f"atleast_{n}d") for n in (1, 2, 3)),
    torch._C._VariableFunctions.meshgrid,
    *(getattr(torch, n) for n in dir(torch) if n.startswith(("_foreach", "_amp", "_fused"))),
}
"""Functions that only torch itself calls, and three that have tests of their own."""

SAMPLED: dict[str, list[str]] = {}
"""The names of functions with samples, by their bare name."""

for _name in dict.fromkeys([*with_rules(), *(n for n in SAMPLES if "." in n)]):
    SAMPLED.setdefault(bare(_name).removesuffix("_"), []).append(_name)


def test_every_function_with_a_rule_has_a_sample() -> None:
    assert [n for n in with_rules() if not samples_of(n)] == []
    assert [f for f in dc.tensor.dispatch.RULES if f not in names() and f not in NAMELESS] == []


def test_every_overridable_function_is_listed() -> None:
    rows = {function_of(name) for known in listed().values() for name in known}
    overridable = {f for found in get_overridable_functions().values() for f in found}
    # Those of lists, which torch has from 2.15 on, are refused.
    of_lists = {f for f in overridable if getattr(f, "__module__", None) == "torch.foreach"}
    assert overridable - rows == of_lists


def _seeded(call: Callable[..., Any], grid: dc.ProcessGrid) -> Callable[..., Any]:
    """Return a call that draws the same numbers each time, also for plain tensors."""

    def drawn(*tensors: Tensor) -> Any:
        torch.manual_seed(0)
        if any(isinstance(x, dc.DistTensor) for x in tensors):
            return call(*tensors)
        whole = [dc.distribute_tensor(x, grid, dc.Layout()) for x in tensors]
        return call(*whole).full_tensor()

    return drawn


def _agrees(name: str, sample: Sample, grid: dc.ProcessGrid, rng: random.Random) -> None:
    inputs, parameters = (
        [o.values(rng, o.shape) for o in sample.operands(plain)] for plain in (False, True)
    )

    def call(*tensors: Tensor) -> Any:
        return sample.call(name, *tensors)

    if is_random(name):
        agrees(_seeded(call, grid), inputs, parameters, grid, rng)
        return
    expected = call(*(x.clone().requires_grad_(x.is_floating_point()) for x in inputs), *parameters)
    if isinstance(expected, (Tensor, tuple)):
        agrees(call, inputs, parameters, grid, rng)
    else:  # a value of Python
        whole = [dc.distribute_tensor(x, grid, dc.Layout()) for x in inputs]
        assert repr(call(*whole)) == repr(expected)


@pytest.mark.nightly
@pytest.mark.parallel(NUMBERS)
@pytest.mark.parametrize("key", SAMPLED)
@pytest.mark.filterwarnings("ignore")
def test_a_sample_equals_serial(key: str) -> None:
    rng = random.Random(key)
    grid = random_grid(rng)
    for name in SAMPLED[key]:
        for sample in samples_of(name):
            with noted(name, sample.args[1:], grid):
                _agrees(name, sample, grid, rng)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("key", SAMPLED)
@pytest.mark.filterwarnings("ignore")
def test_operands_on_two_grids_are_refused(key: str) -> None:
    grids = dc.ProcessGrid(height=2), dc.ProcessGrid(width=2)
    layout = dc.Layout()
    for name in SAMPLED[key]:
        for sample in samples_of(name):
            operands = [*sample.operands(plain=False), *sample.operands(plain=True)]
            values = [o.values(random.Random(0), o.shape) for o in operands]
            tensors = [dc.distribute_tensor(x, grids[i > 0], layout) for i, x in enumerate(values)]
            if len(tensors) > 1:
                with (
                    noted(name, sample.args[1:]),
                    pytest.raises(ValueError, match="on different grids"),
                ):
                    sample.call(name, *tensors)


@pytest.mark.parallel([2])
def test_lists_of_tensors_may_be_of_several_grids() -> None:
    grids = dc.ProcessGrid(height=2), dc.ProcessGrid(width=2)
    x, y = (dc.distribute_tensor(torch.ones(3, 4), grid) for grid in grids)
    torch._foreach_add_([x, y], [x, y])
    assert (x.full_tensor() == 2).all() and (y.full_tensor() == 2).all()
    with pytest.raises(ValueError, match="on different grids"):
        torch._foreach_add_([x, y], [y, x])


ATTEMPTS = [
    ("x",),
    ("x", "x"),
    ("x", 1),
    ("x", "x", "x"),
    ("x", 1, "x"),
    ("x", "x", 1),
    ("x", 1, 1),
]
"""Arguments of which most functions take some; the tensors are distributed."""


@pytest.mark.filterwarnings("ignore")
def test_an_unsupported_function_returns_nothing_however_it_is_called() -> None:
    grid = dc.ProcessGrid()
    for name in (name for known in listed().values() for name in known):
        # Those of symbolic numbers take no tensors.
        if ".sym_" in name or samples_of(name) or status(name, grid) != "unsupported":
            continue
        for attempt in ATTEMPTS:
            x = dc.distribute_tensor(torch.ones(3, 3), grid)
            with noted(name, attempt), pytest.raises(Exception):  # noqa: B017
                function_of(name)(*(x if a == "x" else a for a in attempt))


@pytest.mark.parallel([RANKS])
@pytest.mark.skipif(
    f"torch {release(torch.__version__)}." not in PAGE.read_text(),
    reason=f"docs/reference/coverage.md was measured with another torch than {torch.__version__}",
)
def test_the_page_is_current() -> None:
    assert page(dc.ProcessGrid(height=RANKS)) == PAGE.read_text(), "run `make coverage`"
