"""Functions that write to their first argument what others, with rules, return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv.ops.support.metadata_checks import check_on_meta
from distconv.tensor.aliasing import prepare_write
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor


def implements_in_place(
    method: Callable[..., Any],
    rule: Callable[..., Any],
    into_plain: Callable[..., Any] | None = None,
) -> None:
    """Register for `method`, which writes in place, that it writes what `rule` returns.

    Parameters
    ----------
    into_plain: what is called where the first argument is a plain tensor; refused if not given.
    """
    name = method.__name__

    @implements(method)
    def writing(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, DistTensor):
            if into_plain is not None:
                return into_plain(input, *args, **kwargs)
            refuse(
                name,
                "a plain tensor takes no distributed one in place",
                *args,
                *kwargs.values(),
                way_out="Use the function that returns a new tensor",
            )
        check_on_meta(method, input, *args, **kwargs)
        prepare_write(input, name)
        recorded = torch.is_grad_enabled() and input.requires_grad
        # The backward pass may want what is overwritten here.
        before = input.clone() if recorded else input
        return input.copy_(rule(before, *args, **kwargs))
