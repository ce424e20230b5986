"""Cases: modules of third parties, and the inputs with which they are tried."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Input = Callable[[torch.Generator], Tensor]
"""Draws an input, the same on every rank."""

# The compiled functions of torchvision's wheels do not load beside a torch for CPUs, and its import
# asks for two of them. No case calls them.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class Case:
    """A network, a loss or a metric, to be compared with its serial run.

    Attributes
    ----------
    tolerance: the tolerance of `verify`, for a case that computes in shorter types within.
    loops: whether it loops over a few positions at a time along the partitioned dimension, and
        carries the last ones over to the next pass.
    """

    package: str
    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    tolerance: float | None = None
    loops: bool = False

    @property
    def key(self) -> str:
        """Return the package and the name of the case, which are unique together."""
        return f"{self.package}: {self.name}"

    def tensors(self) -> list[Tensor]:
        """Return the inputs."""
        generator = torch.Generator().manual_seed(0)
        return [draw(generator) for draw in self.inputs]


class Call(nn.Module):
    """A module that calls a function or another object, and returns numbers as tensors."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        result = self.function(*inputs)
        return torch.as_tensor(result) if isinstance(result, (int, float)) else result


def of(path: str) -> Any:
    """Import a module, and return its attribute: both are named by `path`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def normal(*shape: int) -> Input:
    """Draw normal numbers."""
    return lambda g: torch.randn(shape, generator=g, dtype=torch.float64)


def uniform(*shape: int) -> Input:
    """Draw numbers between 0 and 1, such as an image has."""
    return lambda g: torch.rand(shape, generator=g, dtype=torch.float64)


def classes(number: int, *shape: int) -> Input:
    """Draw class indices."""
    return lambda g: torch.randint(number, shape, generator=g)


def one_hot(number: int, *shape: int) -> Input:
    """Draw class indices of (sample, *space), and return them as (sample, class, *space)."""

    def draw(g: torch.Generator) -> Tensor:
        labels = torch.randint(number, shape, generator=g)
        return nn.functional.one_hot(labels, number).movedim(-1, 1).double()

    return draw


def binary(*shape: int) -> Input:
    """Draw zeros and ones, as floating-point numbers."""
    return lambda g: torch.randint(2, shape, generator=g).double()
