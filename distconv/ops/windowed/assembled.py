"""Windows applied to gathered buffers of inputs, for convolution and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from distconv.geometry.index_maps import IndexMap, Same
from distconv.geometry.layout import Cuts
from distconv.geometry.windows import Window
from distconv.ops.support.argument_forms import Sizes, to_tuple
from distconv.ops.support.operands import box_on_rank, filled_block
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs


def make_windows(
    kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil: bool, n: int
) -> list[Window]:
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
        raise RuntimeError(f"{largest} is too large for a window; torch takes less than 2**31")
    return [
        Window(k, s, d, (p, p), ceil)
        for k, s, p, d in zip(kernels, strides, paddings, dilations, strict=True)
    ]


def window_arguments(windows: Sequence[Window]) -> tuple[tuple[int, ...], ...]:
    """Return kernels, strides, paddings and dilations, as torch's functions take them."""
    rows = [(w.kernel, w.stride, w.padding[0], w.dilation) for w in windows]
    return tuple(zip(*rows, strict=True))


def output_shape(channels: int, x: DistTensor, windows: Sequence[IndexMap]) -> tuple[int, ...]:
    """Return the global shape, with `channels` channels, of windows over the spatial dimensions."""
    spatial = zip(windows, x.shape[2:], strict=True)
    return (x.shape[0], channels, *(w.output_size(n) for w, n in spatial))


def apply_windows(
    x: DistTensor,
    windows: Sequence[Window],
    shape: tuple[int, ...],
    operator: str,
    compute: Callable[[Tensor, tuple[int, ...]], Tensor],
    *,
    fill: float = 0.0,
) -> DistTensor:
    """Return the result of windows over the spatial dimensions of `x`. All ranks call it.

    Each rank gathers the inputs of its block of outputs, with `fill` for padding, and calls
    `compute`.

    Parameters
    ----------
    shape: the global shape of the result.
    operator: the called function, under which the exchange is recorded.
    compute: the local operator. It takes the buffer, and for each dimension the padding that it
        must add itself.
    """
    needs = (Same(), Same(), *window_needs(windows, x.cuts))
    buffer = gather_inputs(x, needs, x.cuts, operator, fill)
    block = box_on_rank(shape, x.cuts, x.grid).shape
    left = tuple(w.padding[0] if by_itself else 0 for w, by_itself in _padding(windows, x.cuts))
    if prod(block) == 0:
        window = filled_block(buffer, (1, buffer.shape[1], *(w.extent for w in windows)))
        shard = compute(window, left)[:0].reshape(block)
    else:
        shard = compute(buffer, left)
    return DistTensor(shard, shape, x.cuts, x.grid)


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
