"""Views of DistTensors, and writing in place through views whose elements lie on other ranks.

Such a view is a recipe: a base, and a function that makes the view of it. A write to the view is
applied to the base at once, and from there to the base's base; all other views with elements on
other ranks are made anew when they are next read, as torch's functionalization does it.
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
    """Return a view of `x` with local block `shard`, global shape `shape` and cuts `cuts`.

    Parameters
    ----------
    make: returns the view of a tensor like `x`.
    write: writes the elements of a view to a tensor like `x`. Needed, from global metadata, where
        the block may be a copy; None where it shares the memory of `x` on every rank.
    writable: whether all elements of the view are distinct elements of `x`.
    place: for a part of `x`, the positions of its elements.
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
    """Return a result that serial torch makes as a view of `x` or as a copy, depending on its
    strides.

    `prepare_write` refuses to write to either while the other is in use.
    """
    twin = type(x)(shard, shape, cuts, x.grid)
    twin._memory = x._memory.fork()
    return twin


def is_of_parameter(x: DistTensorBase) -> bool:
    """Return whether `x` is a sharded parameter, a view, or an empty tensor made from one."""
    memory = x.__dict__.get("_memory")
    return memory is not None and memory.of_parameter


def mark_of_parameter(x: DistTensorBase) -> None:
    """Mark a tensor, and its views, as belonging to a parameter (see `is_of_parameter`)."""
    x._memory.of_parameter = True


def prepare_write(x: DistTensorBase, operator: str) -> None:
    """Bring the block of `x` to this rank for a write by `operator`, which calls `finish_write`
    then.

    Raises UnsupportedOperation or RuntimeError on every rank, before any message, where serial
    torch does not allow the write, or where it might write to other tensors as well.
    """
    memory = x.__dict__.get("_memory")
    if memory is not None and not memory.alone:
        refuse(
            operator,
            "the tensor is written in place while a view of it is in use that serial torch, by its "
            "strides, may have copied",
            x,
            way_out="Use the function that returns a new tensor, .clone() one of the two, or "
            ".view() in place of .reshape()",
        )
    if x.recipe is not None:
        _check_bases(x, operator)
    x.__dict__.pop("_redistributed", None)
    x.settle()


def _check_bases(x: DistTensorBase, operator: str) -> None:
    """Raise where one of the bases of a view forbids writing to it."""
    recorded, view = torch.is_grad_enabled(), x
    while (recipe := view.recipe) is not None:
        if not recipe.writable:
            refuse(
                operator,
                "elements of the view that is written in place are one and the same of its base",
                x,
                way_out="Use the function that returns a new tensor, or .clone() the view",
            )
        view = recipe.base
        if recorded and view.requires_grad and not recipe.recorded:
            raise RuntimeError(
                f"{operator}: a view was made under torch.no_grad() and is written in place with "
                "gradients recorded; make it where they are, or write to view.detach()"
            )
    if recorded and view.requires_grad and view.is_leaf:
        raise RuntimeError(
            f"{operator}: a view of a leaf that requires gradients is written in place; do it "
            "under torch.no_grad(), or to a view of x.clone()"
        )


def finish_write(x: DistTensorBase) -> None:
    """Update all tensors that share the memory of `x` in serial torch after a write to `x`.

    Views on other ranks are made anew when they are read. Where `x` is such a view, its elements
    are written to its base; all ranks call it together then.
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
