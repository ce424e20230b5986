"""Checks of counts, numbers and optimizers among the arguments of training methods."""

from __future__ import annotations

from numbers import Real

from torch import Tensor
from torch.optim import LBFGS, Optimizer


def check_count(owner: str, name: str, value: object, least: int) -> None:
    """Raise ValueError unless argument `name` of `owner` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{owner}: {name}={value!r} is not a count; pass an integer of {least} or more"
        )


def check_wrappable(owner: str, optimizer: object, wrapper: type[Optimizer]) -> None:
    """Raise TypeError if `optimizer` cannot be wrapped: if it is LBFGS or a `wrapper` already.

    `owner` is the name of the wrapping class, for the message.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, (LBFGS, wrapper)):
        raise TypeError(
            f"{owner}: {type(optimizer).__name__} cannot be wrapped; pass an optimizer of torch "
            "that uses one gradient a step, such as SGD or Adam"
        )


def checked_number(owner: str, name: str, value: object) -> float:
    """Return a real number, or a tensor of one element, as a float.

    Raises ValueError, naming `owner` and `name`, for anything else.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"{owner}: {name} is {shown}; pass a real number, or a tensor of one element")
