"""A local operator of torch with the shapes it takes, and the text by which its time is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """A tensor that a local operator takes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class LocalOperator:
    """An operator of torch below autograd, on tensors of these shapes."""

    name: str
    """Its name and overload, as `aten.convolution.default`."""
    arguments: tuple[Any, ...]
    """In order; a `TensorSpec` stands for a tensor."""
    keywords: tuple[tuple[str, Any], ...] = ()
    made: tuple[TensorSpec, ...] = ()
    """Its results."""

    @property
    def key(self) -> str:
        """Return text that is the same for operators that take as long."""
        return f"{self.name}{_text(self.arguments)}{_text(self.keywords) if self.keywords else ''}"

    @cached_property
    def taken(self) -> list[TensorSpec]:
        """Return the tensors among the arguments."""
        return list(specs_in((self.arguments, self.keywords)))


def spec_of(value: Any) -> Any:
    """Return arguments with a `TensorSpec` for each tensor, to be compared and hashed."""
    if isinstance(value, Tensor):
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (tuple, list)):
        # Most of what operators take are numbers, which are asked for by the million.
        return tuple([x if type(x) in _PLAIN else spec_of(x) for x in value])
    return value


_PLAIN = frozenset({int, float, bool, type(None)})


def specs_in(value: Any) -> Iterator[TensorSpec]:
    """Yield the tensors of arguments as `spec_of` returns them."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from specs_in(part)


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        dense = _contiguous(value.shape)
        shape = "x".join(map(str, value.shape))
        layout = "" if value.stride == dense else f"/{'x'.join(map(str, value.stride))}"
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}{layout}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
