"""Convolutions by kernels that are chosen here and not by torch, recorded by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.comm.shard_function import ShardFunction
from distconv.ops.windowed.overlapped import OperandGradients

torch_gradients: Any = torch.ops.aten.convolution_backward
"""torch's function for the gradients of a convolution of any dimensions."""


class Kernels(NamedTuple):
    """A convolution and its gradients, with the arguments of `torch.convolution` and of
    `torch_gradients`; gradients can be differentiated where that is recorded."""

    convolution: Callable[..., Tensor]
    gradients: Callable[..., OperandGradients]


def recorded_convolution(
    kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
) -> Tensor:
    """Return a convolution of any dimensions, recorded for gradients of any order.

    Parameters
    ----------
    arguments: stride, padding, dilation, transposed, output padding and groups.
    """
    y: Tensor = _Convolution.apply(x, weight, bias, kernels, arguments)
    return y


class _Convolution(ShardFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernels: Kernels,
        arguments: tuple[Any, ...],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.context = kernels, arguments, None if bias is None else bias.shape
        return kernels.convolution(x, weight, bias, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        kernels, arguments, bias = ctx.context
        mask = ctx.needs_input_grad[:3]
        return *kernels.gradients(grads[0], x, weight, bias, *arguments, mask), None, None
