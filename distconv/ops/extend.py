"""Decorators that let a user's functions take DistTensors: element-wise and over windows.

A Python function that only calls torch functions needs no decorator, as torch functions have rules.
A decorator is for functions that need plain tensors, such as compiled kernels and calls into other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from distconv.geometry.index_maps import Same, Window
from distconv.ops.math.pointwise import pointwise_rule
from distconv.ops.support.arguments import Sizes, to_tuple
from distconv.ops.support.operands import as_distributed, box_on_rank, common_grid, gather_whole
from distconv.ops.support.windows import make_windows
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import origins
from distconv.tensor.recording import recorded
from distconv.tensor.redistribution import gather_inputs

Function = Callable[..., Tensor]


def elementwise(function: Function) -> Function:
    """Let an element-wise function take DistTensors.

    On DistTensors the function is called with this rank's blocks, contiguous. Operands are
    broadcast against each other as in torch; plain tensors among them have the global shape. On
    plain tensors alone the function is called unchanged. Collective. Nothing is sent, unless
    operands have different layouts. A rank on which the function returns a block of another shape
    raises `ValueError`.

    Parameters
    ----------
    function: takes tensors and other values, writes to none of them, and returns one tensor of the
        broadcast shape.

    Examples
    --------
    >>> scaled = dc.elementwise(lambda x, factor: x * factor)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 4, 4), dc.ProcessGrid(height=2))
    >>> scaled(x, torch.tensor(3.0)).sum().item()
    48.0
    """
    rule = pointwise_rule(_on_contiguous(function))

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Tensor:
        operands = (*args, *kwargs.values())
        if not any(isinstance(x, DistTensor) for x in operands):
            return function(*args, **kwargs)
        args, kwargs = recorded(function, (args, kwargs))
        result: DistTensor = rule(*args, **kwargs)
        _check_shape(function, result.shard, result.box.shape)
        return result

    return either


def _on_contiguous(function: Function) -> Function:
    """Return a function that calls `function` with contiguous tensors, as compiled kernels expect.

    Raises UnsupportedOperation if the result depends on a tensor whose gradient would be lost.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        blocks = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
        named = {k: x.contiguous() if isinstance(x, Tensor) else x for k, x in kwargs.items()}
        result = function(*blocks, **named)
        _check_closed(function, result, blocks, named)
        return result

    return call


def _check_closed(function: Function, result: Tensor, *arguments: Any) -> None:
    """Raise UnsupportedOperation if a function's result depends on leaves besides its arguments.

    The gradient of such a leaf would be this rank's part only. Parameters of parallelized modules
    are allowed, as their gradients are summed over the ranks. All ranks raise together.
    """
    if not (isinstance(result, Tensor) and result.requires_grad):
        return
    given = {get_gradient_edge(x).node for x in tensors_in(arguments) if x.requires_grad}
    found = origins([get_gradient_edge(result).node], beyond=given)
    if "free" in found or "out" in found:
        refuse(
            _name(function),
            "the result depends on a tensor that requires gradients but is neither an argument "
            "nor a parameter of a parallelized module, so its gradient would not be summed over "
            "the ranks",
            way_out="Pass it as an argument",
        )


def windowed(
    *,
    kernel: Sizes,
    stride: Sizes = 1,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    fill: float = 0.0,
    channels: int | None = None,
) -> Callable[[Function], Function]:
    """Let a function of sliding windows take DistTensors; halos are received from other ranks.

    The decorated function gets its first argument, (sample, channel, *spatial), contiguous and
    padded. It returns one output for every window that lies within this argument, as a convolution
    without padding does. On plain tensors it is called in the same way. Autograd computes its
    gradients. Further tensors are gathered on every rank. Collective. A result of another shape, or
    windows that do not fit the plane, raise `ValueError` on every rank.

    Parameters
    ----------
    kernel, stride, dilation, padding: integers, one for all spatial dimensions or one for each; the
        padding is attached on both sides.
    fill: the value of the padding.
    channels: the number of channels that the function returns, if it mixes channels; None if
        it treats every channel alone.

    Examples
    --------
    >>> @dc.windowed(kernel=3, padding=1, fill=0.0)
    ... def largest(x):
    ...     return x.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).amax(-1)
    >>> x = dc.distribute_tensor(torch.arange(16.0).reshape(1, 1, 4, 4), dc.ProcessGrid(height=2))
    >>> largest(x).full_tensor()[0, 0, 0]
    tensor([5., 6., 7., 7.])
    """

    def decorate(function: Function) -> Function:
        name = _name(function)

        @wraps(function)
        def either(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            windows = _windows(name, input, kernel, stride, dilation, padding)
            made = input.shape[1] if channels is None else channels
            sizes = zip(windows, input.shape[2:], strict=True)
            shape = (input.shape[0], made, *(w.output_size(n) for w, n in sizes))
            tensors = tensors_in(input, args, kwargs)
            if not any(isinstance(x, DistTensor) for x in tensors):
                sides = [side for w in reversed(windows) for side in w.padding]
                result = function(F.pad(input, sides, value=fill), *args, **kwargs)
                _check_shape(function, result, shape)
                return result
            input, args, kwargs = recorded(function, (input, args, kwargs))
            x = as_distributed(input, common_grid(name, tensors))
            cuts = (x.cuts[0], x.cuts[1] if channels is None else (), *x.cuts[2:])
            block = box_on_rank(shape, cuts, x.grid).shape
            buffer = gather_inputs(x, (Same(), Same(), *windows), cuts, name, fill)
            args = tuple(gather_whole(a, name) for a in args)
            kwargs = {key: gather_whole(a, name) for key, a in kwargs.items()}
            if prod(block):
                # A function may write to its argument, which on plain tensors is a padded copy.
                inputs = buffer.contiguous()
                inputs = inputs.clone() if inputs is x.shard else inputs
                result = function(inputs, *args, **kwargs)
                _check_shape(function, result, block)
                _check_closed(function, result, inputs, args, kwargs)
            else:
                # The result for a single window has the type and the graph of other ranks' results.
                window = (1, max(buffer.shape[1], 1), *(w.extent for w in windows))
                zeros = torch.cat([buffer.reshape(-1)[:0], buffer.new_zeros(prod(window))])
                inputs = zeros.reshape(window)
                result = function(inputs, *args, **kwargs)
                _check_closed(function, result, inputs, args, kwargs)
                result = result.reshape(-1)[:0].reshape(block)
            return DistTensor(result, shape, cuts, x.grid)

        return either

    return decorate


def _windows(
    name: str, input: Tensor, kernel: Sizes, stride: Sizes, dilation: Sizes, padding: Sizes
) -> tuple[Window, ...]:
    n = input.dim() - 2
    if n < 1:
        raise ValueError(
            f"{name}: the input {tuple(input.shape)} has no spatial dimensions; pass "
            "(sample, channel, *spatial)"
        )
    for what, given, least in (
        ("kernel", kernel, 1),
        ("stride", stride, 1),
        ("dilation", dilation, 1),
        ("padding", padding, 0),
    ):
        if min(to_tuple(given, n, what)) < least:
            raise ValueError(f"{name}: {what}={given} is too small; choose {least} or more")
    windows = make_windows(kernel, stride, padding, dilation, False, n)
    if any(w.output_size(m) < 1 for w, m in zip(windows, input.shape[2:], strict=True)):
        raise ValueError(
            f"{name}: no window of kernel={kernel}, dilation={dilation}, padding={padding} fits "
            f"into the plane {tuple(input.shape[2:])}"
        )
    return windows


def _check_shape(function: Function, result: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(result.shape) != tuple(expected):
        raise ValueError(
            f"{_name(function)}: returned {tuple(result.shape)} but its rule expects "
            f"{tuple(expected)}"
        )


def _name(function: Function) -> str:
    return getattr(function, "__name__", repr(function))
