"""Changes of shape in place: the tensor takes the shard, the shape and the cuts of its view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv.ops import synonyms  # noqa: F401  registers what is looked up here
from distconv.ops.shape import rearrange, reshape  # noqa: F401
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import without_torch_dispatch, without_torch_function


def _in_place(method: Callable[..., Any], view: Callable[..., Any]) -> None:
    name = method.__name__
    rule = RULES[view]

    @implements(method)
    def reshaped(input: DistTensor, *args: Any, **kwargs: Any) -> DistTensor:
        hooked = input.is_leaf or input.gradient_hook or not torch.is_grad_enabled()
        if input.requires_grad and hooked:
            refuse(
                name,
                "the gradient that is kept of the tensor, or its history, would not take part",
                input,
                way_out=f"Use the view that x.{name.removesuffix('_')}(...) returns",
            )
        made = rule(input, *args, **kwargs)
        # Below torch's functions, a tensor without elements holds the shape, too.
        with (
            torch.no_grad(),
            without_torch_function(),
            without_torch_dispatch(),
        ):
            method(input, *args, **kwargs)
        input.become(made)
        return input


for _name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"):
    _in_place(getattr(torch.Tensor, f"{_name}_"), getattr(torch.Tensor, _name))
