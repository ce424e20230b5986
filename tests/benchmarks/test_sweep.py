"""The calls of the sweep are what they say: each equals its serial result on a cut tensor."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measuring.settings import Settings
from benchmarks.sweep import sweep
from benchmarks.sweep_cases import CASES, OF_PLANES, SHAPES, Case
from distconv.model.parallelize import parallelize
from distconv.tensor.dist_tensor import distribute_tensor

NAMED = [(family, name, case) for family, cases in CASES.items() for name, case in cases.items()]


@pytest.mark.parallel([2])
@pytest.mark.parametrize(("family", "name", "case"), NAMED, ids=[name for _, name, _ in NAMED])
def test_calls_of_the_sweep_equal_serial(family: str, name: str, case: Case) -> None:
    for n in (2,) if family in OF_PLANES else (2, 3):
        grid = Settings().grid(n + 2)
        torch.manual_seed(0)
        module = case(n).double()
        x = 0.1 + 0.8 * torch.rand(*SHAPES[n][:2], *(16, 8, 8)[:n], dtype=torch.float64)
        expected = module(x)
        made = parallelize(module, grid)(distribute_tensor(x, grid))
        if name == "dropout":
            assert made.shape == expected.shape
        else:
            torch.testing.assert_close(made.full_tensor(), expected)


@pytest.mark.parallel([2])
def test_a_sweep_times_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, 2, (1, 32, 16, 16))
    monkeypatch.setitem(SHAPES, 3, (1, 16, 8, 8, 8))
    monkeypatch.setattr("benchmarks.sweep._SECONDS", 0.0)
    ((family, ((name, *ratios, _),)),) = sweep(["max_pool{}d, 2"])
    assert (family, name) == ("Pooling", "max_poolnd, 2")
    assert len(ratios) == 4 and all(float(r.split()[0].strip("*")) > 0 for r in ratios)
