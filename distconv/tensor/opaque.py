"""Opaque calls: functions whose messages depend on values, which each replay calls again.

A replay of a compiled program repeats the kernels and messages of a trace, in the same shapes. But
the box of an image that a warp requests depends on the values of its positions. So a replay calls
the whole function as one step, and its backward pass as another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distconv.device.kinds import KINDS
from distconv.tensor.dispatch import called_in_replays, is_traced
from distconv.torch_private import ShardFunction


def opaque_call(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `function(*tensors)`, which replays of a compiled program call again as a whole.

    Differentiable. `function` may read values of `tensors` and communicate, but reads no other
    tensors. Its result has the same shape in all calls. Collective if `function` is.
    """
    if not is_traced():
        return function(*tensors)
    result: Tensor = _Opaque.apply(function, *tensors)
    return result


class _Opaque(ShardFunction):
    """The autograd function of an opaque call; each call records an autograd graph of its own."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        run = _RecordedCall(function, ctx.needs_input_grad[1:])
        result, *ctx.kept = called_in_replays(run, *tensors)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = iter(called_in_replays(_gradients, *gradients, *ctx.kept))
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])


class _RecordedCall:
    """A call of `function` that also returns the tensors from which the backward pass starts.

    Attributes
    ----------
    needed: for each tensor, whether its gradient is needed.
    """

    def __init__(self, function: Callable[..., Tensor], needed: Sequence[bool]) -> None:
        self._function, self.needed = function, needed
        devices = (d for d in ("cpu", *KINDS) if torch.is_autocast_enabled(d))
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in devices]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the result; if gradients are needed, also the root and leaves of its graph."""
        given, leaves = [], []
        with ExitStack() as stack, torch.set_grad_enabled(any(self.needed)):
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            for x, needed in zip(tensors, self.needed, strict=True):
                given.append(x.detach())
                if needed:
                    leaves.append(_without_memory(x).requires_grad_())
                    given[-1] = _Stand.apply(leaves[-1], x.detach())
            result = self._function(*given)
            ends = [_Stand.apply(result, _without_memory(result))] if leaves else []
        return result.detach(), *ends, *leaves


class _Stand(ShardFunction):
    """An autograd function that returns `instead`, and passes its gradient to `x` of equal shape.

    One of the two tensors is an expanded scalar, so the graph keeps no values of inputs and results
    that the function itself does not keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, instead: Tensor) -> Tensor:
        return instead.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _without_memory(x: Tensor) -> Tensor:
    return x.new_empty(()).expand(x.shape)


def _gradients(gradient: Tensor, end: Tensor, *leaves: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(end, leaves, gradient, retain_graph=True)
