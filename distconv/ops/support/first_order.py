"""Gradients that cannot be differentiated, and say so where a program tries to."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from distconv.comm.shard_function import ShardFunction
from distconv.tensor.dispatch import UnsupportedOperation

Backward = Callable[..., Any]


def first_order(operator: str, *, linear: bool = False) -> Callable[[Backward], Backward]:
    """Let the gradients of an autograd function raise where a program differentiates them.

    torch's `once_differentiable` takes them for constants where the incoming gradient is a
    constant, although they depend on what the function has saved, too.

    Parameters
    ----------
    operator: the name of the function, for the message.
    linear: whether gradients depend on the incoming gradient alone, and are constants where it is.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                made = backward(ctx, *grads)
            if linear and not any(g is not None and g.requires_grad for g in grads):
                return made
            # Without an input that requires a gradient, autograd would not come to the refusal.
            leaves = [None if t is None else t.detach().requires_grad_() for t in made]
            return _Refusal.apply(operator, *leaves)

        return run

    return decorate


class _Refusal(ShardFunction):
    @staticmethod
    def forward(ctx: Any, operator: str, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.operator = operator
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise UnsupportedOperation(
            f"{ctx.operator}: second derivatives are not supported. Leave the layer out of what is "
            "differentiated twice, as by a gradient penalty, or compute that by the serial module, "
            "on whole tensors, x.full_tensor()"
        )
