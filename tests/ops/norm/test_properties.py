"""Normalisation equals serial with its statistics and gradients, on any grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from tests.support.serial import deviation
from tests.support.strategies import Case, on_any_grid, sizes, tolerance_of

pytestmark = pytest.mark.gpu

KINDS = ("normal", "negative", "ties")


def affine(case: Case, shape: list[int], dtype: torch.dtype, most: int = 2) -> list[Tensor]:
    """Draw a weight and a bias, a weight alone, or neither."""
    return [case.tensor(shape, dtype=dtype) for _ in range(case.draw(sizes(0, most)))]


def statistics_agree(running: list[list[Tensor]], dtype: torch.dtype) -> None:
    """Assert that running statistics are the serial ones, and the same on every rank."""
    copies = MPI.COMM_WORLD.allgather([actual.tolist() for actual in running[-1]])
    assert copies.count(copies[0]) == len(copies), "the ranks' running statistics differ"
    for expected, actual in zip(running[0], running[-1], strict=True):
        assert deviation(actual, expected) <= tolerance_of(dtype), "running statistics"


@on_any_grid(18)
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_norms_with_running_statistics_equal_serial(case: Case, name: str) -> None:
    # With two values per channel the input gradient is 0 but for eps, and its rounding is large.
    n, dtype = case.one_of(2, 1, 3), case.one_of(torch.float64, torch.float64, torch.float32)
    shape = case.plane(n, smallest=3)
    x = 3 * case.tensor(shape, *KINDS, dtype=dtype) + case.one_of(0, 7)
    parameters = affine(case, shape[1:2], dtype)
    own = case.flag()
    first = [case.tensor(shape[1:2], dtype=dtype), case.tensor(shape[1:2], "positive", dtype=dtype)]
    tracked = case.flag() or not own
    momentum, eps = case.one_of(0.1, 0.0, 0.7), case.one_of(1e-5, 0.1)
    used: list[list[Tensor]] = []

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        running = [r.clone() for r in first] if tracked else [None, None]
        used.append(running if tracked else [])
        arguments: dict[str, Any] = dict(zip(("weight", "bias"), parameters, strict=False))
        return getattr(F, name)(x, *running, **arguments, **mode, momentum=momentum, eps=eps)

    mode = {"training" if name == "batch_norm" else "use_input_stats": own}
    case.agrees(norm, x, *parameters, cut=case.one_of(None, [0]))
    statistics_agree(used, dtype)


@on_any_grid(9)
def test_group_norm_equals_serial(case: Case) -> None:
    n, groups = case.one_of(2, 1, 3), case.one_of(1, 2, 3)
    dtype = case.one_of(torch.float64, torch.float64, torch.float32)
    shape = case.plane(n, groups * case.draw(sizes(1, 2)), smallest=3)
    x = case.tensor(shape, *KINDS, dtype=dtype)
    eps = case.one_of(1e-5, 0.1)

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        return F.group_norm(x, groups, *parameters, eps=eps)

    case.agrees(norm, x, *affine(case, shape[1:2], dtype), cut=case.one_of(None, [0]))


@on_any_grid(14)
@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm])
def test_norms_over_the_last_dimensions_equal_serial(case: Case, function: Any) -> None:
    dtype = case.one_of(torch.float64, torch.float64, torch.float32)
    shape = [case.draw(sizes(1, 6)) for _ in range(case.draw(sizes(0, 3)))] + [case.draw(sizes(3))]
    last = shape[-case.draw(sizes(1, len(shape))) :]
    x = case.tensor(shape, *KINDS, dtype=dtype)
    eps = case.one_of(1e-5, 0.1)
    parameters = affine(case, last, dtype, 2 if function is F.layer_norm else 1)
    case.agrees(
        lambda x, *p: function(x, last, *p, eps=eps), x, *parameters, cut=case.one_of(None, [0])
    )


@on_any_grid(7)
def test_local_response_norm_equals_serial(case: Case) -> None:
    arguments = (case.draw(sizes(1, 5)), *case.one_of((1e-4, 0.75, 1.0), (0.5, 0.5, 2.0)))
    x = case.tensor(case.plane(case.one_of(2, 1, 3), case.draw(sizes(1, 7))), *KINDS, "nan")
    case.agrees(lambda x: F.local_response_norm(x, *arguments), x)
