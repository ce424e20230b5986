"""Memory formats in which torch computes fast on blocks, some of which have channels last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm.packing import has_channels_last


def in_one_format(blocks: Sequence[Any]) -> Sequence[Any]:
    """Return the operands of an element-wise function, all with channels last if any has it.

    With operands in two formats torch was measured to take ten times as long, and the result would
    have the format of the first operand.
    """
    planes = [x if isinstance(x, Tensor) and x.dim() == 4 else None for x in blocks]
    whole = [x for x in planes if x is not None]
    if len({x.stride() for x in whole}) < 2 or not any(map(has_channels_last, whole)):
        return blocks
    return [
        x if p is None or not p.is_contiguous() else p.contiguous(memory_format=torch.channels_last)
        for x, p in zip(blocks, planes, strict=True)
    ]


def reduce_in_order_of_memory(
    function: Callable[..., Tensor], x: Tensor, over: Sequence[int], **options: Any
) -> Tensor:
    """Return `function(x, over, keepdim=True, **options)`, a reduction over dimensions `over`.

    A tensor with channels last is reduced with its dimensions in the order of memory. Otherwise
    torch was measured to take up to fifty times as long for some of a plane's dimensions.
    """
    if not has_channels_last(x):
        return function(x, over, keepdim=True, **options)
    places = [x.dim() - 1 if d == 1 else d - (d > 1) for d in over]
    return function(x.movedim(1, -1), places, keepdim=True, **options).movedim(-1, 1)


def in_order_of_memory(blocks: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the operands of an element-wise loss, with dimensions in the order of memory.

    If the first operand has channels last, channels become the last dimension of all operands.
    torch's losses return gradients in the default memory format; with channels as the last
    dimension these lie in memory as the operands do.
    """
    first = blocks[0]
    if first is None or not has_channels_last(first):
        return blocks
    if any(x is not None and x.dim() != first.dim() for x in blocks):
        return blocks
    return [None if x is None else x.movedim(1, -1).contiguous() for x in blocks]
