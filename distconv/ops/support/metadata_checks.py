"""torch's own checks of arguments, made on global shapes without data, and cached.

So an error is raised on every rank, before any message, with torch's message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.torch_private import without_modes


class TensorMeta(NamedTuple):
    """A tensor's global shape, and its type, or None for any type."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def any_type(x: Tensor | None) -> TensorMeta | None:
    """Return the shape of `x` as metadata without a type, so that no type is checked."""
    return None if x is None else TensorMeta(tuple(x.shape))


def check_on_meta(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Return the shape of `function(*arguments, **keywords)`, or the shapes of its results.

    Only the global shape and type of tensors are used; `any_type` leaves the type out.
    """
    return _shapes(
        function,
        tuple(_key(a) for a in arguments),
        tuple((name, _key(a)) for name, a in keywords.items()),
    )


def _key(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return TensorMeta(tuple(argument.shape), argument.dtype)
    return tuple(map(_key, argument)) if type(argument) in (list, tuple) else argument


def _empty(argument: Any) -> Any:
    if isinstance(argument, TensorMeta):
        return torch.empty(argument.shape, dtype=argument.dtype, device="meta")
    return tuple(map(_empty, argument)) if type(argument) is tuple else argument


@lru_cache(maxsize=4096)
def _shapes(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: tuple[Any, ...]
) -> Any:
    try:
        # A recorder would mistake this for work of the rank.
        with without_modes():
            result = function(*map(_empty, arguments), **{name: _empty(a) for name, a in keywords})
    except ZeroDivisionError:
        given = [a for a in (*arguments, *keywords) if not isinstance(a, TensorMeta)]
        raise RuntimeError(f"{function.__name__}: {given} has a 0 that must be positive") from None
    except AssertionError as error:  # meta kernels raise this where other kernels raise the first
        raise RuntimeError(f"{function.__name__}: {error}") from None
    except RuntimeError as error:
        if "cannot be called on meta tensors" not in str(error):
            raise
        raise TypeError(
            f"{function.__name__}: an argument that should be a number is a tensor; pass .item()"
        ) from None
    if isinstance(result, Tensor):
        return tuple(result.shape)
    return tuple(tuple(part.shape) for part in result)
