"""Padding of partitioned tensors, in all modes: ranks exchange the elements to repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv import torch_private
from distconv.geometry.index_maps import IndexMap, Pad, Same
from distconv.geometry.layout import Shape
from distconv.ops.support.arguments import any_type, check_on_meta
from distconv.ops.support.operands import box_on_rank, constant, empty_block
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs


@implements(F.pad, torch_private.pad)
def pad(
    input: DistTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> DistTensor:
    shape = check_on_meta(F.pad, any_type(input), tuple(pad), mode, value)
    return _padded(input, shape, pad, mode, value)


@implements(torch.constant_pad_nd)
def constant_pad_nd(input: DistTensor, pad: Sequence[int], value: complex = 0) -> Tensor:
    shape = check_on_meta(torch.constant_pad_nd, input, tuple(pad), value)
    if isinstance(value, complex):
        parts: Any = (input.real, value.real), (input.imag, value.imag)
        return torch.complex(*(constant_pad_nd(x, pad, fill) for x, fill in parts))
    return _padded(input, shape, pad, "constant", value)


def _padded(
    input: DistTensor, shape: Shape, pad: Sequence[int], mode: str, value: float | None
) -> DistTensor:
    if input.dtype == torch.bool and mode in ("reflect", "replicate"):
        raise NotImplementedError(
            f"pad: mode={mode!r} is not implemented for {input.dtype}; convert it, x.int()"
        )
    amounts = [(0, 0)] * input.dim()
    for i in range(len(pad) // 2):
        amounts[input.dim() - 1 - i] = (int(pad[2 * i]), int(pad[2 * i + 1]))
    sent = any(axes and any(amount) for amount, axes in zip(amounts, input.cuts, strict=True))
    for n, amount in zip(input.shape, amounts, strict=True):
        Pad(*amount, mode).output_size(n)  # raises if too little is left to wrap around
    # Constants are written around the block during the copy, along all dimensions at once.
    around = sent and mode == "constant"
    needs: list[IndexMap] = [
        Pad(*amount, mode) if any(amount) and (axes or around) else Same()
        for amount, axes in zip(amounts, input.cuts, strict=True)
    ]
    buffer = gather_inputs(input, needs, input.cuts, "pad", value or 0.0)
    box = box_on_rank(shape, input.cuts, input.grid)
    if 0 in box.shape:
        return DistTensor(empty_block(buffer, box.shape), shape, input.cuts, input.grid)
    for d, need in enumerate(needs):
        if isinstance(need, Pad):
            outputs = input.shape[d], box.start[d], box.stop[d]
            outside = need.outside(*outputs)
            order = None if outside else need.order(*outputs)
            amounts[d] = outside if outside and mode != "constant" else (0, 0)
            if order is not None:
                buffer = buffer.index_select(d, constant(buffer.device, tuple(order)))
    if any(map(any, amounts)):
        # torch pads the number of dimensions that the caller has named, also by 0.
        named = amounts[input.dim() - len(pad) // 2 :]
        buffer = F.pad(buffer, [n for amount in reversed(named) for n in amount], mode, value)
    # Padding by 0 returns a copy, as in torch.
    shard = buffer.clone() if buffer is input.shard else buffer
    return DistTensor(shard, shape, input.cuts, input.grid)
