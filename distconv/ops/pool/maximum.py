"""Max pooling of partitioned planes, with or without indices of the maxima, and max unpooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce
from distconv.geometry.index_maps import IndexMap, Same, TransposedWindow, Window
from distconv.geometry.layout import Box, Shape, cutting_axes
from distconv.ops.pool.average import unread_input
from distconv.ops.support.arguments import (
    Sizes,
    TensorMeta,
    accepts_unbatched,
    check_on_meta,
    to_tuple,
)
from distconv.ops.support.dimensions import works_on_samples
from distconv.ops.support.in_place import is_recorded
from distconv.ops.support.operands import (
    Placement,
    as_distributed,
    box_on_rank,
    constant,
    empty_block,
    global_indices,
    uncut,
    unravel,
)
from distconv.ops.support.windows import (
    PlannedWindows,
    gather_windows,
    make_windows,
    plan_windows,
    window_arguments,
    with_some_channel,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, redistribute
from distconv.torch_private import ShardFunction, max_pool_with_places, unpooled_size


def lowest_value(x: Tensor) -> float:
    """Return the lowest number of the type of `x` (-inf for floats), the padding of max pooling."""
    return -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min


def buffer_starts(x: Placement, plan: PlannedWindows) -> tuple[int, ...]:
    """Return for each spatial dimension the global position at which this rank's buffer begins.

    `x` is the placement of the input. The position is negative if the buffer begins with padding.
    Along a dimension that is not partitioned it is 0, as the local operator adds the padding.
    """
    box = plan.box
    rows = zip(plan.windows, x.shape[2:], box.start[2:], box.stop[2:], x.cuts[2:], strict=True)
    return tuple(w.intervals(n, a, b)[0][0] if axes else 0 for w, n, a, b, axes in rows)


class Border(NamedTuple):
    """The padding in front of a buffer along dimension `dim`, filled with elements of the input.

    A padding position repeats an element that is in every window over this position. So the maxima
    stay the same, and the index of a maximum always lies within the input, also if all elements of
    the window are `lowest_value`, as in torch.

    Attributes
    ----------
    dim: the dimension of the buffer.
    repeated: for each padding position the position in the buffer whose element is repeated there.
    """

    dim: int
    repeated: tuple[int, ...]

    def fill(self, buffer: Tensor) -> None:
        """Write the repeated elements to the padding of `buffer`, in place."""
        inner = buffer.index_select(self.dim, constant(buffer.device, self.repeated))
        buffer.narrow(self.dim, 0, len(self.repeated)).copy_(inner)

    def fold(self, gradient: Tensor) -> None:
        """Add gradients of the padding to gradients of the repeated elements, in place.

        `gradient` is the gradient of the buffer. This is the adjoint of `fill`.
        """
        outer = gradient.narrow(self.dim, 0, len(self.repeated)).clone()
        gradient.index_add_(self.dim, constant(gradient.device, self.repeated), outer)


def borders(
    searched: tuple[int, ...], windows: tuple[Window, ...], starts: tuple[int, ...]
) -> tuple[Border, ...]:
    """Return a `Border` for each dimension along which the gathered buffer begins with padding.

    `searched` is the spatial shape of the buffer; `starts` are the global positions at which it
    begins.
    """
    found = []
    for d, (n, window, start) in enumerate(zip(searched, windows, starts, strict=True), 2):
        if start < 0:
            repeated = [min(p % window.dilation - start, n - 1) for p in range(start, 0)]
            found.append(Border(d, tuple(repeated)))
    return tuple(found)


def renumber_positions(
    index: Tensor,
    searched: Sequence[int],
    starts: Sequence[int],
    windows: Sequence[Window],
    plane: Sequence[int],
) -> Tensor:
    """Return indices of positions in this rank's buffer as indices into the global plane.

    All indices are row-major over the spatial dimensions. A position in the padding becomes that of
    the element that is repeated there.

    Parameters
    ----------
    index: the indices into the buffer, of any shape.
    searched: the spatial shape of the buffer.
    starts: the global positions at which the buffer begins, negative if it begins with padding.
    windows: the window of each spatial dimension.
    plane: the global spatial shape.
    """
    rows_are_whole = tuple(searched[1:]) == tuple(plane[1:]) and not any(starts[1:])
    if rows_are_whole and starts[0] >= 0:
        return index + starts[0] * prod(plane[1:])
    number = torch.zeros_like(index)
    coordinates = zip(unravel(index, searched), starts, windows, plane, strict=True)
    for local, start, window, size in coordinates:
        position = local + start
        if start < 0:
            # Positions before the plane repeat elements of the plane.
            position = torch.where(position < 0, position % window.dilation, position)
        number = number * size + position
    return number


def _max_pool(local: Callable[..., Any], functions: Sequence[Any], n: int, *, places: bool) -> None:
    """Register the rule of torch's `functions`, max pooling over `n` dimensions.

    `local` is torch's function for plain tensors. With `places`, `local` and the rule return both
    maxima and their indices.
    """
    name = f"max_pool{n}d"

    @implements(*functions)
    @works_on_samples(functions[0], n)
    @accepts_unbatched(name, n)
    def rule(
        input: DistTensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = places,  # torch asks for indices by another function
    ) -> Any:
        windows = make_windows(kernel_size, stride, padding, dilation, ceil_mode, n)
        planned = _planned(local, Placement.of(input), windows, ceil_mode)
        plan, starts, border, (kernels, strides, _, dilations), _ = planned
        if planned.misses_input and (places or is_recorded((input,))):
            refuse(
                name,
                f"a window of dilation={dilations} covers padding only, and torch's place of its "
                "maximum is outside the window",
                input,
                way_out="Choose a smaller dilation, or call it without indices under no_grad()",
            )
        x = with_some_channel(gather_windows(input, plan, name, lowest_value(input)))
        arguments = kernels, strides, plan.left, dilations, ceil_mode
        if n > 1 and any(input.cuts[2:]) and x.is_floating_point():
            values, index = _MaxPool.apply(x, arguments, border)
        else:
            for part in border:
                part.fill(x)
            made = local(x, *arguments)
            values, index = made if places else (made, None)
        maxima = DistTensor(plan.outputs(values), plan.shape, input.cuts, input.grid)
        if not places:
            return maxima
        if starts is None:
            index = empty_block(index, plan.block)
        else:
            index = renumber_positions(index, x.shape[2:], starts, windows, input.shape[2:])
        return maxima, DistTensor(index, plan.shape, input.cuts, input.grid)


class _Planned(NamedTuple):
    """One rank's plan for a call of max pooling; cached by global metadata."""

    windows: PlannedWindows
    starts: tuple[int, ...] | None
    """The global positions at which the rank's buffer begins; None if the rank has no outputs."""
    border: tuple[Border, ...]
    """The padding in front of the buffer that is filled with elements of the input."""
    arguments: tuple[tuple[int, ...], ...]
    """The arguments kernel_size, stride, padding and dilation of torch's functions."""
    misses_input: bool
    """Whether some window of the global plane covers padding only."""


@lru_cache(maxsize=4096)
def _planned(
    local: Callable[..., Any], x: Placement, windows: tuple[Window, ...], ceil_mode: bool
) -> _Planned:
    """Return this rank's plan for max pooling of an input placed as `x`; no communication.

    Raises the error of torch's function `local` for the global shape, on all ranks.
    """
    arguments = window_arguments(windows)
    check_on_meta(local, TensorMeta(x.shape), *arguments, ceil_mode)
    plan = plan_windows(x, windows)
    misses_input = any(map(Window.misses_input, windows, x.shape[2:]))
    if 0 in plan.block:
        return _Planned(plan, None, (), arguments, misses_input)
    starts = buffer_starts(x, plan)
    searched = None if plan.inputs is None else plan.inputs.buffer_shape[2:]
    border = () if searched is None else borders(searched, windows, starts)
    return _Planned(plan, starts, border, arguments, misses_input)


class _MaxPool(ShardFunction):
    """An autograd function of max pooling that saves the indices of the maxima, not the input.

    It fills the padding of each `Border` with elements of the input before it pools.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arguments: tuple[Any, ...], border: Sequence[Border]
    ) -> tuple[Tensor, Tensor]:
        for part in border:
            part.fill(x)
        values, index = max_pool_with_places[x.dim() - 2](x, *arguments)
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.context = tuple(x.shape), arguments, border
        return values, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,), (shape, arguments, border), dy = ctx.saved_tensors, ctx.context, grads[0]
        aten = torch.ops.aten
        volume = aten.max_pool3d_with_indices_backward
        function: Any = volume if len(shape) == 5 else aten.max_pool2d_with_indices_backward
        dx: Tensor = function(dy, unread_input(shape, dy), *arguments, index)
        for part in reversed(border):
            part.fold(dx)
        return dx, None, None


_max_pool(torch.max_pool1d, (F.max_pool1d, torch.max_pool1d), 1, places=False)
_max_pool(torch.max_pool2d, (F.max_pool2d, torch.max_pool2d), 2, places=False)
_max_pool(torch.max_pool3d, (F.max_pool3d, torch.max_pool3d), 3, places=False)
_max_pool(
    torch.max_pool1d_with_indices,
    (F.max_pool1d_with_indices, torch.max_pool1d_with_indices),
    1,
    places=True,
)
_max_pool(max_pool_with_places[2], (F.max_pool2d_with_indices,), 2, places=True)
_max_pool(max_pool_with_places[3], (F.max_pool3d_with_indices,), 3, places=True)


# Max unpooling, with indices into the global plane. Indices from max pooling lie within the window
# of their input. Then ranks exchange halos of inputs, as for a transposed convolution. If any index
# lies elsewhere, the plane is gathered.


def _unpool(function: Callable[..., Tensor], n: int) -> None:
    name = f"max_unpool{n}d"

    @implements(function)
    @accepts_unbatched(name, n)
    def rule(
        input: DistTensor,
        indices: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        output_size: Any = None,
    ) -> DistTensor:
        if indices.dim() < input.dim():
            indices = indices.unsqueeze(0)
        indices = as_distributed(indices, input.grid)
        if indices.shape != input.shape:
            raise RuntimeError(
                f"{name}: the indices have shape {tuple(indices.shape)}, the input "
                f"{tuple(input.shape)}; they must be the same"
            )
        size = None if output_size is None else tuple(output_size)
        kernels = to_tuple(kernel_size, n, "kernel_size")
        strides = kernels if stride is None else to_tuple(stride, n, "stride")
        paddings = to_tuple(padding, n, "padding")
        plane = tuple(unpooled_size(input, list(kernels), list(strides), list(paddings), size))
        shape = (*input.shape[:2], *plane)
        windows = [
            TransposedWindow(k, s, 1, p, made - ((m - 1) * s + k - 2 * p))
            for k, s, p, m, made in zip(
                kernels, strides, paddings, input.shape[2:], plane, strict=True
            )
        ]
        indices = redistribute(indices, input.cuts, name)
        if any(input.cuts[2:]) and _within(windows, indices, plane):
            return _from_neighbours(input, indices, windows, shape, name)
        x = uncut(input, range(2, input.dim()), name)
        box = box_on_rank(shape, x.cuts, x.grid)
        index = redistribute(indices, x.cuts, name).shard
        if not prod(box.shape):
            return DistTensor(empty_block(x.shard, box.shape), shape, x.cuts, x.grid)
        shard = function(x.shard, index, kernels, strides, paddings, plane)
        return DistTensor(shard, shape, x.cuts, x.grid)


def _within(windows: list[TransposedWindow], indices: DistTensor, plane: Shape) -> bool:
    """Return whether on all ranks every index lies in the window of its input. Collective.

    `plane` is the global spatial shape of the output, into which `indices` point. Return True in a
    dry run, where tensors have no elements.
    """
    if indices.shard.is_meta:
        return True
    own = indices.shard.detach()
    outside = (own < 0) | (own >= prod(plane))
    inputs = global_indices(indices)[2:]
    for window, input, position in zip(windows, inputs, unravel(own, plane), strict=True):
        first = input * window.stride - window.padding
        outside |= (position < first) | (position >= first + window.kernel)
    count = all_reduce(outside.sum(), indices.grid, cutting_axes(indices.cuts))
    return not count.item()


def _from_neighbours(
    x: DistTensor, indices: DistTensor, windows: list[TransposedWindow], shape: Shape, name: str
) -> DistTensor:
    """Return max unpooling of `x`, for indices within the window of their input. Collective.

    Each rank gathers only those inputs whose windows meet its block of the output. `shape` is the
    global shape of the output; `name` is the called function, for records.
    """
    cut = zip(windows, x.cuts[2:], strict=True)
    needs: list[IndexMap] = [Same(), Same(), *(w if axes else Same() for w, axes in cut)]
    values = gather_inputs(x, needs, x.cuts, name)
    index = gather_inputs(indices, needs, x.cuts, name, fill=-1)
    box = box_on_rank(shape, x.cuts, x.grid)
    shard = _scatter(values, index, box, shape[2:])
    return DistTensor(shard, shape, x.cuts, x.grid)


def _scatter(values: Tensor, index: Tensor, box: Box, plane: Shape) -> Tensor:
    """Return this rank's block of an output that is zero except for `values` at `index`.

    `index` has row-major indices into the global plane, of spatial shape `plane`, or -1. `box` is
    the block's place in the global output; values outside it are dropped.
    """
    inside = index >= 0
    own = torch.zeros_like(index)
    block = box.shape[2:]
    for d, position in enumerate(unravel(index, plane)):
        local = position - box.start[d + 2]
        inside &= (local >= 0) & (local < block[d])
        own = own * block[d] + local
    # Values outside the block are written to a surplus element after the block.
    beyond = prod(block)
    places = torch.where(inside, own, beyond).flatten(2)
    made = values.new_zeros((*values.shape[:2], beyond + 1))
    return made.scatter(2, places, values.flatten(2))[:, :, :beyond].reshape(box.shape)


_unpool(F.max_unpool1d, 1)
_unpool(F.max_unpool2d, 2)
_unpool(F.max_unpool3d, 3)
