"""The best plain torch: the bound of a rank's work, in whatever form of it is fastest.

A user of plain torch can choose the memory format of a module and its input and, on CPUs, the
kernels of volumes: torch convolves small volumes by a matrix of all windows, where oneDNN takes a
fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

DEFAULT = "torch by default"
CHANNELS_LAST = "channels last"
ONEDNN = "oneDNN's volumes"

_forward: Any = torch.ops.aten.mkldnn_convolution
_backward: Any = torch.ops.aten.convolution_backward


def plain_forms(
    make: Callable[[], nn.Module],
    tensors: Sequence[Tensor],
    step_of: Callable[..., Callable[[], None]],
) -> dict[str, Callable[[], None]]:
    """Return a step of a plain module in each form, by the form's name; the default comes first.

    Parameters
    ----------
    make: makes the module; each form has its own.
    tensors: the input and a target or gradient, of which each form has its own copies.
    step_of: makes a step from a module and such tensors.
    """
    ndim = tensors[0].dim()

    def by_default() -> list[Tensor]:
        return [t.clone(memory_format=torch.contiguous_format) for t in tensors]

    steps = {DEFAULT: step_of(make(), *by_default())}
    if ndim in (4, 5):
        form: Any = torch.channels_last if ndim == 4 else torch.channels_last_3d
        last = [t.clone(memory_format=form) if t.dim() == ndim else t.clone() for t in tensors]
        module: Any = make()
        steps[CHANNELS_LAST] = step_of(module.to(memory_format=form), *last)
    if ndim == 5 and tensors[0].device.type == "cpu" and torch.backends.mkldnn.is_available():
        steps[ONEDNN] = step_of(with_onednn(make()), *by_default())
    return steps


def best(times: Sequence[list[float]]) -> list[float]:
    """Return the times of the form that is fastest by its median."""
    return min(times, key=median)


def with_onednn(module: nn.Module) -> nn.Module:
    """Let oneDNN convolve the volumes of a plain module on the CPU; it is returned."""
    for part in module.modules():
        if isinstance(part, nn.Conv3d) and part.groups == 1:
            part._conv_forward = _convolution_of(part)  # type: ignore[method-assign]
    return module


def _convolution_of(part: nn.Conv3d) -> Callable[..., Tensor]:
    arguments = part.stride, part.padding, part.dilation

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _OneDnn.apply(x, weight, bias, *arguments)
        return y

    return convolve


class _OneDnn(Function):
    """A convolution of volumes by oneDNN; torch takes its gradients for tensors in its layout."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
    ) -> Tensor:
        stride, padding, dilation = arguments
        ctx.save_for_backward(x, weight)
        ctx.arguments = stride, padding, dilation, None if bias is None else bias.shape
        y: Tensor = _forward(x, weight, bias, padding, stride, dilation, 1)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, bias = ctx.arguments
        dy, mask = grads[0].contiguous().to_mkldnn(), ctx.needs_input_grad[:3]
        rest = stride, padding, dilation, False, [0, 0, 0], 1, mask
        dx, dw, db = _backward(dy, x.to_mkldnn(), weight, bias, *rest)
        return None if dx is None else dx.to_dense(), dw, db, None, None, None
