"""Opaque calls: what they send depends on values, so a replayed program makes them anew each time.

A replay repeats the kernels and messages of a trace, in the same shapes. Which box of an image a
warp asks for is known only when its positions are. The replay calls its function as one step, and
so the backward pass through what the function has computed.
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
    """Return `function(*tensors)`, of one shape in all calls; replays of a trace call it again.

    Differentiable. `function` may read values, and communicate. It reads no other tensors.
    """
    if not is_traced():
        return function(*tensors)
    result: Tensor = _Opaque.apply(function, *tensors)
    return result


class _Opaque(ShardFunction):
    """A function with the autograd graph that each of its calls records."""

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
    """A call of `function` that returns its result, and what the backward pass needs.

    Attributes
    ----------
    needed: for each tensor, whether its gradient is needed.
    """

    def __init__(self, function: Callable[..., Tensor], needed: Sequence[bool]) -> None:
        self._function, self.needed = function, needed
        devices = (d for d in ("cpu", *KINDS) if torch.is_autocast_enabled(d))
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in devices]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the result; if gradients are needed, also the end and leaves of its graph."""
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
    """A tensor in place of another of the same shape, which gets its gradient.

    So the values of inputs and results are not kept where the function does not keep them.
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
