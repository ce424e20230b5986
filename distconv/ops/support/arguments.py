"""Forms of arguments that torch accepts, and torch's own checks on global shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from distconv.tensor.base import Run, whole_numbers
from distconv.tensor.dispatch import Rule
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import without_modes

# The forms in which torch's functions accept sizes, dimensions and sequences.


def normalize_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return the dimensions `dim` as numbers from 0 to ndim - 1; all dimensions for None or ().

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
    """Return the dimension `dim` as a number from 0 to ndim - 1; a scalar counts as a vector."""
    return next(iter(normalize_dims(dim, ndim)), 0)


def as_sizes(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Return sizes as a tuple: integers given one by one, or one sequence of them."""
    if len(arguments) == 1 and isinstance(arguments[0], (tuple, list, torch.Size)):
        arguments = tuple(arguments[0])
    return whole_numbers(arguments, "size")


def takes_sequence(name: str) -> Callable[[Rule], Rule]:
    """Return a decorator: a rule of `x, *members` also takes `members` as one keyword argument.

    For example, a rule for `x.view(2, 3)` then supports `x.view(size=(2, 3))`, with "size" as
    `name`.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def either(input: DistTensor, *members: Any, **named: Any) -> Any:
            return rule(input, *members, *(named.pop(n) for n in (name,) if n in named), **named)

        return cast(Rule, either)

    return decorate


Sizes = int | Sequence[int]


def to_tuple(value: Sizes, n: int, what: str) -> tuple[int, ...]:
    """Return `value` as one number for each of `n` spatial dimensions.

    Raises RuntimeError for another number of values; `what` is the argument's name, for the error.
    """
    if type(value) is int:
        return (value,) * n
    numbers = whole_numbers(value, what)
    if len(numbers) == 1:
        return numbers * n
    if len(numbers) != n:
        raise RuntimeError(f"{what}={numbers} has {len(numbers)} values, expected {n}")
    return numbers


def strided_run(pick: Any, size: int, dimension: int) -> Run:
    """Return the first position, step and number of positions of `pick`, an integer or slice.

    `size` is the number of positions along dimension number `dimension`, which errors name. Raises
    IndexError out of range, and ValueError for a step below 1.
    """
    if isinstance(pick, int):
        if not -size <= pick < size:
            raise IndexError(
                f"index {pick} is out of bounds for dimension {dimension} with size {size}"
            )
        return pick % size, 1, 1
    start, stop, step = pick.indices(size)
    if step < 1:
        raise ValueError("step must be greater than zero")
    return start, step, len(range(start, stop, step))


def accepts_unbatched(name: str, spatial: int) -> Callable[[Rule], Rule]:
    """Return a decorator by which a rule for (sample, channel, *spatial) also takes one sample.

    As in torch, an input without the first dimension is a mini-batch of one; its partition does not
    change. Other numbers of dimensions raise `RuntimeError` on every rank. `name` is the torch
    function, for this error; `spatial` is the number of spatial dimensions.
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


# torch's own checks of arguments, made on global shapes without data, and cached.
#
# So an error is raised on every rank, before any message, with torch's message.


class TensorMeta(NamedTuple):
    """The global shape and the type of a tensor without elements; None for any type."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def any_type(x: Tensor | None) -> TensorMeta | None:
    """Return the global shape of `x` as metadata without a type, so that no type is checked."""
    return None if x is None else TensorMeta(tuple(x.shape))


def check_on_meta(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Check the arguments of a torch function on the meta device; return the result's shape.

    Errors of torch are raised on every rank. Tensors in `arguments` and `keywords` are replaced by
    empty ones of their global shape and type; `any_type` leaves the type out. Several results give
    a tuple of shapes. No communication.
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


# Errors that name the position or class number that is out of range.


@contextmanager
def in_range(
    operator: str, numbers: Tensor, size: int, ignored: int | None = None
) -> Iterator[None]:
    """Replace torch's errors in this context by errors that name the number that is out of range.

    Parameters
    ----------
    operator: the called function, for the error.
    numbers: the positions or class numbers on this rank, expected to be from 0 to `size` - 1.
    ignored: a number outside the range that is allowed.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        wrong = (numbers < 0) | (numbers >= size)
        if ignored is not None:
            wrong &= numbers != ignored
        if not wrong.any():
            raise
        raise type(error)(out_of_range(operator, numbers[wrong][0].item(), size)) from None


def out_of_range(operator: str, number: float, size: int) -> str:
    """Return the error message for a number that is not from 0 to `size` - 1."""
    return f"{operator}: {number} is out of range; expected numbers from 0 to {size - 1}, of {size}"
