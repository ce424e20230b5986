"""Distances of all pairs of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.layout import cuts_of_broadcast
from distconv.ops.support.merged import factors_of, is_merged, merge_as, unmerged
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import as_distributed, common_grid, local_operand
from distconv.ops.support.whole_dimensions import apply_along
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


@implements(torch.cdist)
def cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary",
) -> DistTensor:
    """Return the distances of all (..., P, M) from all (..., R, M) vectors.

    The second operand and the elements of all vectors are made whole; leading dimensions and P stay
    cut.
    """
    grid = common_grid("cdist", (x1, x2))
    shape = check_on_meta(torch.cdist, x1, x2, p, compute_mode)
    mode = _mode(compute_mode, shape[-2:])
    if is_merged(x1) and not is_merged(x2) and x2.dim() == 2 and len(factors_of(x1)[-1]) == 1:
        return cast(DistTensor, merge_as(cdist(unmerged(x1), x2, p, mode), shape))
    left, right = as_distributed(x1, grid), as_distributed(x2, grid)
    rows = (*left.shape[:-1], 1), (*left.cuts[:-1], ())
    columns = (*right.shape[:-2], 1, 1), (*right.cuts[:-2], (), ())
    cuts = cuts_of_broadcast((rows, columns), (*shape[:-1], 1))
    first, second = (
        local_operand(x1, (*shape[:-1], x1.shape[-1]), cuts, grid, "cdist"),
        local_operand(x2, (*shape[:-2], *x2.shape[-2:]), (*cuts[:-2], (), ()), grid, "cdist"),
    )
    return DistTensor(torch.cdist(first, second, p=p, compute_mode=mode), shape, cuts, grid)


def _mode(compute_mode: str | None, vectors: Sequence[int]) -> str:
    """Return torch's way to compute distances of `vectors[0]` vectors from `vectors[1]`.

    torch chooses a faster, less accurate way by size; every rank takes the way for the global size.
    """
    by_product = compute_mode == "use_mm_for_euclid_dist" or (
        compute_mode in (None, "use_mm_for_euclid_dist_if_necessary") and max(vectors) > 25
    )
    return "use_mm_for_euclid_dist" if by_product else "donot_use_mm_for_euclid_dist"


@implements(F.pdist, torch.pdist)
def pdist(input: DistTensor, p: float = 2.0) -> DistTensor:
    """Return the distances of all pairs of rows of a matrix. Both are whole on every rank."""
    result: DistTensor = apply_along(F.pdist, "pdist", input, [0, 1], p, dropped=[0, 1])
    return result
