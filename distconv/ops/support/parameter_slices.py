"""Slices of plain parameters that are updated when the program sets `p.data = value`.

Autograd saves a parameter itself for backward passes, so they use the elements after `p.data =
value`. A slice of the parameter would keep the earlier elements.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from distconv.geometry.plan import Slices
from distconv.torch_private import base_of, set_data

_SLICES: dict[WeakIdRef, Slices] = {}
"""The slices of parameters that are still in use, each with its index into the parameter."""


def sliced(x: Tensor, slices: Slices) -> Tensor:
    """Return `x[slices]` of a plain tensor `x`.

    While autograd records, a slice of a parameter is registered, so that `follow` can update it.
    """
    own = x[slices]
    if type(x) is nn.Parameter and torch.is_grad_enabled():
        _SLICES[WeakIdRef(own, _forget)] = slices
    return own


def _forget(own: WeakIdRef) -> None:
    _SLICES.pop(own, None)


def follow(x: Tensor) -> None:
    """Update the slices of the parameter `x` that `sliced` returned, after `x.data` was set."""
    for reference, slices in list(_SLICES.items()):
        own = reference()
        if own is not None and base_of(own) is x:
            set_data(own, x.detach()[slices])
