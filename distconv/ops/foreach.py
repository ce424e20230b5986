"""Functions of lists of tensors, such as optimizers call: torch._foreach_* and fused steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv import torch_private
from distconv.comm.collectives import all_reduce
from distconv.geometry.topology import AXES
from distconv.ops.support.operands import common_grid
from distconv.tensor.aliasing import prepare_write, update_views
from distconv.tensor.base import shards_of
from distconv.tensor.dispatch import RULES, UNCHECKED, implements, refuse
from distconv.tensor.dist_tensor import DistTensor

_NAMES = (
    *("add", "sub", "mul", "div", "pow", "neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal"),
    *("maximum", "minimum", "clamp_min", "clamp_max", "lerp", "addcmul", "addcdiv"),
)
_IN_PLACE = (*(f"{name}_" for name in _NAMES), "copy_", "zero_")


def _one_by_one(name: str) -> Callable[..., list[Tensor]]:
    """Return the rule of torch's `_foreach_` function `name`: one method call for each tensor.

    Operands that are lists contribute the element at the tensor's position.
    """
    method = getattr(Tensor, name, None) or _in_place(getattr(Tensor, name.rstrip("_")))
    scaled = name.rstrip("_") in ("addcmul", "addcdiv")

    def rule(tensors: list[Tensor], *operands: Any, **options: Any) -> list[Tensor]:
        if scaled and len(operands) == 3:
            *operands, options["value"] = operands  # type: ignore[assignment]
        return [
            method(x, *(_of(o, i) for o in operands), **{k: _of(o, i) for k, o in options.items()})
            for i, x in enumerate(tensors)
        ]

    return rule


@implements(torch_private.of_lists("norm"))
def norm(tensors: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in tensors]


@implements(torch_private.unscale_gradients)
def unscale(gradients: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by `inverse`; set `found` to 1 on all ranks if any rank has an inf or nan.

    torch.amp.GradScaler calls this function. Collective.
    """
    shards = shards_of(gradients)
    torch_private.unscale_gradients([shard for shard in shards if shard.numel()], found, inverse)
    grid = common_grid("GradScaler", gradients)
    found.copy_(all_reduce(found, grid, AXES).clamp(max=1.0))


def _of_optimizer(function: Callable[..., None]) -> Callable[..., None]:
    """Return the rule of a fused optimizer step, such as Adam's: each rank updates its shards.

    The rule raises UnsupportedOperation if a state has another layout than its parameter.
    """
    name = function.__name__

    def rule(parameters: list[Tensor], *lists: list[Tensor], **options: Any) -> None:
        columns = [parameters, *(column for column in lists if column)]
        for p, *others in zip(*columns, strict=True):
            # A number of steps is a scalar, and has no layout to check.
            for x in (x for x in others if x.dim() and isinstance(p, DistTensor)):
                if not isinstance(x, DistTensor) or (x.cuts, x.grid) != (p.cuts, p.grid):
                    way_out = "Load its state by distconv.load_full_state_dict(optimizer, state)"
                    refuse(name, "the optimizer's state has another layout", p, x, way_out=way_out)
        written = [x for column in columns for x in column if isinstance(x, DistTensor)]
        for x in written:
            prepare_write(x, name)
        function(*(shards_of(column) for column in (parameters, *lists)), **options)
        for x in written:
            update_views(x)

    return rule


def _in_place(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that writes the result of `method` to its first argument."""
    return lambda x, *operands: x.copy_(method(x, *operands))


def _of(operand: Any, i: int) -> Any:
    return operand[i] if isinstance(operand, (list, tuple)) else operand


for _name in (*_NAMES, *_IN_PLACE):
    RULES[torch_private.of_lists(_name)] = _one_by_one(_name)

for _name in ("adam", "adamw", "adagrad", "sgd"):
    _function = torch_private.fused_step(_name)
    RULES[_function] = _of_optimizer(_function)

# The methods check their own operands; the tensors of a list may be on several grids.
UNCHECKED.update(f for f in RULES if f.__name__.startswith(("_foreach_", "_fused_")))
