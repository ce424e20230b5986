"""Parts of a step that can be left out, to measure what they take. The numbers are wrong then.

The context managers can be entered again and again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor, nn

from distconv.geometry.halo.slabs import Boundary
from distconv.ops.conv import spatial
from distconv.ops.conv.local_convolution import LocalConvolution
from distconv.ops.conv.overlapped import overlapped_convolution
from distconv.ops.norm import batch_norm
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import own


def statistics_of_all_ranks() -> AbstractContextManager[object]:
    """Let batch norm take the statistics of a rank's block alone, by torch's own function.

    Where channels are cut it stays as it is.
    """
    over = batch_norm.batch_norm_over

    def of_the_block(
        axes: tuple[str, ...] | None,
        x: DistTensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> DistTensor:
        channelwise = running_mean, running_var, weight, bias
        if x.cuts[1]:
            return over(axes, x, *channelwise, training, momentum, eps)
        block = F.batch_norm(x.shard, *channelwise, training, momentum, eps)
        return DistTensor(block, x.shape, x.cuts, x.grid)

    return patch.object(batch_norm, "batch_norm_over", of_the_block)


def boundaries() -> AbstractContextManager[object]:
    """Let overlapped convolutions take the block for the whole: nothing is packed, sent or added.

    Those that assemble their inputs stay as they are.
    """
    known: dict[int, tuple[Boundary, Boundary]] = {}

    def of_the_block(
        x: DistTensor,
        weight: Tensor,
        bias: Tensor | None,
        local: LocalConvolution,
        edge: Boundary,
        operator: str,
    ) -> Tensor:
        if id(edge) not in known:
            plan = replace(edge.plan, sends=(), receives=())
            known[id(edge)] = edge, replace(edge, plan=plan, slabs=())
        return overlapped_convolution(x, weight, bias, local, known[id(edge)][1], operator)

    return patch.object(spatial, "overlapped_convolution", of_the_block)


def sums_of_gradients(module: nn.Module, ranks: int) -> nn.Module:
    """Let a module that is not parallelized run on distributed tensors; it is returned.

    Its parameters get this rank's parts of their gradients.
    """
    own((*module.parameters(), *module.buffers()), ranks)
    return module
