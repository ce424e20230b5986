"""Expanded tensors: the smaller tensor that a redistribution can send instead."""

from __future__ import annotations

from math import prod
from typing import cast

from distconv.ops.support.merged import merge_as, places_of_factors
from distconv.tensor.dist_tensor import DistTensor


def before_expansion(x: DistTensor) -> DistTensor:
    """Return `y` for `x = y.expand(...)` if both have equally many dimensions, otherwise `x`.

    Redistributing `y` and expanding its blocks sends fewer elements than redistributing `x`. `x`
    may also be an alias or a reshape of an expanded tensor. If `x` or `y` requires gradients, the
    result is `x`, because the program may ask for the gradient of `x`.
    """
    recipe = x.recipe
    if recipe is None or x.requires_grad or recipe.base.requires_grad:
        return x
    base = cast(DistTensor, recipe.base)
    if x.unmerged is not None or recipe.place is ...:  # another shape of `base`, or an alias
        base = before_expansion(base)
        if base is recipe.base:
            return x
    elif recipe.writable or base.dim() != x.dim():
        return x
    sizes = [prod(base.shape[i] for i in places) for places in places_of_factors(x)]
    repeats = [n for m, n in zip(sizes, x.shape, strict=True) if m != n]
    if not repeats or prod(sizes) * prod(repeats) != x.numel():
        return x
    return base if x.unmerged is None else cast(DistTensor, merge_as(base, sizes))
