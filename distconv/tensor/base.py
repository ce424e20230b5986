"""The base of DistTensor: its shard, its cuts, its grid, and its metadata, without any operator.

Modules below `dist_tensor` know a DistTensor by this base; the tensors that they make of one are of
its own type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

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
    _bring: Callable[[], Tensor] | None = None
    """Brings the block of a merged tensor to this rank; collective."""
    _is_param: bool
    made_after: int | None = None
    """The step after which it was made, where steps are compared one by one."""
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
        self: Distributed = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        self._shape = shape if type(shape) is torch.Size else torch.Size(shape)
        self.shard, self.cuts, self.grid = shard, cuts, grid
        if grid.numbers_tensors:
            self.made_after = grid.latest_step()
        return self

    # Few tensors need these, and one is made by every operator.

    @cached_property
    def _memory(self) -> SharedMemory:
        """Return the memory that the tensor shares with its views."""
        return SharedMemory()

    @cached_property
    def _redistributed(self) -> dict[Cuts, tuple[Any, Any]]:
        """Return the tensors that `redistribute_once` has made of this one in the present call, by
        their cuts, with the state in which it was then."""
        return {}

    @classmethod
    def merging(
        cls: type[Distributed],
        unmerged: DistTensorBase,
        shape: Sequence[int],
        cuts: Cuts,
        bring: Callable[[], Tensor],
    ) -> Distributed:
        """Return the reshape of a tensor without its blocks, which `bring` moves to their ranks.

        Until then it lies in the memory of `unmerged`, which belongs to it alone, and to autograd
        it remains that one. No communication.
        """
        self = cls(unmerged.shard, shape, cuts, unmerged.grid)
        recorded, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        modules = module_calls()

        def as_then() -> Tensor:
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(recorded),
                on_behalf_of(modules),
            ):
                return bring()

        self.unmerged, self._bring, self._memory = unmerged, as_then, unmerged._memory
        del self.__dict__["shard"]
        return self

    @cached_property
    def shard(self) -> Tensor:
        """Bring a merged tensor's block to this rank, where it is asked for; collective then.

        Of any other tensor this is the block that it was made of.
        """
        if self._bring is None or self.unmerged is None:
            raise AttributeError("shard")
        block = self._bring()
        self._memory = self.unmerged._memory.copy()
        return block

    @property
    def held(self) -> Tensor:
        """Return the elements on this rank: the block, or of a merged tensor those it has not
        brought to their ranks. No communication.
        """
        return self.shard if self.unmerged is None else self.unmerged.shard

    @property
    def brought(self) -> bool:
        """Return whether this rank has its block, which nothing can bring again."""
        return "shard" in self.__dict__

    def settle(self) -> None:
        """Let a merged tensor be like any other from now on, to autograd, too; collective."""
        if self.unmerged is not None:
            self.shard = self.shard
            self.unmerged = self._bring = None

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
        return self.held.dtype

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Return the layout; of a parameter, the first dimension is called `filter`.

        It is equal to `torch.strided`, which stands here in other tensors.
        """
        return Layout.of(self.cuts, weight=getattr(self, "_is_param", False))

    @property
    def box(self) -> Box:
        """Return the box of global indices that this rank holds."""
        return rank_box(tuple(self.shape), self.cuts, self.grid.topology, self.grid.rank)

    def become(self, view: DistTensorBase) -> None:
        """Take the shard, the shape, the cuts and the memory of a view of this tensor."""
        self.__dict__.pop("shard", None)
        self.__dict__.update({k: v for k, v in view.__dict__.items() if k == "shard"})
        self.unmerged, self._bring, self.cuts = view.unmerged, view._bring, view.cuts
        self._shape, self._memory = view._shape, view._memory
        self._redistributed.clear()

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
