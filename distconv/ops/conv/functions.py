"""Rules of torch's convolutions for DistTensors, and the choice of a method for each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.device.kinds import (
    FEWEST_IN_DOUBT,
    in_doubt,
    is_accelerator,
    thresholds,
)
from distconv.geometry.halo import Boundary, LocalInput, make_boundary, needs_halo
from distconv.geometry.index_maps import Same
from distconv.geometry.layout import cutting_axes, rank_box
from distconv.geometry.plan import Plan
from distconv.grid.words import module_path
from distconv.ops.conv.channel_algorithms import (
    LayerCall,
    LocalLayer,
    WeightMeta,
    algorithm,
    local_layer,
)
from distconv.ops.conv.convolution import Convolution, TransposedConvolution
from distconv.ops.conv.local_convolution import LocalConvolution
from distconv.ops.conv.overlapped import overlapped_convolution
from distconv.ops.support.arguments import accepts_unbatched, to_tuple
from distconv.ops.support.dimensions import convolves
from distconv.ops.support.operands import (
    HALVES,
    Placement,
    box_on_rank,
    check_equal_types,
    distributed_input,
    empty_block,
    filled_block,
    shard_of,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import one_channel_in_sample_format
from distconv.tensor.one_rank import serial_by
from distconv.tensor.redistribution import gather_by, plan_to_gather
from distconv.torch_private import in_selective_checkpoint, without_modes

# The user's choice between two methods for a convolution of a partitioned plane or volume.
#
# By default `_may_overlap` chooses, by the size of a block.


METHODS = ("assembled", "overlapped")
_FORCED: ContextVar[str | None] = ContextVar("distconv_method", default=None)


@contextmanager
def method(name: str) -> Iterator[None]:
    """Compute convolutions in this context by the method `name`, where both apply; for debugging.

    "assembled" copies a rank's block and its halos into one buffer and computes on that.
    "overlapped" computes on the block during the halo exchange, and then completes the boundary.
    Results are equal to rounding. Outside the context the faster method is used. All ranks must
    choose the same. If torch.utils.checkpoint computes activations again, `backward()` belongs
    within the context too; outside, torch raises its `CheckpointError` unless the methods agree.
    Another name raises `ValueError`.

    Examples
    --------
    >>> model = nn.Conv2d(1, 1, 3, padding=1)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 64, 64), dc.ProcessGrid(height=2))
    >>> with dc.method("assembled"):
    ...     y = model(x)
    >>> with dc.method("overlapped"):
    ...     torch.testing.assert_close(model(x), y)
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r} is unknown; choose from {', '.join(METHODS)}")
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


chosen_method: Callable[[], str | None] = _FORCED.get
"""Return the method set by `method`; None outside of it."""


def _may_overlap(x: Placement, method: str | None, smallest: int) -> bool:
    """Return whether a convolution of `x` should overlap the halo exchange with computation.

    `method` is the user's choice, or None for the default: overlap if the mean number of elements
    of a rank's block is `smallest` or more. Windows and blocks may still make overlap impossible.
    """
    # torch computes a complex convolution from real ones, at a level above the overlapped method.
    if method == "assembled" or not any(x.cuts[2:]) or x.dtype.is_complex:
        return False
    ranks = x.topology.parts(cutting_axes(x.cuts))
    return method == "overlapped" or prod(x.shape) >= smallest * ranks


# A warning about blocks with too many elements for cuDNN and similar libraries.


def warn_of_large_block(x: DistTensor, elements: int, operator: str) -> None:
    """Warn if rank 0's block is so large that some GPU libraries return wrong numbers for it.

    Only rank 0, whose block is the largest, warns. No communication.

    Parameters
    ----------
    x: the input of the convolution; only half precision on GPUs can cause a warning.
    elements: the larger of the numbers of elements of this rank's input and output blocks.
    operator: the name of the convolution, for the warning.
    """
    grid = x.grid
    if grid.rank or x.dtype not in HALVES or not is_accelerator(grid.device):
        return
    if in_doubt(elements):
        layer = module_path()
        warnings.warn(
            f"{operator}{f' in {layer}' if layer else ''}: this rank's block on {grid} has "
            f"{elements:,} elements in {str(x.dtype).removeprefix('torch.')}. Some versions of "
            "cuDNN return wrong numbers from 2**30 on, without an error, and other libraries may "
            "count with 32 bits. Use smaller blocks, for example with more ranks along the "
            "height, or convolve in float32",
            stacklevel=2,
        )


# Convolution and transposed convolution of tensors partitioned in samples, channels and space.
#
# `channel_algorithms` divides channels and filters over the ranks. Each rank computes its block of
# the outputs from its block of the input and halos of other ranks. The halos are assembled with the
# block in one buffer, or their exchange overlaps with computation. Partial sums over channels are
# summed over the ranks.


class _Plan(NamedTuple):
    """One rank's plan for its block of a convolution's output; cached by global metadata."""

    layer: LocalLayer
    inputs: Plan | None
    """The plan that gathers the inputs; None if every rank's block has all inputs it needs."""
    local: LocalConvolution
    buffer: LocalInput
    """The padding and cropping with which the local operator runs on the gathered inputs."""
    boundary: Boundary | None
    """The halo slabs with which computation overlaps the exchange; None to gather inputs first."""
    made: tuple[int, ...]
    """The shape of the local operator's output."""
    weighted: bool
    """Whether the global weight has elements; this rank's block of the weight may have none."""
    elements: int
    """The larger of the numbers of elements of the rank's input and output blocks."""


def convolve(x: DistTensor, weight: Tensor, bias: Tensor | None, spec: Convolution) -> DistTensor:
    """Return the convolution of `x`. Collective.

    Parameters
    ----------
    weight, bias: DistTensors, or plain tensors that are equal on all ranks.
    spec: torch's function and its other arguments.
    """
    # The overlapped method changes its result in place, which a selective checkpoint may keep.
    way = chosen_method()
    if way != "assembled" and in_selective_checkpoint():
        way = "assembled"
    plan = _plan(spec, Placement.of(x), WeightMeta.of(weight, bias), algorithm(), way)
    weight, bias, late = plan.layer.operands(weight, bias)
    return plan.layer.output(_convolve_block(x, weight, bias, plan), late, x.grid)


def _convolve_block(x: DistTensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
    """Return this rank's block of the convolution, before any sum over ranks. Collective.

    `weight` and `bias` are this rank's blocks.
    """
    layer, operator = plan.layer, plan.layer.operator
    if plan.elements > FEWEST_IN_DOUBT:
        warn_of_large_block(x, plan.elements, operator)
    if plan.boundary is not None:
        return overlapped_convolution(x, weight, bias, plan.local, plan.boundary, operator)
    # Only the local operator reads the buffer and computes its gradient.
    computes = 0 not in plan.made and (weight.numel() > 0 or not plan.weighted)
    buffer = gather_by(plan.inputs, x, layer.cuts, operator, owns_gradient=computes)
    if buffer.shape[1] == 1:
        buffer = one_channel_in_sample_format(buffer, x.shape, x.cuts, x.grid)
    if plan.weighted and not weight.numel():
        return layer.empty_result(buffer, weight, bias)
    if 0 not in plan.made:
        return plan.local.recorded(plan.buffer, buffer, weight, bias)
    inputs = filled_block(buffer, (1, buffer.shape[1], *plan.buffer.shape[2:]))
    return plan.local.recorded(plan.buffer, inputs, weight, bias)[:0].reshape(plan.made)


@lru_cache(maxsize=4096)
def _plan(
    spec: Convolution,
    x: Placement,
    weights: WeightMeta,
    algorithm: str,
    method: str | None,
) -> _Plan:
    check_equal_types(spec.name, (x.dtype, *weights.dtypes))
    if len(weights.shape) != len(x.shape):
        raise RuntimeError(
            f"{spec.name}: expected a weight of {len(x.shape)} dimensions for the input {x.shape}, "
            f"got the weight {weights.shape}"
        )
    shape = spec.output_shape(x.shape, weights.shape, weights.bias)
    maps = spec.index_maps(weights.shape[2:])
    needs = (Same(), Same(), *spec.inputs_to_gather(maps, x.cuts))
    layer = local_layer(
        LayerCall(spec.name, x, weights, shape, needs, algorithm, 1, spec.groups, spec.transposed)
    )
    boundary, parts = None, tuple(map(x.topology.parts, x.cuts[2:]))
    fewest = spec.fewest_to_overlap(weights.shape, thresholds(x.on_gpu)) // layer.blocks
    if layer.stays and _may_overlap(x, method, fewest) and needs_halo(maps, x.shape[2:], parts):
        boundary = make_boundary(x.topology, x.rank, *layer.alone(x), maps)
        boundary = replace(boundary, plan=x.messages(boundary.plan))
    gathered = plan_to_gather(x.topology, x.rank, x.shape, x.cuts, layer.needs, layer.cuts)
    inputs = gathered and x.messages(gathered)
    local = LocalConvolution(
        spec.function, spec.stride, spec.dilation, layer.groups, spec.transposed
    )
    given, made = rank_box(x.shape, x.cuts, x.topology, x.rank).shape, layer.box.shape
    elements = max(prod(given), prod(made))
    buffer, weighted = spec.buffer(maps, x, layer.box), 0 not in weights.shape
    return _Plan(layer, inputs, local, buffer, boundary, made, weighted, elements)


# Transposed convolutions whose output has no elements, with the results of serial torch.
#
# torch's kernels disagree: depending on the number of samples and the device, some return an output
# without elements, and some raise. torch's check on the meta device differs between versions.


_SAMPLES = 2
"""The smallest number of samples from which all larger numbers give the same result."""


def without_outputs(
    x: DistTensor, weight: Tensor, bias: Tensor | None, spec: TransposedConvolution
) -> DistTensor:
    """Return an output without elements, or raise the error of serial torch. No communication.

    Serial torch runs on zeros with the global shapes and at most two samples, so all ranks return
    or raise together.
    """
    arguments = spec.stride, spec.padding, spec.output_padding, spec.groups, spec.dilation
    few = min(x.shape[0], _SAMPLES), *x.shape[1:]
    with without_modes():
        zeros = [
            None if t is None else shard_of(t).new_zeros(()).expand(few if t is x else t.shape)
            for t in (x, weight, bias)
        ]
        made = spec.function(*zeros, *arguments)
    outputs = x.shape[0], *made.shape[1:]
    cuts = x.cuts[0], (), *x.cuts[2:]
    block = empty_block(shard_of(x), box_on_rank(outputs, cuts, x.grid).shape).to(made.dtype)
    for t in (weight, bias):
        if t is not None:  # as in serial torch, the gradient of `t` is zero, and not None
            block = block + shard_of(t).reshape(-1)[:0].sum().to(made.dtype)
    return DistTensor(block, outputs, cuts, x.grid)


# torch's convolutions and transposed convolutions, in one to three dimensions.


_INTEGERS = frozenset({int})
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}


def _convolution(function: Callable[..., Tensor], n: int, kind: Any) -> None:
    """Register the rule of torch's `function`, a convolution over `n` spatial dimensions.

    `kind` is the class that holds the arguments: `Convolution` or `TransposedConvolution`.
    """

    @implements(function)
    @serial_by(partial(_of_blocks, function, n))
    @convolves(function, n, kind.transposed)
    @accepts_unbatched(function.__name__, n)
    def rule(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **named: Any
    ) -> DistTensor:
        given = [
            a
            if type(a) is int or type(a) is tuple and _INTEGERS.issuperset(map(type, a))
            else _hashable(a)
            for a in (*args, *named.values())
        ]
        spec = _specification(kind, function, n, *given, named=tuple(named))
        x = distributed_input(spec.name, input, weight, bias)
        if isinstance(spec, TransposedConvolution) and spec.has_no_outputs(
            tuple(x.shape), tuple(weight.shape[2:])
        ):
            return without_outputs(x, weight, bias, spec)
        return convolve(x, weight, bias, spec)


def _of_blocks(
    function: Callable[..., Tensor], n: int, input: Tensor, weight: Tensor, *args: Any, **named: Any
) -> Any:
    """Return torch's `function` of plain tensors on a grid of one rank, for `serial_by`.

    Return NotImplemented where the rule does more: for volumes and for inputs of one channel, which
    need other kernels or formats, for unexpected shapes, and for very large blocks, of which the
    rule warns. `n` is the number of spatial dimensions.
    """
    if n == 3 or input.dim() < n + 1 or weight.dim() != n + 2:
        return NotImplemented
    if input.shape[1] == 1 or input.numel() * weight.shape[0] > FEWEST_IN_DOUBT:
        return NotImplemented
    return function(input, weight, *args, **named)


def _hashable(argument: Any) -> Any:
    """Return `argument` as a hashable value: a list as a tuple, a 0-d tensor as a number."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(_hashable, argument))
    return argument.item() if isinstance(argument, Tensor) else argument


@lru_cache(maxsize=4096)
def _specification(
    kind: Any, function: Callable[..., Tensor], n: int, *given: Any, named: tuple[str, ...]
) -> Convolution:
    """Return an object of class `kind` that holds the arguments of torch's `function` after `bias`.

    `given` has the values of the arguments: first the positional ones, then those passed by keyword
    under the names `named`. Equal arguments return the same cached object, so caches keyed by this
    object compare by identity.
    """
    names = ["stride", "padding", "dilation", "groups"]
    if kind.transposed:
        names = ["stride", "padding", "output_padding", "groups", "dilation"]
    names = [*names[: len(given) - len(named)], *named]
    values: dict[str, Any] = _DEFAULTS | dict(zip(names, given, strict=True))
    groups = values.pop("groups")
    sizes: dict[str, Any] = {
        k: x if isinstance(x, str) else to_tuple(x, n, k) for k, x in values.items()
    }
    stride, padding, dilation = sizes["stride"], sizes["padding"], sizes["dilation"]
    if kind.transposed:
        extra = sizes["output_padding"]
        return TransposedConvolution(function, stride, padding, dilation, groups, extra)
    return Convolution(function, stride, padding, dilation, groups)


_convolution(torch.conv1d, 1, Convolution)
_convolution(torch.conv2d, 2, Convolution)
_convolution(torch.conv3d, 3, Convolution)
_convolution(torch.conv_transpose1d, 1, TransposedConvolution)
_convolution(torch.conv_transpose2d, 2, TransposedConvolution)
_convolution(torch.conv_transpose3d, 3, TransposedConvolution)
