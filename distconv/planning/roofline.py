"""How long a local operator takes on a described device, from its arithmetic and its bytes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from distconv.planning.machine import Roofline
from distconv.planning.recording import LocalOperator, TensorSpec


@lru_cache(maxsize=65536)
def flops_of(operator: LocalOperator) -> int:
    """Return the floating-point operations: two for a multiplication and an addition.

    Operators other than convolutions and matrix products count one for each element.
    """
    # Not at the top, as it imports Triton where that is installed.
    from torch.utils.flop_counter import flop_registry

    function = packet_of(operator)
    count = flop_registry.get(function)
    if count is None:
        return max((prod(t.shape) for t in (*operator.taken, *operator.made)), default=0)
    arguments = [_like(a) for a in operator.arguments]
    keywords = {k: _like(v) for k, v in operator.keywords}
    made = [_like(t) for t in operator.made]
    if operator.name.startswith("aten.convolution_backward"):
        made = _gradients(operator, made)
    result = made[0] if len(made) == 1 else tuple(made)
    return int(count(*arguments, **keywords, out_val=result))


def bytes_of(operator: LocalOperator) -> int:
    """Return the bytes that are read and written, each once."""
    return sum(t.nbytes for t in (*operator.taken, *operator.made))


def roofline_seconds(operator: LocalOperator, device: Roofline) -> float:
    """Return the seconds of an operator: its arithmetic or its bytes, whichever take longer."""
    tensors = [*operator.taken, *operator.made]
    kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
    rate = device.flops.get(kind, device.flops["float32"])
    chosen = [part for part in device.efficiency if part and operator.name.startswith(part)]
    reached = device.efficiency[max(chosen, key=len, default="")]
    longest = max(flops_of(operator) / rate, bytes_of(operator) / device.bandwidth)
    return max(longest / reached, device.smallest)


def packet_of(operator: LocalOperator) -> object:
    """Return torch's operator without its overload."""
    _, name, _ = operator.name.split(".")
    return getattr(torch.ops.aten, name)


def _like(value: object) -> object:
    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_like(part) for part in value]
    return value


def _gradients(operator: LocalOperator, made: list[object]) -> list[object]:
    """Return the three gradients of a convolution, None for those that were not asked for."""
    remaining = iter(made)
    mask = operator.arguments[-1]
    return [next(remaining, None) if wanted else None for wanted in mask]
