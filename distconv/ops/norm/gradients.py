"""Gradients of norms that can be differentiated again."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.grid.interface import Grid
from distconv.ops.norm.form import Form
from distconv.ops.support.operands import in_type, to_accumulation_type


def recorded_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    form: Form,
    grid: Grid,
    group: tuple[str, ...],
    count: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, recorded for differentiation to any order.

    Collective. `dy` is the gradient of the norm of the block `x`, whose statistics are over all
    ranks along `group`, of `count` elements each.
    """
    groups, channels = form.groups, x.shape[1] // max(form.groups, 1)
    shape = x.shape[0], groups, channels, prod(x.shape[2:])
    over = (2, 3) if form.of_each_sample else (0, 2, 3)
    of_weight = (0, 1, 2) if form.weighs_elements else (0, 3)
    dy, deviation = (to_accumulation_type(t).reshape(shape) for t in (dy, x))

    def mean(t: Tensor) -> Tensor:
        return all_reduce_with_grad(t.sum(over, keepdim=True), grid, group) / count

    if form.centered:
        deviation = deviation - mean(deviation)
    scale = torch.rsqrt(mean(deviation.square()) + eps)
    standard = deviation * scale
    dweight, dbias = (dy * standard).sum(of_weight), dy.sum(of_weight)
    if weight is not None:
        own = (1, 1, 1, -1) if form.weighs_elements else (1, groups, channels, 1)
        dy = dy * in_type(weight, dy.dtype).reshape(own)
    dx = dy - standard * mean(dy * standard)
    if form.centered:
        dx = dx - mean(dy)
    return in_type((dx * scale).view(x.shape), x.dtype), dweight, dbias
