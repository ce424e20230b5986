"""Sums of tensors whose type NCCL, gloo or MPI cannot sum, by conversion to one that it can."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.transport.interface import SUM_TYPES, ChainedRequest, Request

_ADDED = {
    *(torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
"""The types that NCCL, gloo and MPI sum."""

_WIDER = SUM_TYPES | {torch.int16: torch.int32}


class Summand(NamedTuple):
    """A tensor to be summed over ranks, in a type that NCCL, gloo and MPI can sum."""

    numbers: Tensor
    """The tensor itself, its real and imaginary parts, or a copy in a wider type."""
    into: Tensor | None
    """The tensor that the sum is copied to, where the numbers have memory of their own."""

    @classmethod
    def of(cls, tensor: Tensor, library: str) -> Summand:
        """Return the summand for a contiguous tensor; TypeError if `library` cannot sum it."""
        if tensor.dtype in _ADDED:
            return cls(tensor, None)
        if tensor.dtype in _WIDER:
            return cls(tensor.to(_WIDER[tensor.dtype]), tensor)
        if tensor.dtype in (torch.complex64, torch.complex128):
            return cls(torch.view_as_real(tensor), None)
        raise TypeError(
            f"{library} cannot add up {tensor.dtype}; convert to one that it can, x.float()"
        )

    def arriving(self, request: Request) -> Request:
        """Return a request for the sum of the tensor; `request` is the running sum of `numbers`."""
        if self.into is None:
            return request
        return ChainedRequest([request], partial(self.into.copy_, self.numbers))
