"""Functions computed alike on every rank: operands are made whole first, and results are whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import as_distributed, common_grid, gather_whole
from distconv.tensor.dispatch import RULES
from distconv.tensor.nested import tensors_in
from distconv.torch_private import of_sequence

_NAMES = """
    block_diag cartesian_prod combinations corrcoef cov histc histogram kron meshgrid nonzero_static
    pdist unique unique_consecutive
""".split()


def _on_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__.removeprefix("linalg_")

    def rule(*args: Any, **named: Any) -> Any:
        grid = common_grid(name, tensors_in(args, named))
        with suppress(NotImplementedError):  # where shapes of results depend on elements
            check_on_meta(function, *args, **named)
        wholes = [gather_whole(x, name) for x in args]
        result = function(*wholes, **{key: gather_whole(x, name) for key, x in named.items()})
        if isinstance(result, Tensor):
            return as_distributed(result, grid)
        return type(result)([as_distributed(part, grid) for part in result])

    return rule


_OF_LINALG = ("tensorinv", "tensorsolve", "vander")
for _home, _names in ((torch, _NAMES), (Tensor, _NAMES), (torch.linalg, _OF_LINALG)):
    for _name in _names:
        if hasattr(_home, _name):
            RULES[getattr(_home, _name)] = _on_whole(getattr(_home, _name))
RULES[of_sequence("meshgrid")] = lambda tensors, **named: torch.meshgrid(*tensors, **named)
