"""Calls of local operators, on tensors with elements that have left the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.ops.conv.volumes import convolution, convolution_gradients
from distconv.planning.recording import LocalOperator, TensorSpec
from distconv.planning.roofline import packet_of

_POOL = 2**24
"""Elements of the memory that operands are taken from, one piece after the other: what a step
computes on has left the caches since it was last used."""


class Operands:
    """Memory for the operands of operators: each gets the piece behind the one before.

    It is large enough for all operands of any one operator but the first, and for the first.
    """

    def __init__(self, operators: Iterable[LocalOperator]):
        self._elements = _POOL
        for operator in operators:
            first, *others = map(_extent, operator.taken or [_NOTHING])
            self._elements = max(self._elements, first, sum(others))
        self._numbers: dict[torch.dtype, Tensor] = {}
        self._next = 0

    def tensor(self, spec: TensorSpec, places: int = 0, *, own: bool = False) -> Tensor:
        """Return a tensor of numbers from 0.5 to 1.5; whole numbers are 0, or places in a plane.

        Parameters
        ----------
        places: the size of the plane; 0 for zeros.
        own: whether to copy it to memory of its own.
        """
        elements = _extent(spec)
        if not prod(spec.shape):
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            if spec.dtype not in self._numbers:
                numbers = torch.rand(self._elements).add_(0.5).to(spec.dtype)
                self._numbers[spec.dtype] = numbers
            if self._next + elements > self._elements:
                self._next = 0
            memory = self._numbers[spec.dtype][self._next : self._next + elements]
            self._next += -(-elements // 16) * 16
            memory = memory.clone() if own else memory
        elif places:
            per_plane = max(prod(spec.shape[2:]), 1)
            memory = torch.arange(elements, dtype=spec.dtype).remainder_(per_plane)
            memory = memory.mul_(places).div_(per_plane, rounding_mode="floor")
        else:
            memory = torch.zeros(elements, dtype=spec.dtype)
        return memory.as_strided(spec.shape, spec.stride, memory.storage_offset())


_NOTHING = TensorSpec((0,), (1,), torch.float32)


_OF_VOLUMES: dict[str, Callable[..., object]] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_gradients,
}
"""How distconv computes operators on volumes."""


def _extent(spec: TensorSpec) -> int:
    """Return the elements from the first to the last of a tensor."""
    return 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))


def call_of(operator: LocalOperator, memory: Operands) -> Callable[[], object]:
    """Return a function that runs the operator once, on operands from this memory.

    The first operand has just been made, as by the operator before, and so have all of one that
    writes to some.
    """
    packet: Any = packet_of(operator)
    function = getattr(packet, operator.name.rsplit(".", 1)[1])
    volume = any(len(spec.shape) == 5 for spec in operator.taken)
    compute = _OF_VOLUMES.get(operator.name, function) if volume else function
    places_of_maxima = "max_pool" in operator.name and "backward" in operator.name
    plane = prod(operator.arguments[1].shape[2:]) if places_of_maxima else 0

    written = function._schema.is_mutable
    operands: list[Tensor] = []

    def made(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            operands.append(memory.tensor(value, plane, own=written or not operands))
            return operands[-1]
        if isinstance(value, tuple):
            return [made(part) for part in value]
        return value

    arguments = [made(value) for value in operator.arguments]
    keywords = {name: made(value) for name, value in operator.keywords}
    if "device" in keywords:
        keywords["device"] = "cpu"
    return lambda: compute(*arguments, **keywords)
