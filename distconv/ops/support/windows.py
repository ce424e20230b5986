"""Windows applied to gathered buffers of inputs, for convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from distconv.geometry.index_maps import IndexMap, Same, Window
from distconv.geometry.layout import Box, Cuts, rank_box
from distconv.geometry.plan import Plan
from distconv.ops.support.arguments import Sizes, to_tuple
from distconv.ops.support.operands import Placement, filled_block
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_by, plan_to_gather


def make_windows(
    kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil: bool, n: int
) -> tuple[Window, ...]:
    """Return torch's window arguments as one `Window` for each of the last `n` dimensions."""
    kernels = to_tuple(kernel, n, "kernel_size")
    strides = (
        kernels
        if stride is None or (isinstance(stride, (tuple, list)) and not stride)
        else to_tuple(stride, n, "stride")
    )
    paddings, dilations = to_tuple(padding, n, "padding"), to_tuple(dilation, n, "dilation")
    largest = max(*kernels, *strides, *paddings, *dilations)
    if n > 1 and largest >= 2**31:
        raise RuntimeError(f"{largest} is too large for a window; torch supports less than 2**31")
    return _windows(kernels, strides, paddings, dilations, ceil)


@lru_cache(maxsize=4096)
def _windows(
    kernels: tuple[int, ...],
    strides: tuple[int, ...],
    paddings: tuple[int, ...],
    dilations: tuple[int, ...],
    ceil: bool,
) -> tuple[Window, ...]:
    rows = zip(kernels, strides, paddings, dilations, strict=True)
    return tuple(Window(k, s, d, (p, p), ceil) for k, s, p, d in rows)


@lru_cache(maxsize=4096)
def window_arguments(windows: tuple[Window, ...]) -> tuple[tuple[int, ...], ...]:
    """Return kernels, strides, paddings and dilations, as torch's functions take them."""
    rows = [(w.kernel, w.stride, w.padding[0], w.dilation) for w in windows]
    return tuple(zip(*rows, strict=True))


class PlannedWindows(NamedTuple):
    """A plan to apply windows over the spatial dimensions of a tensor, as one rank sees it.

    Attributes
    ----------
    windows: one window for each spatial dimension.
    shape: the global shape of the result, which is cut like the tensor.
    box, block: this rank's box of the result, and its shape.
    inputs: the plan that gathers the inputs of the block; None if every rank has its own.
    left: for each spatial dimension the padding that the local operator must add itself.
    """

    windows: tuple[Window, ...]
    shape: tuple[int, ...]
    box: Box
    block: tuple[int, ...]
    inputs: Plan | None
    left: tuple[int, ...]

    def outputs(self, made: Tensor) -> Tensor:
        """Return this rank's block of the result, computed as `made` from `gather_windows`."""
        return made[:0].reshape(self.block) if 0 in self.block else made


@lru_cache(maxsize=4096)
def plan_windows(
    x: Placement, windows: tuple[Window, ...], channels: int | None = None
) -> PlannedWindows:
    """Return the plan for windows over a tensor placed as `x`. No communication.

    The result has `channels` channels, by default as many as the tensor.
    """
    sizes = (w.output_size(n) for w, n in zip(windows, x.shape[2:], strict=True))
    shape = (x.shape[0], x.shape[1] if channels is None else channels, *sizes)
    box = rank_box(shape, x.cuts, x.topology, x.rank)
    needs = (Same(), Same(), *window_needs(windows, x.cuts))
    gathered = plan_to_gather(x.topology, x.rank, x.shape, x.cuts, needs, x.cuts)
    inputs = gathered and x.messages(gathered)
    left = tuple(w.padding[0] if by_itself else 0 for w, by_itself in _padding(windows, x.cuts))
    return PlannedWindows(windows, shape, box, box.shape, inputs, left)


def gather_windows(x: DistTensor, plan: PlannedWindows, operator: str, fill: float = 0.0) -> Tensor:
    """Return the inputs of this rank's block of outputs, to which it applies the windows.

    All ranks call it. `fill` is the value of padding; the local operator adds `plan.left` itself. A
    rank without outputs gets the inputs of one window, and drops its output in `plan.outputs`.
    `operator` is the called function, under which the exchange is recorded.
    """
    buffer = gather_by(plan.inputs, x, x.cuts, operator, fill)
    if 0 not in plan.block:
        return buffer
    return filled_block(buffer, (1, buffer.shape[1], *(w.extent for w in plan.windows)))


def with_some_channel(x: Tensor) -> Tensor:
    """Return `x`; if it has no channels, which torch refuses, return an empty batch with one."""
    return x if x.shape[1] else x.reshape(0, 1, *x.shape[2:])


def window_needs(windows: Sequence[Window], cuts: Cuts) -> list[IndexMap]:
    """Return the index maps that gather inputs for windows over the last dimensions, cut by `cuts`.

    Along a dimension that is whole on every rank and padded alike on both sides the local operator
    pads by itself, which saves a copy.
    """
    return [Same() if by_itself else w for w, by_itself in _padding(windows, cuts)]


def _padding(windows: Sequence[Window], cuts: Cuts) -> list[tuple[Window, bool]]:
    """Return each window, with a flag: whether the local operator adds its padding."""
    last = cuts[len(cuts) - len(windows) :]
    return [
        (w, not axes and w.padding[0] == w.padding[1])
        for w, axes in zip(windows, last, strict=True)
    ]
