"""Losses composed of supported torch functions: margins, pairs and triplets, likelihoods."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.loss import terms_of
from distconv.ops.support.operands import apply_to_batches, gather_whole


def _check_dimensions(name: str, *tensors: Tensor) -> None:
    if len({t.dim() for t in tensors}) > 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise RuntimeError(f"{name}: the shapes {shapes} differ in their number of dimensions")


@terms_of(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0
) -> Tensor:
    """Return 1 - cos for pairs with target 1, and max(0, cos - margin) for pairs with target -1.

    cos is the cosine of the angle between the vectors of a pair.
    """
    name = "cosine_embedding_loss"
    _check_dimensions(name, input1, input2)
    if target.dim() > 1 or input1.dim() != target.dim() + 1:
        raise RuntimeError(
            f"{name}: a target {tuple(target.shape)} for inputs {tuple(input1.shape)}; expected "
            "one number for each vector of the batch, or one number for a single vector"
        )
    dim = target.dim()
    squares = [(x * x).sum(dim) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(dim) / (squares[0] * squares[1]).sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0.0)
    return alike + torch.where(target == -1, (cosine - margin).clamp_min(0), 0.0)


@terms_of(F.hinge_embedding_loss)
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0) -> Tensor:
    """Return `input` where the target is 1, and max(0, margin - input) where it is -1."""
    lacking = torch.where(target != 1, (margin - input).clamp_min(0), 0.0)
    return lacking + torch.where(target != -1, input, 0.0)


@terms_of(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0
) -> Tensor:
    """Return max(0, margin - target * (input1 - input2))."""
    _check_dimensions("margin_ranking_loss", input1, input2, target)
    return (-target * (input1 - input2) + margin).clamp_min(0)


@terms_of(F.poisson_nll_loss)
def poisson_nll_loss(
    input: Tensor, target: Tensor, log_input: bool = True, full: bool = False, eps: float = 1e-8
) -> Tensor:
    """Return the negative logarithm of Poisson densities; `input` is the mean, or its logarithm."""
    if log_input:
        terms = input.exp() - target * input
    else:
        terms = input - target * (input + eps).log()
    if full:
        stirling = target * target.log() - target + 0.5 * (2 * math.pi * target).log()
        terms = terms + stirling.masked_fill(target <= 1, 0)
    return terms


@terms_of(F.soft_margin_loss)
def soft_margin_loss(input: Tensor, target: Tensor) -> Tensor:
    """Return the logistic loss, log(1 + exp(-target * input)), for classes 1 and -1."""
    return (-target * input).exp().log1p()


@terms_of(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return the mean of the logistic losses over the classes, which are the last dimension."""
    terms = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    if weight is not None:
        terms = terms * weight
    return terms.sum(-1) / input.shape[-1]


@terms_of(F.multi_margin_loss)
def multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Return the mean over classes of max(0, margin - right score + other score)^p.

    The right class contributes 0. The classes, the last dimension, are gathered on every rank.
    Collective.
    """
    options: Any = dict(p=p, margin=margin, weight=gather_whole(weight, "multi_margin_loss"))
    return _of_classes(F.multi_margin_loss, input, target, 0, **options)


@terms_of(F.multilabel_margin_loss)
def multilabel_margin_loss(input: Tensor, target: Tensor) -> Tensor:
    """Return the sum of max(0, 1 - right score + other score), divided by the number of classes.

    The sum is over pairs of a right and another class. The classes, the last dimension, are
    gathered on every rank. Collective.
    """
    return _of_classes(F.multilabel_margin_loss, input, target, 1)


def _of_classes(
    function: Callable[..., Tensor], input: Tensor, target: Tensor, inner: int, **options: Any
) -> Tensor:
    """Return the losses by `function` of `input`, (sample, class), without a reduction. Collective.

    `inner` is 0 if `target` has one label per sample, 1 if it has a vector of labels.
    """
    if not input.dim():  # a single class
        one = target.reshape((1,) * inner)
        return _of_classes(function, input.unsqueeze(0), one, inner, **options)
    if input.dim() == 1:
        # As in torch's own checks, a single sample is a batch of one. The label may be a
        # vector with one element.
        batch = input.unsqueeze(0), target.unsqueeze(0) if inner or not target.dim() else target
        return _of_classes(function, *batch, inner, **options).squeeze(0)
    terms: Tensor = apply_to_batches(
        function, function.__name__, [input, target], [1, inner], reduction="none", **options
    )
    return terms


@terms_of(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
) -> Tensor:
    """Return max(0, distance to the positive - distance to the negative + margin)."""
    name = "triplet_margin_loss"
    _check_margin(name, margin)
    _check_dimensions(name, anchor, positive, negative)
    distance = partial(F.pairwise_distance, p=p, eps=eps)
    return _triplet(anchor, positive, negative, distance, margin, swap)


@terms_of(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
) -> Tensor:
    """Return max(0, distance to the positive - distance to the negative + margin).

    `distance_function` computes the distances; by default F.pairwise_distance.
    """
    name = "triplet_margin_with_distance_loss"
    _check_margin(name, margin)
    _check_dimensions(name, anchor, positive, negative)
    distance = distance_function or F.pairwise_distance
    return _triplet(anchor, positive, negative, distance, margin, swap)


def _check_margin(name: str, margin: float) -> None:
    if margin <= 0:
        raise ValueError(f"{name}: margin={margin} is not positive; choose a number above 0")


def _triplet(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
    margin: float,
    swap: bool,
) -> Tensor:
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (margin + near - far).clamp_min(0)
