"""A check that all ranks train the same model: parameters, buffers and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distconv.comm.checksums import Checked, possible, unequal
from distconv.model.gradient_reduction import checked, required_reduction
from distconv.tensor.nested import tensors_in

_PLAIN = (bool, int, float, str, tuple, list, type(None))
"""Types of settings that mean the same on every rank when they are spelled alike."""


def assert_in_sync(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise, on every rank, where the ranks have come to train different models.

    All ranks of the grid call it together, between steps, every so often. Each computes a checksum
    of every element and sends a few bytes, more only where one differs. Sharded parameters are
    compared among the ranks that hold the same block. Differences as small as rounding are
    accepted: processors of other kinds round otherwise.

    Parameters
    ----------
    model: has been parallelized.
    optimizer: whose state and settings, such as the learning rate, are compared as well.

    Raises
    ------
    RuntimeError
        Naming the first tensor or setting that differs, and the ranks.
    ValueError
        Where the model is not parallelized.
    """
    grid = required_reduction("assert_in_sync", model).grid
    if not possible(grid):
        return
    found = unequal([*_of_model(model), *_of_optimizer(optimizer, model)], grid, True)
    if found:
        raise RuntimeError(
            f"assert_in_sync: {found[0]} is not the same on all ranks: {found[1]}. Every rank has "
            "to take the same optimizer steps with the same settings; load the same state on every "
            "rank to mend it"
        )


def _of_model(model: nn.Module) -> Iterator[Checked]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield checked(name, tensor)


def _of_optimizer(optimizer: Optimizer | None, model: nn.Module) -> Iterator[Checked]:
    if optimizer is None:
        return
    names = {p: name for name, p in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield from _of_value(f"{key} of parameter group {g}", value)
        for i, p in enumerate(group["params"]):
            name = names.get(p, f"parameter {i} of group {g}")
            for key, value in optimizer.state.get(p, {}).items():
                yield from _of_value(f"{key} of {name}", value)


def _of_value(name: str, value: Any) -> Iterator[Checked]:
    """Yield the tensors in a value, or the value itself, spelled in a name."""
    tensors = tensors_in(value)
    for tensor in tensors:
        yield checked(name, tensor)
    if not tensors and isinstance(value, _PLAIN):
        yield Checked(f"{name}, {value!r},", torch.empty(0))
