"""The entry point of torch.compile's backend "distconv", which calls `compile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from distconv.compiling.front import compile
from distconv.torch_private import register_backend

register_backend("distconv", compile)


def as_it_is(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Return the function of `graph` uncompiled, for callers other than torch.compile."""
    return graph.forward
