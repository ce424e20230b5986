"""Views of DistTensors, and writing in place where a view lies on other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distconv.geometry.layout import Cuts
from distconv.tensor.base import Distributed, DistTensorBase
from distconv.tensor.dispatch import refuse


def make_view(
    x: Distributed, shard: Tensor, shape: Sequence[int], cuts: Cuts, *, copied: bool
) -> Distributed:
    """Return what torch makes a view of `x`, with this shard, shape and these cuts.

    `copied` says that its elements may lie elsewhere than those of `x`, which has to follow from
    global metadata. Writing to one of the two is then refused for as long as the other is in use
    (`check_writable`).
    """
    view = type(x)(shard, shape, cuts, x.grid)
    view._memory = x._memory.copy() if copied else x._memory
    return view


def check_writable(x: DistTensorBase, operator: str) -> None:
    """Refuse an in-place operation that serial torch would let a view, here a copy, see as well."""
    x._redistributed.clear()
    x.settle()
    if not x._memory.alone:
        refuse(
            operator,
            "the tensor is written in place while a view of it, or a tensor that it is a view of, "
            "is in use; their elements lie on different ranks",
            x,
            way_out="Use the function that returns a new tensor, or .clone() the view; where "
            "parallelize(layouts=...) has made it, let the layout begin one module later",
        )
