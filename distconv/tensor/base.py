"""What a DistTensor is, apart from what it does: its shard, its cuts, its grid, and metadata.

Modules below `dist_tensor` take this base of it; whatever they make of a tensor is of its own type.
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
"""The type of a DistTensor, which a function keeps."""


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
    """The hook that keeps the gradient of what is no leaf in `retained_gradient`, or None."""
    retained_gradient: Tensor | None
    _redistributed: dict[Cuts, tuple[Any, Any]]
    """What `redistribute_once` has made of it in the present call, and in which state of the
    tensor."""

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
        """The global shape."""
        return self._shape

    # Asked for so often that torch's way to them would tell.

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return self._shape.numel()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The type of its elements."""
        return self.shard.dtype

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """How it is cut; of a parameter, the first dimension is that of the filters."""
        return Layout.of(self.cuts, weight=getattr(self, "_is_param", False))

    @property
    def box(self) -> Box:
        """The box of global indices that this rank holds."""
        return rank_box(tuple(self.shape), self.cuts, self.grid.topology, self.grid.rank)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same box."""
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
