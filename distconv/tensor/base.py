"""The base of DistTensor: its shard, its cuts, its grid, and its metadata, without any operator.

Modules below `dist_tensor` know a DistTensor by this base; the tensors that they make of one are of
its own type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module

from distconv import torch_private
from distconv.geometry.layout import (
    Box,
    Cuts,
    Layout,
    cutting_axes,
    rank_box,
)
from distconv.grid.interface import Grid
from distconv.grid.whereabouts import module_calls, on_behalf_of
from distconv.tensor.shared_memory import SharedMemory

Distributed = TypeVar("Distributed", bound="DistTensorBase")
"""A type of DistTensor that a function returns as it is given."""


Layout.dense = torch.strided


class ViewRecipe(NamedTuple):
    """How a view is made of its base again, and how what is written to it reaches the base.

    base: the tensor that it is a view of.
    make: returns the view of a base. All ranks call it together where elements move.
    write: writes the elements of a view, given as a tensor of their own, to the base; all ranks
        call it together. None where writing to the one is writing to the other.
    writable: whether the elements of the view are different ones of the base.
    place: of a part the places of the base's elements that it has.
    recorded, inference: whether autograd records the view, and whether it is made in inference
        mode, as when it was made first.
    modules: the calls of modules on whose behalf it is made, where that is not now.
    """

    base: DistTensorBase
    make: Callable[[Any], DistTensorBase]
    write: Callable[[Any, Any], object] | None
    writable: bool
    place: Any
    recorded: bool
    inference: bool
    modules: list[Module] | None = None

    @classmethod
    def now(
        cls,
        base: DistTensorBase,
        make: Callable[[Any], DistTensorBase],
        write: Callable[[Any, Any], object] | None,
        writable: bool = True,
        place: Any = None,
    ) -> ViewRecipe:
        """Return a recipe in the present modes of autograd."""
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(base, make, write, writable, place, *modes)

    def follow(self) -> Tensor:
        """Return the block of the view; all ranks call it together where elements move."""
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.recorded),
            nullcontext() if self.modules is None else on_behalf_of(self.modules),
        ):
            return self.make(self.base).shard


class DistTensorBase(torch.Tensor):
    """A tensor that is cut over the ranks of a grid; `.shape` is the global shape.

    Attributes
    ----------
    grid: the grid over whose ranks it is cut.
    cuts: for each dimension, the grid axes it is cut over.
    shard: this rank's block as the autograd graph knows it. Gradients of a replicated shard are
        parts of the whole, which is their sum over the replicas; `to_local` accounts for that.
    """

    grid: Grid
    cuts: Cuts
    unmerged: DistTensorBase | None = None
    """Of a merged tensor the tensor of which it is a reshape, where no blocks of it are: cut
    dimensions of that one are inner factors of its own. None of any other."""
    recipe: ViewRecipe | None = None
    """Of a view how it is made again where its block is not here, or no longer: of one whose
    elements lie on other ranks than those of its base, of views of such views, and of merged
    tensors. None of any other tensor."""
    made_after: int | None = None
    """The entry of the journal after which it was made, where that has arguments."""
    _shape: torch.Size
    sums_gradient = False
    """Whether a hook of the shard adds up the gradients of the leaf's replicas."""
    summed_when_accumulated = False
    """Whether a module adds up those that a backward pass accumulates, and no others."""
    gradient_hook: Any = None
    """The hook that keeps a non-leaf's gradient in `retained_gradient`, or None."""
    retained_gradient: Tensor | None = None

    @staticmethod
    def __new__(
        cls: type[Distributed], shard: Tensor, shape: Sequence[int], cuts: Cuts, grid: Grid
    ) -> Distributed:
        self: Distributed = torch_private.make_wrapper(
            cls, shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        self._shape = shape if type(shape) is torch.Size else torch.Size(shape)
        self.shard, self.cuts, self.grid = shard, cuts, grid
        if grid.journal.place is not None:
            self.made_after = grid.journal.latest()
        return self

    # Few tensors need these, and one is made by every operator.

    @cached_property
    def _memory(self) -> SharedMemory:
        """Return the memory that the tensor shares with its views."""
        return SharedMemory()

    @cached_property
    def _redistributed(self) -> dict[Cuts, tuple[Any, Any]]:
        """Return the blocks that `redistribute_once` has made of this tensor in the present call,
        by their cuts, with the state in which it was then."""
        return {}

    @classmethod
    def merging(
        cls: type[Distributed],
        unmerged: DistTensorBase,
        shape: Sequence[int],
        cuts: Cuts,
        make: Callable[[Any], DistTensorBase],
        write: Callable[[Any, Any], object],
    ) -> Distributed:
        """Return the reshape of a tensor without its blocks, which `make` moves to their ranks.

        Until then it lies in the memory of `unmerged`, and to autograd it remains that one. No
        communication.
        """
        self = cls(unmerged.shard, shape, cuts, unmerged.grid)
        self.unmerged, self._memory = unmerged, unmerged._memory
        self.recipe = ViewRecipe.now(unmerged, make, write)._replace(modules=module_calls())
        del self.__dict__["shard"]
        return self

    @cached_property
    def shard(self) -> Tensor:
        """Bring the block of a view to this rank, where it is asked for; collective then.

        Of a merged tensor for the first time, of other views again when their base was written. Of
        any other tensor this is the block that it was made of.
        """
        if self.recipe is None:
            raise AttributeError("shard")
        block = self.recipe.follow()
        if self.recipe.write is not None and self._memory is self.recipe.base._memory:
            self._memory = self._memory.copy(self)
        self.__dict__["shard"] = block
        self.sync_requires_grad()
        return block

    def outdate(self) -> None:
        """Let the block of a view be brought again when it is asked for; no communication."""
        block = self.__dict__.pop("shard", None)
        self.__dict__.pop("_redistributed", None)
        if block is None or self.recipe is None or self.recipe.write is None:
            return
        # What autograd has saved of it is no longer what the serial program has there.
        if not block.is_inference() and not is_view_of(block, self.recipe.base.held):
            increment_version(block)

    @property
    def held(self) -> Tensor:
        """Return the elements on this rank: the block, or of a merged tensor, and of a view whose
        base was written, those of the base. No communication.
        """
        if self.unmerged is not None:
            return self.unmerged.held
        block: Tensor | None = self.__dict__.get("shard")
        if block is not None:
            return block
        assert self.recipe is not None
        elements = self.recipe.base.held
        return elements if self.recipe.recorded else elements.detach()

    @property
    def brought(self) -> bool:
        """Return whether this rank has its block, which nothing can bring again."""
        return "shard" in self.__dict__

    def settle(self) -> None:
        """Let a merged tensor be like any other from now on, to autograd, too; collective."""
        if self.unmerged is not None:
            self.shard = self.shard
            self.unmerged = None

    # Asked for so often that torch's way to them would tell.

    shape: torch.Size = property(  # type: ignore[assignment]
        attrgetter("_shape"), doc="Return the global shape."
    )

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._shape)

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return self._shape.numel()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Return the type of the elements."""
        block: Tensor | None = self.__dict__.get("shard")
        # A view may have another type than its base.
        of_torch: Any = torch.Tensor.dtype
        return of_torch.__get__(self) if block is None else block.dtype  # type: ignore[no-any-return]

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Return the layout; of a parameter, the first dimension is called `filter`.

        It is equal to `torch.strided`, which stands here in other tensors.
        """
        return Layout.of(self.cuts, weight=torch_private.is_marked_parameter(self))

    @property
    def box(self) -> Box:
        """Return the box of global indices that this rank holds."""
        return rank_box(tuple(self.shape), self.cuts, self.grid.topology, self.grid.rank)

    def become(self, view: DistTensorBase) -> None:
        """Take the shard, the shape, the cuts and the memory of a view of this tensor.

        Another tensor becomes what this one was, for the sake of its views.
        """
        memory = self._memory
        before = type(self)(self.held, self.shape, self.cuts, self.grid)
        del before.__dict__["shard"]
        before.__dict__.update(self.__dict__, _redistributed={})
        memory.note(before)
        for other in (*memory.views(), *memory.followers()):
            if other.recipe is not None and other.recipe.base is self:
                other.recipe = other.recipe._replace(base=before)
        self.__dict__.pop("shard", None)
        self.__dict__.update({k: v for k, v in view.__dict__.items() if k == "shard"})
        self.unmerged, self.recipe, self.cuts = view.unmerged, view.recipe, view.cuts
        self._shape, self._memory = view._shape, view._memory
        self._memory.note(self)
        self._redistributed.clear()

    def sync_requires_grad(self) -> None:
        """Let torch know, below its functions, whether the shard requires gradients."""
        with torch_private.without_torch_function():
            torch_private.set_requires_grad(self, self.held.requires_grad)

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same box."""
        return self.grid.size // self.grid.topology.parts(cutting_axes(self.cuts))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        value = f"{self.shard.item()!r}, " if self.dim() == 0 else ""
        node = self.held.grad_fn
        gradient = f", grad_fn={node.name()}" if node is not None else ""
        return (
            f"DistTensor({value}shape={tuple(self.shape)}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}, layout={self.layout}, "
            f"local={self.box.shape} on rank {self.grid.rank} of {self.grid}{gradient})"
        )

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        if not self.dim():
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]


def is_view_of(block: Tensor, other: Tensor) -> bool:
    """Return whether two blocks lie in one memory, as torch's views do."""
    root = torch_private.base_of(block)
    root = block if root is None else root
    return root is other or root is torch_private.base_of(other)
