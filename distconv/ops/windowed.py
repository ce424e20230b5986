"""What convolution and pooling share: buffers of needed inputs, and empty blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from math import prod
from typing import Any, TypeVar, cast

from torch import Tensor

from distconv.boundary import reaches
from distconv.exchange import empty
from distconv.layout import Cuts
from distconv.method import forced
from distconv.ops.align import Placement, box_of, common_grid, distributed
from distconv.ops.checked import autocast_type
from distconv.ops.overlap import may_overlap
from distconv.tensor import DistTensor, gathered
from distconv.whole import whole_numbers
from distconv.window import IndexMap, Same, Window

Sizes = int | Sequence[int]


def tuple_of(value: Sizes, n: int, what: str) -> tuple[int, ...]:
    """One number for each of `n` spatial dimensions."""
    numbers = whole_numbers(value, what)
    if len(numbers) == 1:
        return numbers * n
    if len(numbers) != n:
        raise RuntimeError(f"{what}={numbers} has {len(numbers)} values, expected {n}")
    return numbers


def windows_of(
    kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil: bool, n: int
) -> list[Window]:
    """The windows over the last `n` dimensions, padded on both sides alike."""
    kernels = tuple_of(kernel, n, "kernel_size")
    strides = (
        kernels
        if stride is None or (isinstance(stride, (tuple, list)) and not stride)
        else tuple_of(stride, n, "stride")
    )
    paddings, dilations = tuple_of(padding, n, "padding"), tuple_of(dilation, n, "dilation")
    largest = max(*kernels, *strides, *paddings, *dilations)
    if n > 1 and largest >= 2**31:
        raise RuntimeError(f"{largest} is too large for a window; torch takes less than 2**31")
    return [
        Window(k, s, d, (p, p), ceil)
        for k, s, p, d in zip(kernels, strides, paddings, dilations, strict=True)
    ]


def arguments_of(windows: Sequence[Window]) -> tuple[tuple[int, ...], ...]:
    """Kernels, strides, paddings and dilations, as torch's functions take them."""
    rows = [(w.kernel, w.stride, w.padding[0], w.dilation) for w in windows]
    return tuple(zip(*rows, strict=True))


Rule = TypeVar("Rule", bound=Callable[..., Any])


def batched(name: str, spatial: int) -> Callable[[Rule], Rule]:
    """Let a rule for (sample, channel, *spatial) take a single sample without the first dimension.

    As in torch, that is a mini-batch of one; its dimensions are cut as they are.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def either(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if input.dim() == spatial + 2:
                return rule(input, *args, **kwargs)
            if input.dim() != spatial + 1:
                raise RuntimeError(
                    f"{name}: expected {spatial + 1} or {spatial + 2} dimensions, got the input "
                    f"{tuple(input.shape)}"
                )
            result = rule(input.unsqueeze(0), *args, **kwargs)
            if isinstance(result, tuple):
                return tuple(part.squeeze(0) for part in result)
            return result.squeeze(0)

        return cast(Rule, either)

    return decorate


def same_types(name: str, *tensors: Tensor | None) -> None:
    """Raise on every rank where torch would on those with elements: for types that differ."""
    given = [t for t in tensors if t is not None]
    kinds = {t.dtype for t in given}
    if len(kinds) > 1 and autocast_type(given[0]) is None:
        raise RuntimeError(
            f"{name}: input, weight and bias have the types "
            f"{', '.join(str(t.dtype) for t in given)}; convert them to one"
        )


def input_of(name: str, input: Tensor, *parameters: Tensor | None) -> DistTensor:
    """The input, distributed on one grid with its parameters, and of the same type as they."""
    x = distributed(input, common_grid(name, (input, *parameters)))
    same_types(name, x, *parameters)
    return x


def output_shape(channels: int, x: DistTensor, windows: Sequence[IndexMap]) -> tuple[int, ...]:
    """The global shape that windows over the last dimensions of `x` make."""
    spatial = zip(windows, x.shape[2:], strict=True)
    return (x.shape[0], channels, *(w.output_size(n) for w, n in spatial))


def pooled_type(name: str, input: DistTensor, implemented: bool) -> None:
    """Raise for a type that torch does not pool, on ranks without elements too."""
    if not implemented:
        raise NotImplementedError(
            f"{name}: not implemented for {input.dtype}; convert it, x.float()"
        )


def some_channel(x: Tensor) -> Tensor:
    """`x` itself, or its empty batch with one channel: torch pools nothing without channels."""
    return x if x.shape[1] else x.reshape(0, 1, *x.shape[2:])


def unread(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """What torch's backward passes of pooling take for inputs, of which they read the shape alone.

    On GPUs they take the order of dimensions from it as well, and make it contiguous first.
    """
    return empty(shape, like) if like.is_cuda else like.new_empty(()).expand(shape)


_POOLED = 2**16
"""Elements of a rank's block from which pooling while halos travel was measured to cost less."""


def overlapping_ceil_mode(x: DistTensor, windows: Sequence[Window]) -> bool | None:
    """With which ceil mode to pool a block of `x` while halos travel; None where it is assembled.

    The same on all ranks: that with which the local operator makes just the outputs of each block.
    """
    return _overlapping_ceil_mode(Placement.of(x), tuple(windows), forced())


@lru_cache(maxsize=4096)
def _overlapping_ceil_mode(
    x: Placement, windows: tuple[Window, ...], method: str | None
) -> bool | None:
    if not may_overlap(x, method, _POOLED):
        return None
    parts = tuple(map(x.topology.parts, x.cuts[2:]))
    for ceil_mode in (False, True):
        if reaches(windows, x.shape[2:], parts, pooled=True, ceil_mode=ceil_mode):
            return ceil_mode
    return None


def apply_windows(
    x: DistTensor,
    windows: Sequence[Window],
    shape: tuple[int, ...],
    operator: str,
    compute: Callable[[Tensor, tuple[int, ...]], Tensor],
    *,
    fill: float = 0.0,
) -> DistTensor:
    """A windowed operator over the spatial dimensions of `x`, assembled.

    Each rank gathers the inputs that its block of outputs needs, with `fill` where they are
    padding, and runs the local operator on them.

    Parameters
    ----------
    shape: the global shape of the result.
    compute: takes the buffer and the padding, per dimension, that is left to it.
    """
    needs = (Same(), Same(), *needs_of(windows, x.cuts))
    buffer = gathered(x, needs, x.cuts, operator, fill)
    block = box_of(shape, x.cuts, x.grid).shape
    return DistTensor(
        windowed_block(buffer, windows, x.cuts, block, compute), shape, x.cuts, x.grid
    )


_FAR = 2**16
"""How far a window needs to move at most to leave a plane without elements."""


def needs_of(windows: Sequence[Window], cuts: Cuts) -> list[IndexMap]:
    """The inputs to gather for windows over the last dimensions, which are cut by the last `cuts`.

    Along a dimension that is whole on every rank and padded alike on both sides the local operator
    pads by itself, which saves a copy.
    """
    return [Same() if by_itself else w for w, by_itself in _padding(windows, cuts)]


def windowed_block(
    buffer: Tensor,
    windows: Sequence[Window],
    cuts: Cuts,
    block: tuple[int, ...],
    compute: Callable[[Tensor, tuple[int, ...]], Tensor],
) -> Tensor:
    """What the local operator makes of inputs that were gathered by `needs_of`: a block."""
    left = tuple(w.padding[0] if by_itself else 0 for w, by_itself in _padding(windows, cuts))
    if prod(block) == 0:
        # The local operator refuses empty planes, but not an empty batch.
        extents = [w.extent + min(w.stride, _FAR) for w in windows]
        buffer = buffer.reshape(0, buffer.shape[1], *extents)
        return compute(buffer, left).reshape(block)
    return compute(buffer, left)


def _padding(windows: Sequence[Window], cuts: Cuts) -> list[tuple[Window, bool]]:
    """Each window, and whether the local operator pads by itself there."""
    last = cuts[len(cuts) - len(windows) :]
    return [
        (w, not axes and w.padding[0] == w.padding[1])
        for w, axes in zip(windows, last, strict=True)
    ]
