"""Faster calls of torch's dispatcher: the functions in `torch` that call functions in `torch.ops`.

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
    """An exception that ends a call at the dispatcher; it has the function and arguments there."""


class _Stop(DispatchMode):
    """A context that ends the first call that reaches the dispatcher, by an exception."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(func, args, kwargs or {})


def bound(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the function in `torch`, or method of tensors, that calls `function` of `torch.ops`.

    Each candidate is called with the arguments, up to the dispatcher. If no candidate reaches the
    dispatcher with the same function and arguments, `function` is returned.
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
        except Exception:  # of torch's parser, which takes other arguments
            continue
    return function


def _without_gradient(x: Any) -> Any:
    # Whether a tensor of no dimension is taken for a number depends on its gradient.
    return x.detach() if isinstance(x, Tensor) else x


def _are_same(x: Any, y: Any) -> bool:
    """Return whether nested arguments are equal in type and value, and their tensors identical."""
    if isinstance(x, (tuple, list)):
        return isinstance(y, (tuple, list)) and len(x) == len(y) and all(map(_are_same, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_are_same(x[key], y[key]) for key in x)
    return x is y or (type(x) is type(y) and not isinstance(x, Tensor) and x == y)
