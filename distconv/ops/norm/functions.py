"""Rules of torch's batch, instance, group, layer and root-mean-square norm for DistTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.packing import has_channels_last
from distconv.device.kinds import is_accelerator, thresholds
from distconv.geometry.layout import cutting_axes, rank_box
from distconv.ops.norm.normalize import check_parameter_types, normalize
from distconv.ops.norm.statistics import (
    Form,
    Norm,
    RunningStatistics,
    element_counts_of_peers,
    with_batch_stride,
)
from distconv.ops.support.arguments import any_type, check_on_meta
from distconv.ops.support.dimensions import works_on_channels, works_on_last
from distconv.ops.support.operands import (
    Placement,
    accumulation_type,
    as_distributed,
    common_grid,
    distributed_input,
    filled_block,
    gather_whole,
    local_operand,
    to_accumulation_type,
    uncut,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.one_rank import serial_by
from distconv.tensor.redistribution import redistribute
from distconv.torch_private import without_modes

# Batch normalisation with statistics over the global mini-batch, or over groups of ranks.


SPATIAL = ("depth", "height", "width")
Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""The shape and the type of a tensor."""


def batch_norm_over(
    axes: tuple[str, ...] | None,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DistTensor:
    """Return the batch norm of `input`, by statistics over the ranks along the grid axes `axes`.

    Collective. If `axes` is None, statistics are over the global mini-batch. Otherwise each group
    of ranks along `axes` has its own statistics. Running statistics are updated with the mean over
    the groups, and so stay equal on all ranks. The other arguments are those of
    `torch.nn.functional.batch_norm`.
    """
    channelwise = running_mean, running_var, weight, bias
    x = distributed_input("batch_norm", input, *channelwise)
    grid = x.grid
    kinds = tuple([None if t is None else (t.shape, t.dtype) for t in channelwise])
    training, norm, rest, groups = _decide(
        Placement.of(x), axes, grid.device, training, momentum is None, eps, kinds
    )
    publish: Callable[[], None] | None = None
    if any(x.cuts[1:2]) or any([isinstance(t, DistTensor) for t in channelwise]):
        running = running_mean, running_var
        running_mean, running_var, weight, bias = (
            own_channels(t, x, "batch_norm") for t in channelwise
        )
        if running_mean is not None and running_var is not None:
            # The backward pass needs the values before the update.
            own = running_mean, running_var = running_mean.clone(), running_var.clone()
            publish = partial(gather_running_statistics, x, running, own, "batch_norm")
    block = x.shard
    alone = not (norm.group or rest)
    if not training or (alone and _suits_torch(_mean_size(x), grid.computes_on_gpu)):
        options = training, momentum
        parameters = running_mean, running_var, weight, bias
        if block.numel() or not x.numel():
            shard = F.batch_norm(with_batch_stride(block), *parameters, *options, eps)
        else:
            shard = _of_no_elements(F.batch_norm, block, *parameters, *options)
        if training and publish is not None:
            publish()
        return DistTensor(shard, x.shape, x.cuts, grid)

    tracked = None
    if running_mean is not None and running_var is not None:
        own = running_mean, running_var
        elements = sum(norm.counts)
        tracked = RunningStatistics(*own, momentum, elements, grid, rest, groups, publish)
    shard = normalize(block, weight, bias, norm, grid, tracked)
    return DistTensor(shard, x.shape, x.cuts, grid)


def _of_blocks(input: Tensor, *args: Any, **named: Any) -> Any:
    """Return torch's batch norm of plain tensors on a grid of one rank, for `serial_by`.

    Return NotImplemented for an input so large that torch's batch norm is not the fastest.
    """
    if not _suits_torch(input.numel(), is_accelerator(input.device)):
        return NotImplemented
    return F.batch_norm(with_batch_stride(input), *args, **named)


def _mean_size(x: DistTensor) -> float:
    """Return the mean number of elements of a block of `x` that is partitioned in channels only.

    The number is the same on all ranks. All ranks must choose the same norm by this number, as the
    autograd graphs of torch's norm and of `normalize` differ.
    """
    return x.numel() / x.grid.topology.parts(x.cuts[1] if x.dim() > 1 else ())


def _suits_torch(elements: float, accelerator: bool) -> bool:
    """Return whether torch's batch norm is the fastest for blocks with a mean of `elements`.

    `accelerator` is whether operators on the block run on an accelerator.
    """
    return elements <= thresholds(accelerator).own_batch_norm


implements(F.batch_norm)(
    serial_by(_of_blocks)(works_on_channels(of_each_sample=False)(partial(batch_norm_over, None)))
)


class _Statistics(NamedTuple):
    """The ranks and elements over which one call of batch norm takes its statistics."""

    training: bool
    """Whether statistics of the mini-batch are used; False for an empty mini-batch, as in torch."""
    norm: Norm
    rest: tuple[str, ...]
    """The grid axes that partition the input, but along which ranks do not share statistics."""
    groups: int
    """The number of groups of ranks that have elements, and so statistics."""


@lru_cache(maxsize=4096)
def _decide(
    x: Placement,
    axes: tuple[str, ...] | None,
    device: torch.device,
    training: bool,
    without_momentum: bool,
    eps: float,
    kinds: tuple[Kind | None, ...],
) -> _Statistics:
    """Return the ranks and elements of the statistics of a batch norm; no communication.

    `kinds` has shape and type of each argument with a number for each channel, or None. Raises the
    errors of torch's batch norm, on all ranks.
    """
    elements = prod(x.shape)
    if len(x.shape) < 2 and elements:
        raise ValueError(f"batch_norm: expected at least 2 dimensions, got {len(x.shape)}")
    cutting = cutting_axes((x.cuts[0], *x.cuts[2:]))
    group = cutting if axes is None else tuple(a for a in cutting if a in axes)
    smallest, groups = _groups_with_elements(x, group)
    if training and smallest == 1:
        raise ValueError(
            "batch_norm: expected more than 1 value per channel when training, got input size "
            f"{x.shape}"
            + (
                f' with {smallest} in a group of ranks; use statistics="global"'
                if group != cutting
                else ""
            )
        )
    if elements:
        # Run torch's own checks of sizes and types, on two samples with the same channels.
        like = ((2, x.shape[1]), x.dtype), *kinds
        serial: Any = F.batch_norm
        with without_modes():  # as for `check_on_meta`
            ones = [k and torch.ones(k[0], dtype=k[1], device=device) for k in like]
            serial(*ones, training, None if without_momentum else 0.0, eps)
    rest = tuple(a for a in cutting if a not in group)
    counts = element_counts_of_peers(x, (0, *range(2, len(x.shape))), group)
    own = rank_box(x.shape, x.cuts, x.topology, x.rank).shape
    form = Form(prod(own[1:2]), of_each_sample=False, in_runs=not x.on_gpu)
    return _Statistics(training and elements > 0, Norm(form, group, counts, eps), rest, groups)


def own_channels(values: Any, x: DistTensor, operator: str) -> Any:
    """Return the elements of `values` for this rank's channels of `x`; None if `values` is None.

    `values`, of shape (channels,), is a DistTensor, or a plain tensor that is equal on all ranks.
    `operator` is the name of the norm, under which a redistribution is recorded. Collective.
    """
    shape, cuts = tuple(x.shape[1:2]) or (0,), x.cuts[1:2] or ((),)
    return local_operand(values, shape, cuts, x.grid, operator)


def gather_running_statistics(
    x: DistTensor, running: Sequence[Tensor | None], own: Sequence[Tensor | None], operator: str
) -> None:
    """Gather `own`, each rank's updated statistics of its channels, to `running` on all ranks.

    `x` is the input of the norm. A statistic that is the same object in `own` and `running` has
    been updated in place, and is skipped. `operator` is the name of the norm, under which the
    redistribution is recorded. Collective.
    """
    pairs = [
        (t, o)
        for t, o in zip(running, own, strict=True)
        if t is not None and o is not None and t is not o
    ]
    if not pairs:
        return
    shape = len(pairs), x.shape[1]
    with torch.no_grad():
        rows = DistTensor(torch.stack([o for _, o in pairs]), shape, ((), x.cuts[1]), x.grid)
        for (t, _), row in zip(pairs, gather_whole(rows, operator), strict=True):
            t.copy_(row)


def _of_no_elements(norm: Callable[..., Tensor], block: Tensor, *args: Any) -> Tensor:
    """Return torch's `norm` of a block without elements, with the autograd graph of other ranks.

    `args` are the arguments of `norm` after the input, up to `eps`. The norm is computed of ones in
    place of the block and of parameters without elements.
    """
    empty = [isinstance(t, Tensor) and not t.numel() for t in args]
    filled = [filled_block(t) if e else t for t, e in zip(args, empty, strict=True)]
    # Not the `eps` of the call, which may be 0: the norm of the ones would not be finite.
    y = norm(filled_block(block), *filled, eps=1.0)
    return y[tuple(map(slice, block.shape))]


def _groups_with_elements(x: Placement, group: tuple[str, ...]) -> tuple[int, int]:
    """Return the fewest elements per channel in any group of ranks, and the number of groups.

    Each group consists of ranks along the grid axes `group`. Groups without elements are left out.
    Both numbers are the same on all ranks.
    """
    sizes = [x.shape[0], *x.shape[2:]]
    cuts = [x.cuts[0], *x.cuts[2:]]
    apart = [x.topology.parts(a for a in axes if a not in group) for axes in cuts]
    filled = [min(n, parts) for n, parts in zip(sizes, apart, strict=True)]
    smallest = prod(n // max(parts, 1) for n, parts in zip(sizes, filled, strict=True))
    return smallest, prod(filled)


# Normalisation of each sample and group of channels (group norm), or sample and channel (instance).


def group_norm_over(
    axes: tuple[str, ...] | None,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> DistTensor:
    """Return the group norm of `input`, by statistics over the ranks along the grid axes `axes`.

    Collective. If `axes` is None, statistics of a sample and group of channels are over the global
    plane or volume, as in the serial norm. With () each rank uses statistics of its own block, and
    the result differs from the serial norm. The other arguments are those of
    `torch.nn.functional.group_norm`.
    """
    name = "group_norm"
    x = as_distributed(input, common_grid("group_norm", (input, weight, bias)))
    check_parameter_types("group_norm", x, weight, bias)
    check_on_meta(F.group_norm, any_type(x), num_groups, any_type(weight), any_type(bias), eps)
    channels, cuts = x.shape[1] // num_groups, x.cuts
    if num_groups % x.grid.topology.parts(cuts[1]) and channels != 1:
        # Some groups of channels are partitioned over several ranks.
        return redistribute(
            group_norm_over(axes, uncut(x, [1], name), num_groups, weight, bias, eps), cuts, name
        )
    weight, bias = own_channels(weight, x, name), own_channels(bias, x, name)
    groups = x.shard.shape[1] // max(channels, 1)
    spatial = tuple(range(2, x.dim()))
    group = tuple(a for a in cutting_axes(cuts[2:]) if axes is None or a in axes)
    block = x.shard
    sizes = thresholds(x.grid.computes_on_gpu)
    own = sizes.own_group_norm or not has_channels_last(block)
    if not group and x.numel() and own:
        # torch.nn.functional would check the size of this block once more.
        shard = (
            torch.group_norm(block, groups, weight, bias, eps)
            if block.numel()
            else _of_no_elements(torch.group_norm, block, max(groups, 1), weight, bias)
        )
        return DistTensor(shard, x.shape, cuts, x.grid)
    counts = element_counts_of_peers(Placement.of(x), spatial, group, block=channels)
    form = Form(groups, of_each_sample=True, in_runs=not x.grid.computes_on_gpu)
    shard = normalize(block, weight, bias, Norm(form, group, counts, eps), x.grid)
    return DistTensor(shard, x.shape, cuts, x.grid)


implements(F.group_norm, torch.group_norm)(
    works_on_channels(of_each_sample=True)(partial(group_norm_over, None))
)


@implements(F.instance_norm)
@works_on_channels(of_each_sample=True)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each sample and channel over space, and update running statistics. Collective."""
    operands = input, running_mean, running_var, weight, bias
    x = as_distributed(input, common_grid("instance_norm", operands))
    check_parameter_types("instance_norm", x, weight, bias)
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    sizes = [any_type(t) for t in (running_mean, running_var, weight, bias)]
    check_on_meta(F.instance_norm, any_type(x), *sizes, True, momentum)
    if (running_mean is None) != (running_var is None):
        raise ValueError(
            "instance_norm: running_mean and running_var must either both be None or neither"
        )
    elements = prod(x.shape[2:])
    if elements == 1:
        raise ValueError(
            "instance_norm: expected more than 1 spatial element when training, got input size "
            f"{tuple(x.shape)}"
        )
    if running_mean is not None and running_var is not None and elements:
        with torch.no_grad():
            over = tuple(range(2, x.dim()))
            variance, mean = torch.var_mean(to_accumulation_type(x.detach()), over)
            for running, batch in ((running_mean, mean), (running_var, variance)):
                own = gather_whole(batch.mean(0), "instance_norm")
                running.lerp_(own.to(running.dtype), momentum)
    # torch copies the weight for each sample, so its backward pass uses the present values.
    kept = None if weight is None else weight.clone()
    return group_norm_over(None, x, max(x.shape[1], 1), kept, bias, eps)


# Normalisation of each sample over its last dimensions: layer and root-mean-square norm.


@implements(F.layer_norm, torch.layer_norm)
@works_on_last(lambda normalized_shape, *_, **__: len(normalized_shape))
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> DistTensor:
    """Normalise each sample over its last dimensions, partitioned or not. Collective."""
    x = as_distributed(input, common_grid("layer_norm", (input, weight, bias)))
    check_parameter_types("layer_norm", x, weight, bias)
    check_on_meta(
        F.layer_norm, any_type(x), tuple(normalized_shape), any_type(weight), any_type(bias), eps
    )
    return _normalize_last(x, normalized_shape, weight, bias, eps, "layer_norm")


@implements(F.rms_norm, torch.rms_norm)
@works_on_last(lambda normalized_shape, *_, **__: len(normalized_shape))
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> DistTensor:
    """Divide by the root mean square over the last dimensions, partitioned or not. Collective."""
    x = as_distributed(input, common_grid("rms_norm", (input, weight)))
    check_on_meta(F.rms_norm, any_type(x), tuple(normalized_shape), any_type(weight), eps)
    return _normalize_last(x, normalized_shape, weight, None, eps, "rms_norm")


def _normalize_last(
    x: DistTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    name: str,
) -> DistTensor:
    """Return the layer norm or root-mean-square norm of `x` over its last dimensions. Collective.

    `name` is "layer_norm" or "rms_norm"; `normalized_shape` are the sizes of the last dimensions.
    """
    block, first = x.shard, x.dim() - len(normalized_shape)
    over = tuple(range(first, x.dim()))
    group = cutting_axes(x.cuts[first:])
    own = tuple(x.shape[first:]), x.cuts[first:], x.grid, name
    weight, bias = (local_operand(t, *own) for t in (weight, bias))
    layer = name == "layer_norm"
    if not group and x.numel():
        norm: Callable[..., Tensor] = F.layer_norm if layer else F.rms_norm
        args = tuple(normalized_shape), weight, *([bias] if layer else [])
        shard = norm(block, *args, eps) if block.numel() else _of_no_elements(norm, block, *args)
        return DistTensor(shard, x.shape, x.cuts, x.grid)
    if eps is None:
        eps = torch.finfo(accumulation_type(x.dtype)).eps
    counts = element_counts_of_peers(Placement.of(x), over, group)
    samples, on_gpu = prod(block.shape[:first]), x.grid.computes_on_gpu
    form = Form(samples, True, centered=layer, weighs_elements=True, in_runs=not on_gpu)
    rows = block.reshape(1, samples, prod(block.shape[first:]))
    shard = normalize(rows, weight, bias, Norm(form, group, counts, eps), x.grid)
    return DistTensor(shard.view(block.shape), x.shape, x.cuts, x.grid)
