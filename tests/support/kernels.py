"""Kernels that a call starts, counted by torch's dispatcher: a number that no clock disturbs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.geometry.layout import rank_box
from distconv.grid.interface import Grid
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import cuts_of_layout

ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.as_strided_,
    torch.ops.aten._unsafe_view,
}
"""Operators that allocate memory, or change how it is read."""


class Kernels(TorchDispatchMode):
    """Count the operators that read or write elements, by name: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        views = all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not views and func.overloadpacket not in ALLOCATIONS:
            self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def kernels_of(call: Callable[[], object]) -> Counter[str]:
    """Return the kernels of the second call of `call`, by name; the first makes what is kept."""
    call()
    with Kernels() as kernels:
        call()
    return kernels.counted


def block_on(
    grid: Grid, shape: tuple[int, ...], form: torch.memory_format, device: str = "cpu"
) -> DistTensor:
    """Return a tensor of global `shape` with random elements, as one rank of a dry grid sees it."""
    cuts = cuts_of_layout(None, grid, len(shape))
    box = rank_box(shape, cuts, grid.topology, grid.rank)
    block = torch.randn(box.shape, device=device).contiguous(memory_format=form)
    return DistTensor(block, shape, cuts, grid)
