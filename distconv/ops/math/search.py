"""Membership of elements in a set, and the intervals in which they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import as_distributed, common_grid, gather_whole
from distconv.ops.support.whole_dimensions import apply_to_batches
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor


@implements(torch.isin)
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Return whether each element is among `test_elements`, which are made whole."""
    among = gather_whole(test_elements, "isin")
    if not isinstance(elements, DistTensor):
        grid = test_elements.grid
        found = torch.isin(elements, among, assume_unique=assume_unique, invert=invert)
        return as_distributed(found, grid)
    common_grid("isin", (elements, test_elements))
    found = torch.isin(elements.shard, among, assume_unique=assume_unique, invert=invert)
    return DistTensor(found, elements.shape, elements.cuts, elements.grid)


@implements(torch.searchsorted)
def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """Return the indices at which elements would be inserted in sorted vectors.

    The vectors are the last dimension, which is made whole.
    """
    options: Any = dict(out_int32=out_int32, right=right, side=side)
    if sorter is not None:
        reason = "a sorter is not supported"
        way_out = "Pass sorted_sequence.gather(-1, sorter)"
        refuse("searchsorted", reason, sorted_sequence, input, sorter, way_out=way_out)
    grid = common_grid("searchsorted", (sorted_sequence, input))
    if not isinstance(input, Tensor):
        input = torch.tensor(input, dtype=sorted_sequence.dtype, device=sorted_sequence.device)
    if sorted_sequence.dim() > 1:
        return apply_to_batches(
            torch.searchsorted, "searchsorted", [sorted_sequence, input], [1, 1], **options
        )
    check_on_meta(torch.searchsorted, sorted_sequence, input, **options)
    x = as_distributed(input, grid)
    vector = gather_whole(sorted_sequence, "searchsorted")
    found = torch.searchsorted(vector, x.shard.contiguous(), **options)
    return DistTensor(found, x.shape, x.cuts, grid)
