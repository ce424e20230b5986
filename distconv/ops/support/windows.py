"""Sliding windows of convolution and pooling: the inputs that a rank needs, and their gathering."""

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
    """Return torch's window arguments as one `Window` for each of the last `n` dimensions.

    `ceil` is torch's `ceil_mode`. Raises RuntimeError if a number is unsupported by torch.
    """
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
    """Return a tuple each of the kernel sizes, strides, paddings and dilations of `windows`."""
    rows = [(w.kernel, w.stride, w.padding[0], w.dilation) for w in windows]
    return tuple(zip(*rows, strict=True))


class PlannedWindows(NamedTuple):
    """A plan by which one rank applies windows to the spatial dimensions of a partitioned tensor.

    Attributes
    ----------
    windows: one window for each spatial dimension.
    shape: the global shape of the result, which is partitioned as the tensor.
    box, block: this rank's box of the result, and the shape of this box.
    inputs: the plan that gathers the inputs of this rank's outputs; None if every rank has its own.
    left: for each spatial dimension, the padding that the local operator must add.
    """

    windows: tuple[Window, ...]
    shape: tuple[int, ...]
    box: Box
    block: tuple[int, ...]
    inputs: Plan | None
    left: tuple[int, ...]

    def outputs(self, made: Tensor) -> Tensor:
        """Return `made`, computed from the gathered inputs, as this rank's block of the result.

        A rank without outputs has computed the output of one window, which is dropped.
        """
        return made[:0].reshape(self.block) if 0 in self.block else made


@lru_cache(maxsize=4096)
def plan_windows(
    x: Placement, windows: tuple[Window, ...], channels: int | None = None
) -> PlannedWindows:
    """Return this rank's plan to apply `windows` to a tensor placed as `x`. No communication.

    The result has `channels` channels, by default the number of channels of the tensor.
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
    """Return the inputs, with halos, from which this rank computes its outputs. Collective.

    `fill` is the value of padding. The local operator must add the padding `plan.left` itself. A
    rank without outputs gets the inputs of one window, and `plan.outputs` drops the output.
    `operator` is the called function, under which the exchange is recorded.
    """
    buffer = gather_by(plan.inputs, x, x.cuts, operator, fill)
    if 0 not in plan.block:
        return buffer
    return filled_block(buffer, (1, buffer.shape[1], *(w.extent for w in plan.windows)))


def with_some_channel(x: Tensor) -> Tensor:
    """Return `x`; if it has no channels (torch raises), an empty batch with one channel."""
    return x if x.shape[1] else x.reshape(0, 1, *x.shape[2:])


def window_needs(windows: Sequence[Window], cuts: Cuts) -> list[IndexMap]:
    """Return the index maps by which to gather the inputs of `windows` over the last dimensions.

    `cuts` are the grid axes that partition each dimension of the tensor. A dimension that is not
    partitioned and has equal padding on both sides gets the map `Same`: the local operator adds its
    padding, which saves a copy.
    """
    return [Same() if by_itself else w for w, by_itself in _padding(windows, cuts)]


def _padding(windows: Sequence[Window], cuts: Cuts) -> list[tuple[Window, bool]]:
    """Return each window, with True if the local operator adds its padding, else with False.

    The windows are over the last of the dimensions that `cuts` partition.
    """
    last = cuts[len(cuts) - len(windows) :]
    return [
        (w, not axes and w.padding[0] == w.padding[1])
        for w, axes in zip(windows, last, strict=True)
    ]
