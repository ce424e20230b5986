"""Values passed to Python, such as x.item(), from replicated tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv import torch_private
from distconv.geometry.layout import cutting_axes
from distconv.ops.support.operands import gather_whole
from distconv.tensor.dispatch import RULES, WAYS_OUT, implements, refuse
from distconv.tensor.dist_tensor import DistTensor

_SPELLED = {
    "__array__": "numpy.asarray(x.full_tensor())",
    "__contains__": "`value in x.full_tensor()`",
    "__index__": "operator.index(x.full_tensor())",
    "__format__": "format(x.full_tensor())",
}
"""The way out that errors suggest for functions that Python or numpy calls, written as users do."""


def _suggested_call(name: str) -> str:
    plain = name.strip("_")
    ordinary = f"x.full_tensor().{name}()" if plain == name else f"{plain}(x.full_tensor())"
    return _SPELLED.get(name, ordinary)


def _value(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def rule(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
        if cutting_axes(input.cuts):
            way_out = f"Use {_suggested_call(name)}, on all ranks together"
            refuse(name, "no rank holds the whole tensor", input, way_out=way_out)
        return function(input.shard, *args, **kwargs)

    return rule


for _name in (
    *("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__complex__"),
    *("__array__", "__contains__", "__format__"),
):
    RULES[getattr(torch.Tensor, _name)] = _value(_name)


@implements(torch.Tensor.__reduce_ex__)
def reduce_ex(self: DistTensor, protocol: int) -> Any:
    """Return the pickle form of a replicated one-element tensor, which is loaded as a plain tensor.

    Raises UnsupportedOperation for other DistTensors.
    """
    if self.numel() != 1 or cutting_axes(self.cuts):
        reason = "a distributed tensor belongs to its job"
        way_out = WAYS_OUT[torch.Tensor.__reduce_ex__]
        refuse("pickle, copy.copy or torch.save", reason, self, way_out=way_out)
    return self.held.detach().__reduce_ex__(protocol)


@implements(torch.Tensor.stride)
def stride(self: DistTensor, dim: int | None = None) -> tuple[int, ...] | int:
    """Return the strides of a contiguous tensor of the global shape."""
    strides: Any = torch.empty(self.shape, device="meta").stride
    found: tuple[int, ...] | int = strides() if dim is None else strides(dim)
    return found


@implements(torch.Tensor.is_contiguous)
def is_contiguous(
    input: DistTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Return whether `memory_format` is torch.contiguous_format: a DistTensor counts as contiguous.

    Blocks may have another memory format on each rank; `view` supports all of them.
    """
    return memory_format == torch.contiguous_format


@implements(torch.is_nonzero, torch.Tensor.is_nonzero)
def is_nonzero(input: Any) -> bool:
    if input.numel() != 1:
        raise RuntimeError(f"is_nonzero: expected one element, got the shape {tuple(input.shape)}")
    return bool(input.reshape(()))


@implements(torch_private.assert_async)
def assert_async(input: DistTensor, *message: str) -> None:
    """Raise an error on every rank if `input`, a tensor of one element, is 0. Collective."""
    torch_private.assert_async(gather_whole(input, "_assert_async"), *message)


def _flag(function: Callable[..., bool], *others: Callable[..., bool]) -> None:
    def rule(input: DistTensor) -> bool:
        return function(input.shard)

    for each in (function, *others):
        RULES[each] = rule


_flag(torch.is_conj, torch.Tensor.is_conj)
_flag(torch.is_neg, torch.Tensor.is_neg)
