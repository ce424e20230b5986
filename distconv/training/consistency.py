"""A check that all ranks train the same model: parameters, buffers and the optimizer's state."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from distconv.model.consistency import check_in_sync


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
    """
    check_in_sync("assert_in_sync", model, optimizer, full=True)
