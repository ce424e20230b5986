"""Transposed convolutions whose output has no positions: what serial torch makes of them.

Its kernels disagree: some return an output without elements, some raise, by the number of samples
and the device. So does its check on the meta device, by the version.
"""

from __future__ import annotations

from torch import Tensor

from distconv.ops.conv.transposed_convolution import TransposedConvolution
from distconv.ops.support.operands import box_on_rank, empty_block
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import without_modes

_SAMPLES = 2
"""The number of samples from which kernels do alike."""


def without_outputs(
    x: DistTensor, weight: Tensor, bias: Tensor | None, spec: TransposedConvolution
) -> DistTensor:
    """Return the output without elements, or raise what serial torch raises. No communication."""
    arguments = spec.stride, spec.padding, spec.output_padding, spec.groups, spec.dilation
    few = min(x.shape[0], _SAMPLES), *x.shape[1:]
    with without_modes():
        zeros = [
            None if t is None else _block(t).new_zeros(()).expand(few if t is x else t.shape)
            for t in (x, weight, bias)
        ]
        made = spec.function(*zeros, *arguments)
    outputs = x.shape[0], *made.shape[1:]
    cuts = x.cuts[0], (), *x.cuts[2:]
    block = empty_block(_block(x), box_on_rank(outputs, cuts, x.grid).shape).to(made.dtype)
    for t in (weight, bias):
        if t is not None:  # its gradient is zero, as in serial torch, and not None
            block = block + _block(t).reshape(-1)[:0].sum().to(made.dtype)
    return DistTensor(block, outputs, cuts, x.grid)


def _block(x: Tensor) -> Tensor:
    return x.shard if isinstance(x, DistTensor) else x
