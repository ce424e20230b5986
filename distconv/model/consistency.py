"""Comparison of a model between ranks: its parameters, buffers, and its optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distconv.comm.checksums import Checked, unequal
from distconv.geometry.layout import cutting_axes
from distconv.model.gradient_reduction import required_reduction
from distconv.tensor.base import tensors_in
from distconv.tensor.dist_tensor import DistTensor

_PLAIN = (bool, int, float, str, tuple, list, type(None))
"""Types of optimizer settings that ranks compare by their `repr`."""


def assert_in_sync(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise, on every rank, if the models of the ranks differ.

    Collective: all ranks of the grid call this function together between steps, for example once an
    epoch. Each rank computes checksums over all elements and sends a few bytes, and sends more only
    if a checksum differs. Sharded parameters are compared among the ranks that hold the same block.
    Differences of the size of rounding are accepted, as processors of different kinds round
    differently.

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


def check_in_sync(caller: str, model: nn.Module, optimizer: Optimizer | None, full: bool) -> None:
    """Raise RuntimeError on every rank if the models of the ranks differ. Collective.

    Parameters
    ----------
    caller: the name of the calling function, for the message.
    model: a parallelized module.
    optimizer: an optimizer whose state and settings are compared as well.
    full: whether every element is compared; otherwise only samples of large tensors are.
    """
    reduction = required_reduction(caller, model)
    grid = reduction.grid
    if not grid.journal.compares_on(grid.device):
        return
    found = unequal([*checked_state(model), *_of_optimizer(optimizer, model)], grid, full)
    if found:
        raise RuntimeError(
            f"{caller}: {found[0]} is not the same on all ranks: {found[1]}. "
            f"{reduction.why_apart}Every rank must run the same optimizer steps with the same "
            "settings; load the same state on every rank to continue"
        )


def not_finite(model: nn.Module, optimizer: Optimizer | None) -> Iterator[str]:
    """Yield the names of parameters with infinities or NaN, and of buffers and state with NaN.

    Each rank checks its own blocks; no communication. Buffers may be infinite, as masks are.
    """
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor, _ in (*checked_state(model), *_of_optimizer(optimizer, model)):
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.is_floating_point() and values.layout == torch.strided and values.numel():
            # In contrast to isfinite, the extremes take no memory.
            extremes = torch.stack(values.aminmax())
            if extremes.isnan().any() or (name in parameters and extremes.isinf().any()):
                yield name


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
    """Yield the tensors in `value`, the entry `name` of an optimizer's state, for comparison.

    A value without tensors, such as a number, is compared by its `repr`, as part of the name.
    """
    tensors = tensors_in(value)
    for tensor in tensors:
        yield checked(name, tensor)
    if not tensors and isinstance(value, _PLAIN):
        yield Checked(f"{name}, {value!r},", torch.empty(0))


def checked(name: str, tensor: Tensor) -> Checked:
    """Return a record of `tensor`, called `name`, to compare between ranks with the same block."""
    if isinstance(tensor, DistTensor):
        return Checked(name, tensor.shard, cutting_axes(tensor.cuts))
    return Checked(name, tensor)


def checked_state(module: nn.Module) -> Iterator[Checked]:
    """Yield all parameters and buffers of a module for comparison among ranks."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield checked(name, tensor)
