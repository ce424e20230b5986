"""Views of DistTensors, and in-place writes through views whose elements are on other ranks.

Such a view has a `ViewRecipe`: its base, and a function that recomputes the view from the base. A
write to the view also updates the base at once, and the base's own base. Other views of that base
are recomputed when they are next read, as in torch's functionalization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.layout import Cuts
from distconv.tensor.base import Distributed, DistTensorBase, ViewRecipe
from distconv.tensor.dispatch import refuse


def make_view(
    x: Distributed,
    shard: Tensor,
    shape: Sequence[int],
    cuts: Cuts,
    make: Callable[[Any], DistTensorBase],
    write: Callable[[Any, Any], object] | None = None,
    *,
    writable: bool = True,
    place: Any = None,
) -> Distributed:
    """Return a view of `x` with local block `shard` and global shape `shape`.

    Parameters
    ----------
    cuts: the grid axes that partition each dimension of the view.
    make: a function that recomputes the view from `x`, or from a tensor that replaces `x`.
    write: `write(base, view)` copies the elements of a view into its base. None only if `shard`
        shares the memory of `x` on every rank.
    writable: False if several elements of the view are one element of `x`, as after `expand`.
    place: for `x[indices]` the indices, by which `x[i] += y` recognises its own view; else None.
    """
    view = type(x)(shard, shape, cuts, x.grid)
    if write is None and writable and x.recipe is None:
        view._memory = x._memory
        return view
    if write is None:
        view._memory = x._memory
        view._memory.note(view)
    else:
        view._memory = x._memory.copy(view)
    view.recipe = ViewRecipe.now(x, make, write, writable, place)
    return view


def make_fork(x: Distributed, shard: Tensor, shape: Sequence[int], cuts: Cuts) -> Distributed:
    """Return a result that is in serial torch a view or a copy of `x`, depending on strides.

    The result has the block `shard`, the global `shape`, and is partitioned by `cuts`. While both
    tensors are in use, `prepare_write` raises an error for both.
    """
    if shard is x.shard and shard.requires_grad:
        # A node of its own, as on ranks that copied. torch calls the hooks of a leaf, which may
        # send messages, as soon as all nodes that read the leaf have run.
        shard = shard.view_as(shard)
    twin = type(x)(shard, shape, cuts, x.grid)
    twin._memory = x._memory.fork()
    return twin


def is_of_parameter(x: DistTensorBase) -> bool:
    """Return whether `x` is a sharded parameter, a view or an `empty_like` of a sharded parameter.

    Such a tensor is filled with the random numbers of serial torch.
    """
    memory = x.__dict__.get("_memory")
    return memory is not None and memory.of_parameter


def mark_of_parameter(x: DistTensorBase) -> None:
    """Mark `x` and all its views as a sharded parameter, for `is_of_parameter`."""
    x._memory.of_parameter = True


def prepare_write(x: DistTensorBase, operator: str) -> None:
    """Check that `x` may be written in place, and make sure that it has a block. Collective.

    The writing function `operator` must call `update_views(x)` after the write. Raises
    UnsupportedOperation or RuntimeError on every rank, before any message, if serial torch forbids
    the write, or if other tensors might have to change with `x`.
    """
    memory = x.__dict__.get("_memory")
    if memory is not None and not memory.alone:
        refuse(
            operator,
            "the tensor is written in place while another view is in use that serial torch, "
            "depending on strides, may have copied",
            x,
            way_out="Use the function that returns a new tensor, .clone() one of the two, or "
            ".view() instead of .reshape()",
        )
    if memory is not None and memory.leaf and x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{operator}: a leaf that requires gradients, or a view of it, is written in place; do "
            "it under torch.no_grad(), or to x.clone()"
        )
    if x.recipe is not None:
        _check_bases(x, operator)
    x.__dict__.pop("_redistributed", None)
    x.materialize()
    if memory is not None:
        memory.keep_for_readers()


def _check_bases(x: DistTensorBase, operator: str) -> None:
    """Raise if serial torch forbids `operator` to write to the view `x` because of its bases.

    The bases are the tensor of which `x` is a view, the base of that tensor, and so on.
    """
    recorded, view = torch.is_grad_enabled(), x
    while (recipe := view.recipe) is not None:
        if not recipe.writable:
            refuse(
                operator,
                "several elements of the view that is written in place are the same element of "
                "its base",
                x,
                way_out="Use the function that returns a new tensor, or .clone() the view",
            )
        view = recipe.base
        if recorded and view.requires_grad and not recipe.recorded:
            raise RuntimeError(
                f"{operator}: a view was made under torch.no_grad() and is written in place with "
                "gradients enabled; create the view with gradients enabled, or write to "
                "view.detach()"
            )
    if recorded and view.requires_grad and view.is_leaf:
        raise RuntimeError(
            f"{operator}: a view of a leaf that requires gradients is written in place; do it "
            "under torch.no_grad(), or to a view of x.clone()"
        )


def update_views(x: DistTensorBase) -> None:
    """Update, after a write to `x`, all tensors that share its memory in serial torch.

    Views with elements on other ranks are recomputed when they are next read. If `x` is itself a
    view of elements on other ranks, its elements are written to its base. Collective in this case.
    """
    if x.held.requires_grad:
        x.sync_requires_grad()
    memory = x.__dict__.get("_memory")
    if memory is None:
        return
    for follower in memory.followers():
        follower.outdate()
    view, recipe = x, x.recipe
    while recipe is not None and recipe.write is None:
        view, recipe = recipe.base, recipe.base.recipe
    if recipe is not None and recipe.write is not None:
        value = type(view)(view.shard, view.shape, view.cuts, view.grid)
        memory.newest = True
        try:
            recipe.write(recipe.base, value)
        finally:
            memory.newest = False
