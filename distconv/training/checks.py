"""Checks of counts and numbers among the arguments of training methods."""

from __future__ import annotations

from numbers import Real

from torch import Tensor, nn
from torch.optim import Optimizer

from distconv.model.consistency import check_in_sync


def check_count(owner: str, name: str, value: object, least: int) -> None:
    """Raise ValueError unless argument `name` of `owner` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{owner}: {name}={value!r} is not a count; pass an integer of {least} or more"
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


# A check that all ranks train the same model: parameters, buffers and the optimizer's state.


def assert_in_sync(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise, on every rank, if the models of the ranks differ.

    All ranks of the grid call it together, between steps, every so often. Each computes a checksum
    of every element and sends a few bytes, and more only if one differs. Sharded parameters are
    compared among the ranks that hold the same block. Differences of the size of rounding are
    accepted, as processors of different kinds round differently.

    Raises RuntimeError naming the first tensor or setting that differs, and the ranks. Raises
    ValueError if the model is not parallelized.

    Parameters
    ----------
    model: a parallelized module.
    optimizer: its state and settings, such as the learning rate, are compared as well.

    Examples
    --------
    >>> model = dc.parallelize(nn.Linear(4, 1), dc.ProcessGrid(sample=2))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> dc.training.assert_in_sync(model, optimizer)  # raises if ranks differ
    """
    check_in_sync("assert_in_sync", model, optimizer, full=True)
