"""Functions computed alike on every rank: operands are made whole first, and results are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import as_distributed, common_grid, gather_whole
from distconv.tensor.dispatch import RULES
from distconv.tensor.nested import tensors_in


def _on_whole(function: Callable[..., Any], checked: bool) -> Callable[..., Any]:
    """Return the rule of a function; `checked` says that its result's shape follows from shapes."""
    name = function.__name__.removeprefix("linalg_")

    def rule(*args: Any, **named: Any) -> Any:
        grid = common_grid(name, tensors_in(args, named))
        if checked:
            check_on_meta(function, *args, **named)
        wholes = [gather_whole(x, name) for x in args]
        result = function(*wholes, **{key: gather_whole(x, name) for key, x in named.items()})
        if isinstance(result, Tensor):
            return as_distributed(result, grid)
        return type(result)([as_distributed(part, grid) for part in result])

    return rule


for _name in "histc kron".split():
    for _home in (torch, Tensor):
        RULES[getattr(_home, _name)] = _on_whole(getattr(_home, _name), checked=True)
for _name in "corrcoef cov histogram nonzero_static unique unique_consecutive".split():
    for _home in (torch, Tensor):
        if hasattr(_home, _name):
            RULES[getattr(_home, _name)] = _on_whole(getattr(_home, _name), checked=False)
for _name in "tensorinv tensorsolve vander".split():
    RULES[getattr(torch.linalg, _name)] = _on_whole(getattr(torch.linalg, _name), checked=True)
