"""Losses equal the serial ones for all their arguments, on any grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.support.strategies import Case, on_any_grid, shapes, sizes

pytestmark = pytest.mark.gpu

REDUCTIONS = ("mean", "none", "sum")
DTYPES = (torch.float64, torch.float64, torch.float32)


def some_broadcast(case: Case, shape: list[int]) -> list[int]:
    """Draw `shape`, or now and then one that is broadcast to it."""
    return shape if case.draw(st.integers(0, 3)) else [case.one_of(1, n) for n in shape[1:]]


@on_any_grid(14)
def test_regression_losses_equal_serial(case: Case) -> None:
    functions: list[tuple[Any, dict[str, float]]] = [
        (F.mse_loss, {}),
        (F.l1_loss, {}),
        (F.huber_loss, {"delta": case.one_of(1.0, 0.3)}),
        (F.smooth_l1_loss, {"beta": case.one_of(1.0, 0.3, 0.0)}),
    ]
    function, arguments = case.one_of(*functions)
    arguments = {**arguments, "reduction": case.one_of(*REDUCTIONS)}
    shape, dtype = case.draw(shapes(0)), case.one_of(*DTYPES)
    tensors = [
        case.tensor(some_broadcast(case, shape), "normal", "ties", "infinite", dtype=dtype),
        case.tensor(some_broadcast(case, shape), "normal", "ties", dtype=dtype),
    ]
    if function is not F.smooth_l1_loss and tensors[0].shape == tensors[1].shape and case.flag():
        tensors.append(case.tensor(shape, "positive", dtype=dtype))

    def loss(x: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
        return function(x, y, **arguments, **({} if w is None else {"weight": w}))

    # A weighted mean hardly depends on the weights where the terms are equal.
    case.agrees(loss, *tensors, frozen=[2] if arguments["reduction"] == "mean" else [])


@on_any_grid(9)
@pytest.mark.parametrize("logits", [True, False])
def test_binary_cross_entropies_equal_serial(case: Case, logits: bool) -> None:
    shape, reduction = case.draw(shapes(1)), case.one_of(*REDUCTIONS)
    x, y = case.tensor(shape), case.tensor(shape).sigmoid()
    names = case.some(["weight", "pos_weight"] if logits else ["weight"])
    weights = [
        case.tensor([case.one_of(n, 1) for n in shape[case.one_of(0, 1) :]], "positive")
        for _ in names
    ]
    function = F.binary_cross_entropy_with_logits if logits else F.binary_cross_entropy

    def loss(x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        return function(x, y, **dict(zip(names, weights, strict=True)), reduction=reduction)

    case.agrees(loss, x if logits else x.sigmoid(), y, *weights, frozen=range(2, 4))


@on_any_grid(11)
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_classification_by_class_index_equals_serial(case: Case, function: Any) -> None:
    classes, sample = case.draw(sizes(1, 6)), case.draw(st.integers(0, 4))
    spatial = [case.draw(sizes(1, 6)) for _ in range(case.one_of(0, 1, 2, 3))]
    shape = [case.draw(sizes(1, 5)), classes, *spatial] if sample else [classes]
    options: dict[str, Any] = {"reduction": case.one_of(*REDUCTIONS)}
    options["ignore_index"] = case.one_of(-100, 0, -1, classes)
    if function is F.cross_entropy:
        options["label_smoothing"] = case.one_of(0.0, 0.2)
    sizes_of_target = shape[:1] + shape[2:] if sample else []
    target = case.tensor(sizes_of_target, dtype=torch.int64).abs() % classes
    if case.flag():
        ignored = case.tensor(sizes_of_target) > case.one_of(0, -9)
        target = torch.where(ignored, options["ignore_index"], target)
    weights = [case.tensor([classes], "positive")] if case.flag() else []
    case.agrees(
        lambda x, y, w=None: function(x, y, w, **options),
        case.tensor(shape, "normal", "ties"),
        target,
        *weights,
        frozen=[2],
    )


@on_any_grid(7)
def test_cross_entropy_with_probabilities_equals_serial(case: Case) -> None:
    shape = case.draw(shapes(2, 5, 5))
    options = {"reduction": case.one_of(*REDUCTIONS), "label_smoothing": case.one_of(0.0, 0.1)}
    tensors = [case.tensor(shape), case.tensor(shape).softmax(1)]
    if case.flag():
        tensors.append(case.tensor(shape[1:2], "positive"))
    case.agrees(lambda x, y, w=None: F.cross_entropy(x, y, w, **options), *tensors, frozen=[2])


@on_any_grid(7)
def test_the_divergence_of_kullback_and_leibler_equals_serial(case: Case) -> None:
    shape, logs = case.draw(shapes(1)), case.flag()
    x, y = case.tensor(shape), case.tensor(some_broadcast(case, shape))
    reduction = case.one_of(*REDUCTIONS, "batchmean")
    y = y if logs else y.sigmoid()
    case.agrees(lambda x, y: F.kl_div(x, y, reduction=reduction, log_target=logs), x, y)


@on_any_grid(7)
def test_the_gaussian_likelihood_equals_serial(case: Case) -> None:
    shape, full = case.draw(shapes(1)), case.flag()
    reduction, eps = case.one_of(*REDUCTIONS), case.one_of(1e-6, 0.5)
    kept = case.one_of(shape, shape[:-1], [*shape[:-1], 1])
    case.agrees(
        lambda x, y, v: F.gaussian_nll_loss(x, y, v, full, eps, reduction),
        case.tensor(shape),
        case.tensor(shape),
        case.tensor(kept, "positive"),
    )
