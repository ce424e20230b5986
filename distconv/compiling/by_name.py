"""The backend "distconv" of torch.compile, an entry point: torch.compile becomes `compile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from distconv.compiling.front import compile
from distconv.torch_private import register_backend

register_backend("distconv", compile)


def as_it_is(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Return the function of a graph of plain tensors, for uses other than by torch.compile."""
    return graph.forward
