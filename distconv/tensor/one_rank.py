"""A shortcut for grids of one rank: torch functions are called on the blocks, without rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.tensor.base import DistTensorBase
from distconv.tensor.dispatch import Rule
from distconv.tensor.ownership import OWNED
from distconv.tensor.recording import node_of_wrapper
from distconv.torch_private import without_torch_function

SERIAL: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For some rules, the function that a grid of one rank calls on the blocks instead of the rule."""


def serial_by(function: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Decorate a rule, so that a grid of one rank calls `function` on blocks instead of the rule.

    `function` takes the arguments of the rule, and returns a new tensor or one of its arguments. It
    returns `NotImplemented` for arguments that the rule must handle.
    """

    def register(rule: Rule) -> Rule:
        SERIAL[rule] = function
        return rule

    return register


def call_serial(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call `function`, registered in `SERIAL`, on the blocks of arguments; distribute its result.

    `args[0]` is a DistTensor on a grid of one rank. Returns `NotImplemented` for a dry run, for
    `out=`, for tensors without a block, and for arguments that `check_recorded` must check.
    """
    if "out" in kwargs:
        return NotImplemented
    first, grid, blocks = args[0], args[0].grid, []
    for x in (*args, *kwargs.values()):
        if isinstance(x, DistTensorBase):
            block = x.__dict__.get("shard")
            if block is None or block.is_meta or x.grid is not grid:
                return NotImplemented
            with without_torch_function():
                if node_of_wrapper(x) is not None:
                    return NotImplemented
            blocks.append(block)
            continue
        if isinstance(x, Tensor) and (
            (x.requires_grad and OWNED not in x.__dict__) or x.layout is not torch.strided
        ):
            return NotImplemented
        blocks.append(x)
    count = len(args)
    named = dict(zip(kwargs, blocks[count:], strict=True)) if kwargs else {}
    result = function(*blocks[:count], **named)
    if result is blocks[0]:
        return first
    if not isinstance(result, Tensor) or isinstance(result, DistTensorBase):
        return result
    return type(first)(result, result.shape, ((),) * result.dim(), grid)
