"""Slices and aliases of plain operands, which follow `x.data = value` until the backward pass.

Autograd keeps an operand itself, whose elements `x.data = value` replaces, also for backward
passes to come. A rank's slice of it, and its alias that enters an operator, would keep the earlier
elements.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from distconv.geometry.layout import Shape
from distconv.geometry.plan import Slices
from distconv.tensor.dispatch import is_traced
from distconv.torch_private import base_of, set_data

_COPIES: dict[int, dict[WeakIdRef, tuple[Shape, Slices]]] = {}
"""The slices and aliases in use, by the identity of the plain tensor: its shape, their places.

They keep the tensor alive. A weak reference to it would prevent `torch.utils.swap_tensors`.
"""


def sliced(x: Tensor, slices: Slices) -> Tensor:
    """Return `x[slices]` of a plain operand; the slice follows `x.data = value`."""
    own = x[slices]
    let_follow(own, x, slices)
    return own


def let_follow(copy: Tensor, x: Tensor, slices: Slices = ()) -> None:
    """Let `copy`, which is the view `x[slices]`, follow `x.data = value`.

    Slices of another view of a tensor do not follow, as in serial torch. Nor do those of compiled
    programs.
    """
    if torch.is_grad_enabled() and not is_traced():
        source = base_of(copy)
        copies = _COPIES.get(id(source), {})
        if source is x or WeakIdRef(x) in copies:
            copies[WeakIdRef(copy, partial(_forget, id(source)))] = x.shape, slices
            _COPIES[id(source)] = copies


def _forget(source: int, copy: WeakIdRef) -> None:
    copies = _COPIES[source]
    del copies[copy]
    if not copies:
        del _COPIES[source]


def follow(x: Tensor) -> None:
    """Give the slices and aliases of `x` its elements, after `x.data` has been set.

    While `x` has another shape than in the forward pass, they are NaN of a type that most kernels
    refuse: a backward pass raises on all ranks, or its gradients are NaN. Slices of the new
    elements could fit on some ranks only, and kernels of torch read beyond the end of too few.
    """
    for copy, (shape, slices) in list(_COPIES.get(id(x), {}).items()):
        own = copy()
        if own is None:
            continue
        if x.shape == shape:
            set_data(own, x.detach()[slices])
        else:
            lost = torch.full((), math.nan, dtype=torch.float8_e4m3fnuz, device=x.device)
            set_data(own, lost.expand(own.shape))
