"""torch's Python functions in place of functions of its dispatcher.

On small tensors `torch.mul(x, y)` takes half of the time of `torch.ops.aten.mul.Tensor(x, y)`, and
`torch.convolution` two fifths: functions of `torch.ops` compare their arguments with a schema.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from distconv.torch_private import DispatchMode


class _Reached(Exception):  # noqa: N818
    """Ends a call at the dispatcher; its arguments are the dispatcher's function, and its own."""


class _Stop(DispatchMode):
    """Ends the first call that reaches the dispatcher within the context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(func, args, kwargs or {})


def bound(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the function in `torch`, or the method of tensors, that makes a call of `function`.

    The call with these arguments is tried, up to the dispatcher. Where torch has nothing that
    reaches the dispatcher with the same function and arguments, `function` is returned.
    """
    given, options = map_aggregate((args, kwargs), _without_gradient)
    name = function.overloadpacket.__name__
    for found in (getattr(torch, name, None), getattr(Tensor, name, None)):
        if not isinstance(found, (BuiltinFunctionType, MethodDescriptorType)):
            continue
        try:
            with _Stop():
                found(*given, **options)
        except _Reached as reached:
            if _are_same(reached.args, (function, given, options)):
                return found
        except (TypeError, RuntimeError):
            continue
    return function


def _without_gradient(x: Any) -> Any:
    # Whether a tensor of no dimension is taken for a number depends on its gradient.
    return x.detach() if isinstance(x, Tensor) else x


def _are_same(x: Any, y: Any) -> bool:
    """Return whether arguments are equal in type and value, and tensors are the same."""
    if isinstance(x, (tuple, list)):
        return isinstance(y, (tuple, list)) and len(x) == len(y) and all(map(_are_same, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_are_same(x[key], y[key]) for key in x)
    return x is y or (type(x) is type(y) and not isinstance(x, Tensor) and x == y)
