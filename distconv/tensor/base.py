"""The base of DistTensor: its shard, its cuts, its grid, and its metadata, without any operator.

Modules below `dist_tensor` know a DistTensor by this base; the tensors that they make of one are of
its own type.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    shard: Tensor
    _is_param: bool
    _shape: torch.Size
    _memory: SharedMemory
    sums_gradient: bool
    """Whether a hook, or a module, adds up the gradients of the leaf's replicas."""
    gradient_hook: Any
    """The hook that keeps a non-leaf's gradient in `retained_gradient`, or None."""
    retained_gradient: Tensor | None
    _redistributed: dict[Cuts, tuple[Any, Any]]
    """The tensors that `redistribute_once` has made of this one in the present call, by their cuts,
    and the state in which it was then."""

    @staticmethod
    def __new__(
        cls: type[Distributed], shard: Tensor, shape: Sequence[int], cuts: Cuts, grid: Grid
    ) -> Distributed:
        self: Distributed = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        self._shape = torch.Size(shape)
        self.shard, self.cuts, self.grid = shard, cuts, grid
        self._memory = SharedMemory()
        self.sums_gradient = False
        self.gradient_hook = None
        self.retained_gradient = None
        self._redistributed = {}
        return self

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Return the global shape."""
        return self._shape

    # Asked for so often that torch's way to them would tell.

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._shape)

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return self._shape.numel()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Return the type of the elements."""
        return self.shard.dtype

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
        self.shard, self.cuts = view.shard, view.cuts
        self._shape, self._memory = view._shape, view._memory
        self._redistributed.clear()

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same box."""
        return self.grid.size // self.grid.topology.parts(cutting_axes(self.cuts))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        value = f"{self.shard.item()!r}, " if self.dim() == 0 else ""
        node = self.shard.grad_fn
        gradient = f", grad_fn={node.name()}" if node is not None else ""
        return (
            f"DistTensor({value}shape={tuple(self.shape)}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}, layout={self.layout}, "
            f"local={tuple(self.shard.shape)} on rank {self.grid.rank} of {self.grid}{gradient})"
        )

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        if not self.dim():
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]
