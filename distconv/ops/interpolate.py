"""F.interpolate on partitioned planes: outputs are weighted sums of inputs along each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.packing import has_channels_last
from distconv.device.kinds import remembered
from distconv.geometry.index_maps import Same
from distconv.geometry.layout import Box
from distconv.geometry.resampling import Resampled
from distconv.ops.support.arguments import TensorMeta, check_on_meta
from distconv.ops.support.operands import (
    box_on_rank,
    empty_block,
    to_accumulation_type,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs
from distconv.torch_private import upsampling

_MODES = {"linear": "linear", "bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}


@implements(F.interpolate, F.upsample)
def interpolate(
    input: DistTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> DistTensor:
    """Resample the spatial dimensions to a size or by a factor, in torch's modes. Collective."""
    arguments: Any = (mode, align_corners, recompute_scale_factor, antialias)
    _check_input(input, mode)
    # The check fails for an empty batch.
    sample = TensorMeta((1, *input.shape[1:]))
    checked = check_on_meta(F.interpolate, sample, size, scale_factor, *arguments)
    shape = (input.shape[0], *checked[1:])
    if mode == "area":
        pool: Any = {3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}
        averaged: DistTensor = pool[input.dim()](input, shape[2:])
        return averaged
    if 0 in shape[2:]:
        raise RuntimeError(
            f"interpolate: the result {shape} has no elements; expected 1 or more in every "
            "dimension"
        )
    scales = _scales(None if recompute_scale_factor else scale_factor, len(shape) - 2)
    maps = _index_maps(input, shape, scales, mode, bool(align_corners), antialias)
    _refuse_ambiguous(input, shape, scale_factor, maps)
    if antialias:
        _refuse_one_column(input, shape)
    box = box_on_rank(shape, input.cuts, input.grid)
    if not any(input.cuts[2:]):
        if 0 in box.shape:
            return DistTensor(empty_block(input.shard, box.shape), shape, input.cuts, input.grid)
        shard = F.interpolate(input.shard, size, scale_factor, *arguments)
        return DistTensor(shard, shape, input.cuts, input.grid)
    _check_type_on_partitioned_plane(input, mode)
    if antialias:
        _refuse_unlike_gradient(input, shape, scales)
    elif mode == "bicubic" and shape[2:] == input.shape[2:]:
        _refuse_copied_gradient(input, scales)
    needs = [m if axes else Same() for m, axes in zip(maps, input.cuts[2:], strict=True)]
    buffer = gather_inputs(input, (Same(), Same(), *needs), input.cuts, "interpolate")
    if 0 in box.shape:
        shard = empty_block(buffer, box.shape)
    else:
        shard = _of_buffer(buffer, input, box, maps, scales, mode, align_corners, antialias)
    return DistTensor(shard, shape, input.cuts, input.grid)


def _check_input(input: DistTensor, mode: str) -> None:
    """Raise for a type that torch does not interpolate, and for an input without elements."""
    of_bytes = mode.startswith("nearest") or mode in ("bilinear", "bicubic")
    if not (input.is_floating_point() or (input.dtype == torch.uint8 and of_bytes)):
        raise NotImplementedError(
            f"interpolate: mode={mode!r} is not implemented for {input.dtype}; convert it, "
            "x.float()"
        )
    if mode != "area" and 0 in input.shape[1:]:
        raise RuntimeError(
            f"interpolate: {tuple(input.shape)} has no elements; expected 1 or more in every "
            "dimension but the first"
        )


def _scales(scale_factor: float | Sequence[float] | None, spatial: int) -> list[float | None]:
    """Return the scale factor of each spatial dimension; None where sizes determine the scale."""
    if isinstance(scale_factor, Sequence):
        return list(scale_factor)
    return [scale_factor] * spatial


def _index_maps(
    input: DistTensor,
    shape: Sequence[int],
    scales: Sequence[float | None],
    mode: str,
    align_corners: bool,
    antialias: bool,
) -> list[Resampled]:
    """Return, for each spatial dimension of the result `shape`, the map from outputs to inputs.

    A map gives the inputs that each output needs, and their weights.
    """
    along = partial(
        Resampled,
        mode=_MODES.get(mode, mode),
        align_corners=align_corners,
        antialias=antialias,
        precision="float64" if input.dtype == torch.float64 else "float32",
        accelerator=input.grid.computes_on_gpu,
        planar=len(shape) == 4,
    )
    return [along(n, s) for n, s in zip(shape[2:], scales, strict=True)]


def _refuse_ambiguous(
    input: DistTensor, shape: Sequence[int], scale_factor: Any, maps: Sequence[Resampled]
) -> None:
    """Raise UnsupportedOperation if torch's kernels disagree about the nearest inputs."""
    for cut, index_map, size in zip(input.cuts[2:], maps, input.shape[2:], strict=True):
        doubtful = bool(cut) if input.grid.computes_on_gpu else len(maps) != 2
        if doubtful and index_map.ambiguous(size):
            refuse(
                "interpolate",
                f"from {tuple(input.shape[2:])} to {shape[2:]} with scale_factor={scale_factor!r} "
                "torch's kernels disagree about the nearest element",
                input,
                way_out="Pass another size=, or recompute_scale_factor=True",
            )


def _refuse_one_column(input: DistTensor, shape: Sequence[int]) -> None:
    """Raise UnsupportedOperation for antialiasing to one column: memory formats would matter.

    A block of one channel counts as contiguous even if the global tensor has channels last.
    """
    if any(input.cuts[1:]) and shape[3] == 1 and shape[2] not in (1, input.shape[2]):
        reason = "torch repeats the first row of an antialiased plane of one column"
        refuse("interpolate", reason, input, way_out="Transpose the plane, x.mT, and the result")


def _check_type_on_partitioned_plane(input: DistTensor, mode: str) -> None:
    """Raise UnsupportedOperation for a type that is unsupported on a partitioned plane."""
    if not (input.is_floating_point() or mode.startswith("nearest")):
        reason = f"mode={mode!r} of {input.dtype} on a partitioned plane is not supported"
        refuse("interpolate", reason, input, way_out="Convert it, x.float(), and round the result")


def _refuse_unlike_gradient(
    input: DistTensor, shape: Sequence[int], scales: Sequence[float | None]
) -> None:
    """Raise UnsupportedOperation if torch copies a dimension, but resamples its gradient.

    torch does so with antialiasing, for a scale other than 1 that keeps the size of a dimension.
    """
    for axes, size, made, scale in zip(
        input.cuts[2:], input.shape[2:], shape[2:], scales, strict=True
    ):
        if axes and size == made and scale not in (None, 1):
            refuse(
                "interpolate",
                f"torch copies the {size} rows that scale_factor={scale} leaves antialiased, but "
                "its gradient resamples them",
                input,
                way_out="Pass size=, or recompute_scale_factor=True",
            )


def _refuse_copied_gradient(input: DistTensor, scales: Sequence[float | None]) -> None:
    """Raise UnsupportedOperation if torch resamples a plane, but copies its gradient.

    torch does so in the bicubic mode, for `scales` other than 1 that keep both sizes.
    """
    if any(scale not in (None, 1) for scale in scales):
        refuse(
            "interpolate",
            f"torch resamples a plane whose sizes scale_factor={tuple(scales)} keeps, but copies "
            "its gradient",
            input,
            way_out="Pass size=, or recompute_scale_factor=True",
        )


def _of_buffer(
    buffer: Tensor,
    input: DistTensor,
    box: Box,
    maps: Sequence[Resampled],
    scales: Sequence[float | None],
    mode: str,
    align_corners: bool | None,
    antialias: bool,
) -> Tensor:
    """Return this rank's outputs, which are those in `box`, from a buffer of their inputs.

    A dimension that is not partitioned, or for which torch's kernel computes the same from the
    buffer as from the global plane (`Resampled.alone`), is left to torch's kernel. Other dimensions
    are resampled before, one after the other. `maps` and `scales` have an item for each spatial
    dimension.
    """
    scales, spatial = list(scales), len(maps)
    made, surplus, done = list(box.shape[2:]), [0] * spatial, 0
    for i, resampled in enumerate(maps):
        if not input.cuts[i + 2]:
            continue
        outputs = input.shape[i + 2], box.start[i + 2], box.stop[i + 2]
        alone = resampled.alone(*outputs)
        if alone is not None:
            surplus[i], scales[i] = alone
            made[i] += surplus[i]
        else:
            buffer, scales[i] = _resample(buffer, i + 2, resampled, *outputs), None
            done += 1
    if done < spatial:
        kernel = upsampling(mode, antialias, spatial)
        corners = () if mode.startswith("nearest") else (bool(align_corners),)
        if antialias and made[1] == 1:  # torch's kernel repeats the first row, though not of a row
            turned = kernel(buffer.transpose(2, 3), made[::-1], *corners, *scales[::-1])
            buffer = turned.transpose(2, 3)
        else:
            buffer = kernel(buffer, made, *corners, *scales)
    if any(surplus):
        # The gradient of negative padding keeps the memory format, unlike a slice's.
        buffer = F.pad(buffer, [n for before in reversed(surplus) for n in (-before, 0)])
    return buffer.to(input.dtype)


def _resample(
    buffer: Tensor, d: int, resampled: Resampled, size: int, start: int, stop: int
) -> Tensor:
    """Return the outputs [start, stop) along dimension `d`, from a buffer of their inputs.

    `resampled` gives the inputs and weights of each output; `size` is the number of inputs along
    `d` in the global plane.
    """
    first = resampled.intervals(size, start, stop)[0][0]
    if not resampled.mode.startswith("nearest"):
        buffer = to_accumulation_type(buffer)
    taps = _taps(buffer.device, resampled, size, start, stop, first, buffer.dtype)
    if resampled.mode.startswith("nearest"):
        return _select(buffer, d, taps[0][0])
    column = (1,) * d + (-1,) + (1,) * (buffer.dim() - d - 1)
    total: Tensor | None = None
    for index, of_outputs in taps:
        weight = of_outputs.view(column)
        term = _select(buffer, d, index) * weight
        if resampled.antialias:  # some filters are shorter than the longest
            term = torch.where(weight == 0, 0, term)
        total = term if total is None else total + term
    assert total is not None
    return total


def _select(buffer: Tensor, d: int, index: Tensor) -> Tensor:
    """Return the rows `index` along spatial dimension `d`, in the memory format of the buffer."""
    if not has_channels_last(buffer):
        return buffer.index_select(d, index)
    return buffer.movedim(1, -1).index_select(d - 1, index).movedim(-1, 1)


@remembered
def _taps(
    device: torch.device,
    resampled: Resampled,
    size: int,
    start: int,
    stop: int,
    first: int,
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """Return a pair of vectors on `device` for each tap: positions of inputs, and their weights.

    Tap k has the k-th input of every output in [start, stop) along one dimension. Positions are
    counted from input `first`, the first one in the buffer; `size` is the number of inputs in the
    global plane.
    """
    pairs = zip(*(array.T for array in resampled.taps(size, start, stop)), strict=True)
    return [
        (torch.from_numpy(positions - first).to(device), torch.tensor(weights).to(device, dtype))
        for positions, weights in pairs
    ]
