"""Fourier transforms, after a redistribution that partitions other dimensions instead.

Each rank then transforms some of the channels, for example, over all of space. If no other
dimension is large enough, the dimensions are transformed one after the other, each partitioned
while another is transformed. Results of inverse transforms are partitioned in space again.

Nothing is sent before the modes are read. A slice of few modes is computed without the others, and
so is the inverse transform of few modes that were assigned to zeros; see `ops/support/spectra.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.layout import Cuts, cutting_axes, default_cuts
from distconv.geometry.topology import Topology
from distconv.ops.support.arguments import any_type, check_on_meta, normalize_dims
from distconv.ops.support.operands import (
    apply_along,
    as_distributed,
    common_grid,
    filled_block,
    gather_whole,
    moved_elsewhere,
    uncut,
)
from distconv.ops.support.spectra import (
    AssignedSpectrum,
    FourierTransform,
    Spectrum,
    can_be_partial,
)
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute

_ALONG_OTHER_DIMENSIONS = {
    **{"fft": "fft", "rfft": "fft", "hfft": "fft"},
    **{"ifft": "ifft", "irfft": "ifft", "ihfft": "ifft"},
}
"""For each transform along the last dimension, the transform along all other dimensions."""


def _transform(function: Callable[..., Tensor], kind: str, last: Any) -> None:
    """Register the rule of `function` of torch.fft.

    `kind` is the name of the transform along one dimension, such as "rfft" for rfft2. `last` is the
    default of the argument `dim`, None for all dimensions.
    """
    name = function.__name__.removeprefix("fft_")

    @implements(function)
    def rule(
        input: DistTensor, n: Any = None, dim: Any = last, norm: str | None = None, s: Any = None
    ) -> Any:
        sizes = n if s is None else s
        sizes = tuple(sizes) if isinstance(sizes, Sequence) else sizes
        dim = tuple(dim) if isinstance(dim, Sequence) else dim
        check_on_meta(function, input, sizes, dim, norm)
        count = len(sizes) if dim is None and sizes is not None else input.dim()
        over = tuple(range(input.dim() - count, input.dim())) if dim is None else dim
        dims = normalize_dims(over, input.dim())
        lengths = (sizes,) if isinstance(sizes, int) else sizes
        of_dims = None if lengths is None else dict(zip(dims, lengths, strict=True))
        return _transformed(kind, name, input, dims, of_dims, norm)


for _kind, _functions in {
    "fft": (torch.fft.fft, torch.fft.fft2, torch.fft.fftn),
    "rfft": (torch.fft.rfft, torch.fft.rfft2, torch.fft.rfftn),
    "hfft": (torch.fft.hfft, torch.fft.hfft2, torch.fft.hfftn),
    "ifft": (torch.fft.ifft, torch.fft.ifft2, torch.fft.ifftn),
    "irfft": (torch.fft.irfft, torch.fft.irfft2, torch.fft.irfftn),
    "ihfft": (torch.fft.ihfft, torch.fft.ihfft2, torch.fft.ihfftn),
}.items():
    for _function, _last in zip(_functions, (-1, (-2, -1), None), strict=True):
        _transform(_function, _kind, _last)


def _transformed(
    kind: str,
    name: str,
    x: DistTensor,
    dims: Sequence[int],
    sizes: dict[int, int] | None,
    norm: str | None,
) -> DistTensor:
    """Return torch.fft's transform `kind`, such as "rfft", of `x` along `dims`. Collective.

    `name` is the function that the user called, for the records of redistributions. `sizes` has the
    length to which each dimension is cropped or padded first; -1, or None for all dimensions, keeps
    the length. `norm` is torch's.
    """
    steps, shape, cuts = _steps(kind, x, dims, sizes)
    positions = x.shape if kind in ("fft", "rfft") else shape
    lengths = {d: positions[d] for d in dims} | {d: n for d, n in (sizes or {}).items() if n >= 0}
    transform = FourierTransform(kind, name, lengths, norm)
    in_full = partial(_in_full, transform, steps, sizes, cuts)
    if isinstance(x.pending, AssignedSpectrum) and kind in ("ifft", "irfft"):
        made = x.pending.to_space(transform, cuts)
        return in_full(x) if made is None else made
    if can_be_partial(x, transform):
        example = x.example.new_empty(0, dtype=x.dtype.to_complex())
        return Spectrum(x, transform, in_full).tensor(shape, cuts, example)
    return in_full(x)


Step = tuple[Cuts, list[int]]
"""The cuts to which a tensor is redistributed, and the dimensions that are then transformed."""


def _in_full(
    transform: FourierTransform,
    steps: Sequence[Step],
    sizes: dict[int, int] | None,
    cuts: Cuts,
    x: DistTensor,
) -> DistTensor:
    """Return all elements of the transform of `x`, partitioned by `cuts`. Collective.

    Each of `steps` is a redistribution and a transform along some dimensions. `sizes` has the
    length to which each dimension is cropped or padded first.
    """
    kind, name, last = transform.kind, transform.name, next(reversed(transform.lengths))
    for moved, now in steps:
        x = redistribute(x, moved, name)
        function = getattr(torch.fft, f"{kind if last in now else _ALONG_OTHER_DIMENSIONS[kind]}n")
        lengths = None if sizes is None else [sizes[d] for d in now]
        x = apply_along(function, name, x, now, lengths, now, transform.norm)
    return redistribute(x, cuts, name)


def _steps(
    kind: str, x: DistTensor, dims: Sequence[int], sizes: dict[int, int] | None
) -> tuple[list[Step], tuple[int, ...], Cuts]:
    """Return the steps in which to transform `x` along `dims`, and the result's shape and cuts.

    Each step has the cuts to which to redistribute, and the dimensions to transform. `kind` is the
    name of the transform along one dimension. `sizes` has torch's length for each dimension: that
    to which the dimension is cropped or padded first, or for the last of `dims` in irfft and hfft
    that of the result. -1, or None for all dimensions, is torch's default. No communication.
    """
    last, topology, shape = dims[-1], x.grid.topology, list(x.shape)
    to_space = kind in ("ifft", "irfft")
    cuts = _in_space(x.cuts, dims, topology) if to_space else x.cuts
    own = x.cuts
    left = sorted(dims, key=lambda d: bool(cuts[d]))
    if kind in ("rfft", "ihfft"):  # whose input is real: the last dimension comes first
        left.sort(key=lambda d: d != last)
    elif kind in ("irfft", "hfft"):  # whose result is real: the last dimension comes last
        left.sort(key=lambda d: d == last)
    steps: list[Step] = []
    while left:
        now, moved = left, moved_elsewhere(shape, cuts, left, topology)
        if moved is None:
            whole = next(i for i, d in enumerate(left) if cuts[d])
            now = left[: max(whole, 1)]
            moved = moved_elsewhere(shape, cuts, now, topology)
        left = left[len(now) :]
        # If other dimensions are too small, the dimensions are gathered on every rank.
        cuts = own = moved or tuple(() if d in now else axes for d, axes in enumerate(own))
        steps.append((cuts, sorted(now, key=dims.index)))
        for d in now:
            n = shape[d] if sizes is None or sizes[d] < 0 else sizes[d]
            if d == last and kind in ("irfft", "hfft"):
                n = 2 * (shape[d] - 1) if sizes is None or sizes[d] < 0 else n
            shape[d] = n // 2 + 1 if d == last and kind in ("rfft", "ihfft") else n
    return steps, tuple(shape), _in_space(cuts, dims, topology) if to_space else cuts


def _in_space(cuts: Cuts, dims: Sequence[int], topology: Topology) -> Cuts:
    """Return `cuts` with each spatial dimension in `dims` partitioned over the axis of its name.

    Dimension height, for example, is partitioned over the grid axis "height", which no longer
    partitions another dimension. All other axes partition the same dimensions as before.
    """
    own = default_cuts(len(cuts), topology)
    own = tuple(axes if d in dims and d > 1 else () for d, axes in enumerate(own))
    taken = cutting_axes(own)
    rest = (tuple(a for a in axes if a not in taken) for axes in cuts)
    return tuple(mine + others for mine, others in zip(own, rest, strict=True))


def _shift(function: Callable[..., Tensor], before: int) -> None:
    @implements(function)
    def rule(input: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
        check_on_meta(function, any_type(input), dim)
        over = normalize_dims(dim, input.dim())
        shifts = {d: (input.shape[d] + before) // 2 for d in over}
        pending = input.pending if isinstance(input, DistTensor) else None
        if pending is not None and (torch.is_grad_enabled() or not pending.requires_grad):
            rolled: Tensor | None = pending.rolled(input, shifts)
            if rolled is not None:
                return rolled
        return torch.roll(input, list(shifts.values()), over)


_shift(torch.fft.fftshift, 0)
_shift(torch.fft.ifftshift, 1)


@implements(torch.stft, torch.Tensor.stft)
def stft(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
    arguments = [gather_whole(x, "stft") for x in args]
    named = {name: gather_whole(x, "stft") for name, x in kwargs.items()}
    d = input.dim() - 1
    return apply_along(torch.stft, "stft", input, [d], *arguments, dropped=[d], **named)


@implements(torch.istft, torch.Tensor.istft)
def istft(input: Tensor, *args: Any, **kwargs: Any) -> DistTensor:
    """Return the signals of (..., frequency, time) spectra; leading dimensions stay partitioned."""
    spectra = as_distributed(input, common_grid("istft", tensors_in(input, args, kwargs)))
    arguments = [gather_whole(x, "istft") for x in args]
    named = {name: gather_whole(x, "istft") for name, x in kwargs.items()}
    x = uncut(spectra, [input.dim() - 2, input.dim() - 1], "istft")
    block = filled_block(x.shard) if 0 in x.shard.shape and input.numel() else x.shard
    signal = torch.istft(block, *arguments, **named)
    shape, cuts = (*x.shape[:-2], signal.shape[-1]), (*x.cuts[:-2], ())
    own = tuple(slice(n) for n in x.shard.shape[:-2])
    return DistTensor(signal[own] if block is not x.shard else signal, shape, cuts, x.grid)
