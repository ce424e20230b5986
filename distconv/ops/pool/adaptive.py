"""Adaptive maximum and average pooling of partitioned planes and volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.index_maps import AdaptiveWindow, Run, Same, Window
from distconv.geometry.layout import Cuts
from distconv.ops.pool.average import check_pooled_type
from distconv.ops.reduce.sums import mean
from distconv.ops.support.arguments import accepts_unbatched
from distconv.ops.support.dimensions import works_on_samples
from distconv.ops.support.operands import apply_along, box_on_rank, empty_block
from distconv.ops.support.windows import with_some_channel
from distconv.tensor.base import whole_number
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs
from distconv.torch_private import adaptive_max_pool

_MOST = 2**20
"""The largest supported number of output positions, as each may need a call of its own."""


def _adaptive(
    name: str, input: DistTensor, output_size: Any, pool: Callable[..., Tensor], n: int
) -> DistTensor:
    """Return `input`, pooled adaptively over its last `n` dimensions. Collective.

    `pool(x, output_size)` pools a plain tensor. `name` is the function that the user called, for
    errors and records. A dimension with fewer outputs than ranks along it is replicated in the
    result. This avoids empty blocks; the heads of networks flatten the dimension next anyway.
    Raises UnsupportedOperation for too many output positions.
    """
    sizes = tuple(input.shape[2:])
    windows = [AdaptiveWindow(m) for m in _adaptive_sizes(output_size, sizes, n)]
    shape = (*input.shape[:2], *(w.output_size(m) for w, m in zip(windows, sizes, strict=True)))
    torch.empty(shape, device="meta")  # raises for sizes that overflow
    if prod(shape[2:]) > _MOST:
        reason = f"{prod(shape[2:])} windows, which may be computed one by one"
        way_out = f"Choose an output_size of at most {_MOST} positions, or use F.interpolate"
        refuse(name, reason, input, way_out=way_out)
    cuts: Cuts = tuple(
        axes if m >= input.grid.topology.parts(axes) else ()
        for m, axes in zip(shape, input.cuts, strict=True)
    )
    # For windows without overlap, the plan finds whether each window is within one block.
    needs = [
        Window(size // m, size // m) if m and size % m == 0 else window
        for window, size, m in zip(windows, sizes, shape[2:], strict=True)
    ]
    buffer = gather_inputs(input, (Same(), Same(), *needs), cuts, name)
    box = box_on_rank(shape, cuts, input.grid)
    if 0 in box.shape:
        return DistTensor(buffer.reshape(box.shape), shape, cuts, input.grid)
    runs = [
        window.runs(size, start, stop)
        for window, size, start, stop in zip(
            windows, sizes, box.start[2:], box.stop[2:], strict=True
        )
    ]
    return DistTensor(_pooled(buffer, runs, pool), shape, cuts, input.grid)


def _pooled(
    buffer: Tensor,
    runs: Sequence[Sequence[Run]],
    pool: Callable[..., Tensor],
    outputs: tuple[int, ...] = (),
) -> Tensor:
    """Return the outputs of `buffer`: each combination of runs pooled by one call, and joined.

    Each recursive call divides one more spatial dimension into runs, from first to last.

    Parameters
    ----------
    buffer: the gathered inputs, of shape (N, C, *spatial).
    runs: for each of the last dimensions, those not yet divided, the runs along the dimension.
    pool: a function of a tensor and its number of outputs along each spatial dimension.
    outputs: the number of outputs along each spatial dimension divided already.
    """
    if not runs:
        return pool(buffer, outputs)
    (along, *rest), d = runs, 2 + len(outputs)
    if len(along) == 1:
        return _pooled(buffer, rest, pool, (*outputs, along[0].outputs))
    pieces = [
        _pooled(buffer.narrow(d, r.start, r.stop - r.start), rest, pool, (*outputs, r.outputs))
        for r in along
    ]
    return torch.cat(pieces, d)


def _adaptive_sizes(output_size: Any, sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
    if output_size is None or isinstance(output_size, bool):
        raise TypeError(f"output_size={output_size} must be a whole number, or {n} whole numbers")
    if not isinstance(output_size, (tuple, list)):
        output_size = (output_size,) * n
    if len(output_size) != n:
        raise RuntimeError(f"output_size={tuple(output_size)} must have {n} values")
    outputs = tuple(
        size if m is None else whole_number(m, "output_size")
        for m, size in zip(output_size, sizes, strict=True)
    )
    if min(outputs) < 0 or min(sizes) < 1:
        raise RuntimeError(
            f"output_size={outputs} of a plane of {sizes}: the plane must have elements, and "
            "output sizes must be 0 or more"
        )
    return outputs


def _adaptive_avg_pool(local: Callable[..., Tensor], n: int) -> None:
    name = f"adaptive_avg_pool{n}d"

    @implements(local)
    @works_on_samples(local, n)
    @accepts_unbatched(name, n)
    def rule(input: DistTensor, output_size: Any) -> DistTensor:
        check_pooled_type(name, input, input.is_floating_point() or input.is_complex())
        outputs = _adaptive_sizes(output_size, tuple(input.shape[2:]), n)
        if not any(input.cuts[2:]):
            shape = (*input.shape[:2], *outputs)
            if input.shard.numel() and 0 not in outputs:
                shard = local(input.shard, outputs)
            else:
                # torch's gradient would raise on ranks that have inputs but no outputs.
                shard = empty_block(input.shard, box_on_rank(shape, input.cuts, input.grid).shape)
            return DistTensor(shard, shape, input.cuts, input.grid)
        # An average over a complete dimension is an all-reduce, and no input is gathered.
        over = [d for d, m in enumerate(outputs, 2) if m == 1]
        pooled = mean(input, over, keepdim=True) if over else input
        if outputs == tuple(pooled.shape[2:]):
            return (
                pooled
                if over
                else DistTensor(pooled.shard.clone(), pooled.shape, pooled.cuts, pooled.grid)
            )
        return _adaptive(name, pooled, outputs, local, n)


def _adaptive_max_pool(local: Callable[..., Any], functions: Any, n: int, places: bool) -> None:
    """Register the rule of torch's `functions`, adaptive max pooling over `n` dimensions.

    `local` is torch's function for plain tensors, which returns maxima and their indices. If
    `places`, the rule returns indices, too, and gathers the pooled dimensions on every rank.
    """
    name = f"adaptive_max_pool{n}d"

    def pool(x: Tensor, output_size: Any) -> Tensor:
        values: Tensor = local(with_some_channel(x), output_size)[0]
        return values if x.shape[1] else values.reshape(*x.shape[:2], *values.shape[2:])

    @implements(*functions)
    @works_on_samples(functions[0], n)
    @accepts_unbatched(name, n)
    def rule(input: DistTensor, output_size: Any, return_indices: bool = False) -> Any:
        check_pooled_type(name, input, input.is_floating_point())
        if not places:
            return _adaptive(name, input, output_size, pool, n)
        outputs = _adaptive_sizes(output_size, tuple(input.shape[2:]), n)
        return apply_along(local, name, input, range(2, n + 2), outputs)


_adaptive_avg_pool(F.adaptive_avg_pool1d, 1)
_adaptive_avg_pool(F.adaptive_avg_pool2d, 2)
_adaptive_avg_pool(F.adaptive_avg_pool3d, 3)
_adaptive_max_pool(torch.adaptive_max_pool1d, [F.adaptive_max_pool1d], 1, places=False)
_adaptive_max_pool(adaptive_max_pool[2], [F.adaptive_max_pool2d], 2, places=False)
_adaptive_max_pool(adaptive_max_pool[3], [F.adaptive_max_pool3d], 3, places=False)
_adaptive_max_pool(
    torch.adaptive_max_pool1d,
    [F.adaptive_max_pool1d_with_indices, torch.adaptive_max_pool1d],
    1,
    places=True,
)
_adaptive_max_pool(adaptive_max_pool[2], [F.adaptive_max_pool2d_with_indices], 2, places=True)
_adaptive_max_pool(adaptive_max_pool[3], [F.adaptive_max_pool3d_with_indices], 3, places=True)
