"""Results of operators on tensors without elements, which torch works out but once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.comm.packing import empty_in_format
from distconv.planning.local_operators import spec_of
from distconv.tensor.nested import tensors_in

_RESULTS: dict[Any, Any] = {}
"""What operators have made of operands like these; at most `_REMEMBERED` of them."""

_REMEMBERED = 2**16


def result_of(func: Any, args: Any, kwargs: Any, given: Any) -> Any:
    """Return the result of an operator that makes no view, for which torch's slow stand-ins are
    asked once.

    Parameters
    ----------
    given: its arguments as `spec_of` has them.
    """
    if torch.Tag.inplace_view in func.tags:
        return func(*args, **kwargs)
    # 2 equals 2.0, and makes another type of numbers.
    key = func, given, _types(args), _types(tuple(kwargs.items()))
    made = _RESULTS.get(key)
    if made is None:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.convolution.default:
            # Kernels keep channels last, torch's stand-in does not.
            result = empty_in_format(tuple(result.shape), args[0])
        several = result if isinstance(result, (tuple, list)) else (result,)
        if all(isinstance(x, Tensor) and x.is_meta for x in several):
            if len(_RESULTS) >= _REMEMBERED:
                _RESULTS.clear()
            if func._schema.is_mutable:
                made = "first" if result is args[0] else None
            elif not {_address(x) for x in several} & {_address(x) for x in tensors_in(args)}:
                made = tuple(spec_of(x) for x in several), type(result)
            if made is not None:
                _RESULTS[key] = made
        return result
    if made == "first":
        return args[0]
    specs, kind = made
    tensors = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta") for s in specs]
    return tensors[0] if issubclass(kind, Tensor) else kind(tensors)


def _address(x: Tensor) -> int:
    number: int = x.untyped_storage()._cdata
    return number


def _types(value: Any) -> Any:
    """Return the types of arguments, in tuples like theirs."""
    return tuple(map(_types, value)) if isinstance(value, (tuple, list)) else type(value)
