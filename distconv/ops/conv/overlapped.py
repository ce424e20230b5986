"""Convolutions that overlap the halo exchange with computation, and copy no activation.

Forward, the local operator runs on the rank's own block, with zeros in place of the halos. When the
halos have arrived, their contributions are added to the outputs, one side of the block after the
other (`make_boundary`). Backward, the gradients of the halos are computed and sent first; the
gradients of the block are computed during that exchange. The weight gradient is the sum of the
contributions of block and sides. Only the input, the weight and the halos are saved for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from distconv.comm.packing import filled
from distconv.comm.transfer import Transfer, accumulate, gather
from distconv.geometry.halo import Boundary, HaloSlab
from distconv.ops.conv.local_convolution import LocalConvolution, crop_outputs
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import one_channel_in_sample_format
from distconv.tensor.redistribution import record_gather
from distconv.torch_private import ShardFunction


def overlapped_convolution(
    x: DistTensor,
    weight: Tensor,
    bias: Tensor | None,
    local: LocalConvolution,
    edge: Boundary,
    operator: str,
) -> Tensor:
    """Return this rank's block of the convolution of `x`, computed during the halo exchange.

    Collective.

    Parameters
    ----------
    weight, bias: this rank's blocks.
    local: the local convolution.
    edge: the plan of the exchange, and the halo slabs along the sides of this rank's block.
    operator: the layer's name, under which the exchange is recorded.
    """
    record_gather(x, edge.plan, x.cuts, operator)
    transfer = Transfer(edge.plan, x.grid)
    block = x.shard
    if block.shape[1] == 1:
        block = one_channel_in_sample_format(block, x.shape, x.cuts, x.grid)
    made: Tensor = _OverlappedConvolution.apply(block, weight, bias, local, edge, transfer)
    return crop_outputs(made, edge.crop)


def slab_inputs(slab: HaloSlab, halos: Sequence[Tensor]) -> Tensor:
    """Return the input tensor of the halo slab `slab`, assembled from received messages.

    `halos` has the messages, in the order of the exchange's plan. Elements that no message contains
    are zero. If one message is the complete input, the message itself is returned.
    """
    if slab.whole is not None:
        inputs: Tensor = slab.whole.of(halos)
        return inputs
    parts, x = [part.of(halos)[part.box] for part in slab.halo], halos[0]
    if slab.pieces is not None:
        d, pieces = slab.pieces
        joined = [
            parts[p] if isinstance(p, int) else filled(x.device, p, 0.0, x.dtype) for p in pieces
        ]
        return torch.cat(joined, d)
    inputs = x.new_zeros(slab.piece.shape)
    for part, values in zip(slab.halo, parts, strict=True):
        inputs[part.place] = values
    return inputs


class _OverlappedConvolution(ShardFunction):
    """Compute a convolution, and its gradients, during the halo exchange of `transfer`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        local: LocalConvolution,
        edge: Boundary,
        transfer: Transfer,
    ) -> Tensor:
        arriving = transfer.start_forward(x)
        made = local.forward(edge.own, x, weight, bias)
        halos = arriving.wait()
        y = crop_outputs(made, edge.crop)
        for slab in edge.slabs:
            inputs, taps = slab_inputs(slab, halos), weight[slab.taps]
            y[slab.outputs].add_(local.forward(slab.piece, inputs, taps, None))
        ctx.save_for_backward(x, weight, *halos)
        ctx.context = local, edge, transfer, None if bias is None else bias.shape
        # Not `y`: callers cannot change a view that an autograd function returns in place.
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *halos = ctx.saved_tensors
        local, edge, transfer, bias_shape = ctx.context
        plan, (dmade,) = edge.plan, grads
        dy = crop_outputs(dmade, edge.crop)
        of_input, of_weight, _ = mask = ctx.needs_input_grad[:3]
        if is_grad_enabled():
            inputs = gather(x, plan, transfer.grid)
            dx, dw, db = local.backward(edge.buffer, dy, inputs, weight, bias_shape, mask)
            if of_input:
                dx = accumulate(dx, plan, transfer.grid)
            return dx, dw, db, None, None, None

        # Gradients of halos first: their exchange overlaps with the remaining computation.
        leaving = {i: dy.new_zeros(shape) for i, shape in edge.composed} if of_input else {}
        of_taps = []
        for slab in edge.slabs:
            inputs, taps = slab_inputs(slab, halos), weight[slab.taps]
            of_slab = (of_input, of_weight, False)
            dhalo, dtaps, _ = local.backward(
                slab.piece, dy[slab.outputs], inputs, taps, None, of_slab
            )
            if of_weight:
                of_taps.append((slab.taps, dtaps))
            for part in slab.halo if of_input else ():
                if part.fills:
                    leaving[part.message] = dhalo[part.place]
                else:
                    part.of(leaving)[part.box].add_(dhalo[part.place])
        if of_input:
            arriving = transfer.start_backward([leaving[i] for i in range(len(plan.receives))], dy)
        dx, dw, db = local.backward(edge.own, dmade, x, weight, bias_shape, mask)
        for taps, dtaps in of_taps:
            dw[taps].add_(dtaps)
        if of_input:
            arriving.wait_and_add_to(dx)
        return dx, dw, db, None, None, None
