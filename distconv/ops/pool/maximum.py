"""Max pooling on cut planes, with and without the places of the maxima in the global plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.index_maps import Window
from distconv.ops.pool.average import unread_input, with_some_channel
from distconv.ops.support.arguments import Sizes, TensorMeta, accepts_unbatched, check_on_meta
from distconv.ops.support.assembled import (
    PlannedWindows,
    apply_windows,
    make_windows,
    plan_windows,
    window_arguments,
)
from distconv.ops.support.dimensions import works_on_samples
from distconv.ops.support.in_place import is_recorded
from distconv.ops.support.operands import Placement, constant, empty_block, unravel
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import ShardFunction, max_pool_with_places


def lowest_value(x: Tensor) -> float:
    """Return the smallest number of the type of `x`, the padding of max pooling."""
    return -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min


def buffer_starts(x: Placement, plan: PlannedWindows) -> tuple[int, ...]:
    """Return for each spatial dimension the position at which this rank's buffer starts.

    Along a dimension that is not cut the local operator pads by itself, outside the buffer.
    """
    box = plan.box
    rows = zip(plan.windows, x.shape[2:], box.start[2:], box.stop[2:], x.cuts[2:], strict=True)
    return tuple(w.intervals(n, a, b)[0][0] if axes else 0 for w, n, a, b, axes in rows)


class Border(NamedTuple):
    """The padding in front of a buffer along one dimension, filled with elements of the plane.

    A padding position repeats an element that all windows over this position contain, too. So
    maxima stay the same, and a window that holds only `lowest_value` finds a position in the plane,
    as in torch.

    Attributes
    ----------
    dim: the dimension.
    repeated: for each padding position the position in the buffer that it repeats.
    """

    dim: int
    repeated: tuple[int, ...]

    def fill(self, buffer: Tensor) -> None:
        """Write the repeated elements to the padding, in place."""
        inner = buffer.index_select(self.dim, constant(buffer.device, self.repeated))
        buffer.narrow(self.dim, 0, len(self.repeated)).copy_(inner)

    def fold(self, gradient: Tensor) -> None:
        """Add the padding's gradients to the gradients of the elements it repeats, in place."""
        outer = gradient.narrow(self.dim, 0, len(self.repeated)).clone()
        gradient.index_add_(self.dim, constant(gradient.device, self.repeated), outer)


def borders(
    searched: tuple[int, ...], windows: tuple[Window, ...], starts: tuple[int, ...]
) -> tuple[Border, ...]:
    """Return the borders of a buffer of spatial shape `searched` that starts at `starts`.

    A block that is its own buffer has none, and is not written to.
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
    """Return row-major numbers of positions in `searched` as numbers in the global `plane`.

    `searched` begins at `starts` in the plane, or before it if a border repeats elements.
    """
    rows_are_whole = tuple(searched[1:]) == tuple(plane[1:]) and not any(starts[1:])
    if rows_are_whole and starts[0] >= 0:
        return index + starts[0] * prod(plane[1:])
    number = torch.zeros_like(index)
    coordinates = zip(unravel(index, searched), starts, windows, plane, strict=True)
    for local, start, window, size in coordinates:
        position = local + start
        if start < 0:
            # Positions before the plane repeat elements of it.
            position = torch.where(position < 0, position % window.dilation, position)
        number = number * size + position
    return number


def _max_pool(local: Callable[..., Any], functions: Sequence[Any], n: int, *, places: bool) -> None:
    """Register the rule of `functions`, max pooling over `n` dimensions.

    `local` is torch's function for a buffer. With `places` it returns the places of the maxima,
    too, and so does the rule.
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
        found: list[Tensor] = []

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            x, arguments = with_some_channel(buffer), (kernels, strides, left, dilations, ceil_mode)
            if n > 1 and any(input.cuts[2:]) and x.is_floating_point():
                values, index = _MaxPool.apply(x, arguments, border)
            else:
                for part in border:
                    part.fill(x)
                made = local(x, *arguments)
                values, index = made if places else (made, None)
            if not places:
                return values
            if starts is None:
                found.append(empty_block(index, plan.block))
            else:
                plane = input.shape[2:]
                found.append(renumber_positions(index, buffer.shape[2:], starts, windows, plane))
            return values

        values = apply_windows(input, plan, name, compute, fill=lowest_value(input))
        if not places:
            return values
        return values, DistTensor(found[0], plan.shape, values.cuts, input.grid)


class _Planned(NamedTuple):
    """A rank's plan for one max pooling; cached by global metadata."""

    windows: PlannedWindows
    starts: tuple[int, ...] | None
    """Where the rank's buffer starts; None if the rank has no outputs."""
    border: tuple[Border, ...]
    """The borders of the buffer."""
    arguments: tuple[tuple[int, ...], ...]
    """Kernels, strides, paddings and dilations, as torch's functions take them."""
    misses_input: bool
    """Whether a window covers padding only."""


@lru_cache(maxsize=4096)
def _planned(
    local: Callable[..., Any], x: Placement, windows: tuple[Window, ...], ceil_mode: bool
) -> _Planned:
    """Return the plan; raise what torch's function `local` raises for the global shape."""
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
    """torch's max pooling of a buffer with filled borders; it saves places, not the buffer."""

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
