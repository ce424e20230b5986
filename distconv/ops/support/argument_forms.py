"""The forms in which torch's functions accept sizes, dimensions and sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from distconv.tensor.dispatch import Rule
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.whole_numbers import whole_numbers


def normalize_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return the dimensions `dim` as numbers from 0 to ndim - 1; all of them for None or ().

    Raises `IndexError` out of range, `RuntimeError` if a dimension appears twice.
    """
    chosen = () if dim is None else whole_numbers(dim, "dim")
    if not chosen:
        return tuple(range(ndim))
    for d in chosen:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-max(ndim, 1)}, "
                f"{max(ndim, 1) - 1}], but got {d})"
            )
    numbers = tuple(d % ndim for d in chosen) if ndim else ()
    if len(set(numbers)) < len(numbers):
        raise RuntimeError(f"a dimension appears more than once in dim={dim!r}")
    return numbers


def normalize_dim(dim: int, ndim: int) -> int:
    """Return one dimension as a number from 0 to ndim - 1; a scalar is treated as a vector."""
    return next(iter(normalize_dims(dim, ndim)), 0)


def as_sizes(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Return sizes as a tuple: integers given one by one, or one sequence of them."""
    if len(arguments) == 1 and isinstance(arguments[0], (tuple, list, torch.Size)):
        arguments = tuple(arguments[0])
    return whole_numbers(arguments, "size")


def takes_sequence(name: str) -> Callable[[Rule], Rule]:
    """Let a rule of `*members` take them as one keyword argument, too: x.view(size=(2, 3)).

    `name` is the name of this argument.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def either(input: DistTensor, *members: Any, **named: Any) -> Any:
            return rule(input, *members, *(named.pop(n) for n in (name,) if n in named), **named)

        return cast(Rule, either)

    return decorate


Sizes = int | Sequence[int]


def to_tuple(value: Sizes, n: int, what: str) -> tuple[int, ...]:
    """Return one number for each of `n` spatial dimensions; raise for another count.

    `what` is the argument's name, for the error.
    """
    numbers = whole_numbers(value, what)
    if len(numbers) == 1:
        return numbers * n
    if len(numbers) != n:
        raise RuntimeError(f"{what}={numbers} has {len(numbers)} values, expected {n}")
    return numbers


def accepts_unbatched(name: str, spatial: int) -> Callable[[Rule], Rule]:
    """Let a rule for (sample, channel, *spatial) take one sample without the first dimension.

    As in torch, that is a mini-batch of one; the cuts stay. Other numbers of dimensions raise
    `RuntimeError` on every rank. `name` is the torch function, for this error; `spatial` is the
    number of spatial dimensions.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def either(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if input.dim() == spatial + 2:
                return rule(input, *args, **kwargs)
            if input.dim() != spatial + 1:
                raise RuntimeError(
                    f"{name}: expected {spatial + 1} or {spatial + 2} dimensions, got the input "
                    f"{tuple(input.shape)}"
                )
            result = rule(input.unsqueeze(0), *args, **kwargs)
            if isinstance(result, tuple):
                return tuple(part.squeeze(0) for part in result)
            return result.squeeze(0)

        return cast(Rule, either)

    return decorate
