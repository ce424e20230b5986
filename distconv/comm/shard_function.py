"""Autograd functions on shards, applied without what torch does for functions of any program."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Backward = Callable[..., Any]


class ShardFunction(Function):
    """A function of autograd that is applied to shards, which torch.func never transforms.

    `Function.apply` looks through the arguments for wrappers of torch.func each time, in Python.
    """

    apply = vars(torch._C._FunctionBase)["apply"]


def first_order(backward: Backward) -> Backward:
    """Raise where the gradients of `backward` are differentiated, as `once_differentiable` does.

    `once_differentiable` changes modes of torch in each call; this one does where gradients are
    recorded.
    """
    refusing = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run
