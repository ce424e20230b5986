"""Views by sliding windows (Tensor.unfold), and of complex numbers as pairs of reals and back."""

from __future__ import annotations

import torch

from distconv.geometry.index_maps import IndexMap, Same
from distconv.geometry.windows import Window
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import box_on_rank, empty_block, uncut
from distconv.tensor.aliasing import make_view
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, overwrite


@implements(torch.Tensor.unfold)
def unfold(input: DistTensor, dimension: int, size: int, step: int) -> DistTensor:
    shape = check_on_meta(torch.Tensor.unfold, any_type(input), dimension, size, step)
    d = normalize_dim(dimension, input.dim())
    needs: list[IndexMap] = [Same()] * input.dim()
    moved = bool(input.dim() and input.cuts[d])
    if moved:
        needs[d] = Window(size, step)
    buffer = gather_inputs(input, needs, input.cuts, "unfold")
    cuts = (*input.cuts, ()) if input.dim() else ((),)
    block = box_on_rank(shape, cuts, input.grid).shape
    if moved and 0 in block:
        shard = empty_block(buffer, block)
    else:
        shard = buffer.unfold(d, size, step) if moved else input.shard.unfold(d, size, step)

    def write(base: DistTensor, view: DistTensor) -> None:
        for i in range(size):
            run = slice(i, i + (shape[d] - 1) * step + 1, step)
            base[(*(slice(None),) * d, run)] = view[..., i]

    return make_view(
        input,
        shard,
        shape,
        cuts,
        lambda base: unfold(base, dimension, size, step),
        write if moved else None,
        writable=step >= size or shape[d] == 1,
    )


@implements(torch.view_as_real)
def view_as_real(input: DistTensor) -> DistTensor:
    shape = check_on_meta(torch.view_as_real, input)
    shard = torch.view_as_real(input.shard)
    return make_view(input, shard, shape, (*input.cuts, ()), view_as_real)


@implements(torch.view_as_complex)
def view_as_complex(input: DistTensor) -> DistTensor:
    shape = check_on_meta(torch.view_as_complex, input)
    x = uncut(input, [input.dim() - 1], "view_as_complex")
    # Whether the numbers of a block are stored in pairs may differ between ranks.
    shard = torch.view_as_complex(x.shard.contiguous())

    def write(base: DistTensor, view: DistTensor) -> None:
        overwrite(base, view_as_real(view), "view_as_complex")

    return make_view(input, shard, shape, x.cuts[:-1], view_as_complex, write)
