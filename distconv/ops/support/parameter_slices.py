"""Slices of plain parameters, which follow `p.data = value` until the backward pass.

Autograd keeps a parameter itself, whose elements `p.data = value` replaces, also for backward
passes to come. A slice would keep the earlier elements.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from distconv.geometry.plan import Slices
from distconv.torch_private import base_of, set_data

_SLICES: dict[WeakIdRef, Slices] = {}
"""The place of each slice of a parameter that is still in use."""


def sliced(x: Tensor, slices: Slices) -> Tensor:
    """Return `x[slices]` of a plain tensor; a slice of a parameter follows `x.data = value`."""
    own = x[slices]
    if type(x) is nn.Parameter and torch.is_grad_enabled():
        _SLICES[WeakIdRef(own, _forget)] = slices
    return own


def _forget(own: WeakIdRef) -> None:
    _SLICES.pop(own, None)


def follow(x: Tensor) -> None:
    """Give the slices of a parameter its elements, after `x.data` has been set."""
    for reference, slices in list(_SLICES.items()):
        own = reference()
        if own is not None and base_of(own) is x:
            set_data(own, x.detach()[slices])
