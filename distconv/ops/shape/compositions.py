"""Changes of shape and order, composed of other functions with rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops import synonyms  # noqa: F401  registers what is looked up here
from distconv.ops.shape import rearrange, reshape  # noqa: F401
from distconv.ops.shape.indexing import slice_of
from distconv.ops.shape.lookup import index_select
from distconv.ops.shape.rearrange import flip
from distconv.ops.shape.reshape import expand
from distconv.ops.support.argument_forms import as_sizes, normalize_dim, takes_sequence
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import as_distributed, common_grid, gather_whole, unravel
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import tensors_in
from distconv.torch_private import without_torch_dispatch, without_torch_function


@implements(torch.Tensor.sum_to_size)
@takes_sequence("size")
def sum_to_size(input: DistTensor, *size: Any) -> Tensor:
    sizes = as_sizes(size)
    check_on_meta(torch.Tensor.sum_to_size, any_type(input), *([sizes] if size else []))
    lead = input.dim() - len(sizes)
    over = [d for d, n in enumerate(input.shape) if d < lead or sizes[d - lead] == 1 != n]
    return input.sum(over, keepdim=True).reshape(sizes) if over else input


@implements(torch.adjoint, torch.Tensor.adjoint, torch.Tensor.mH.__get__)  # type: ignore[attr-defined]
def adjoint(input: Tensor) -> Tensor:
    if input.dim() < 2:
        raise RuntimeError(f"adjoint: expected 2 dimensions or more, got {tuple(input.shape)}")
    transposed = input.transpose(-2, -1)
    return transposed.conj() if input.is_complex() else transposed


@implements(torch.Tensor.H.__get__)  # type: ignore[attr-defined]
def hermitian(input: Tensor) -> Tensor:
    if input.dim() not in (0, 2):
        raise RuntimeError(f"H: expected a matrix, got the shape {tuple(input.shape)}; use mH")
    return adjoint(input) if input.dim() else input.conj()


@implements(torch.rot90, torch.Tensor.rot90)
def rot90(input: DistTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    check_on_meta(torch.rot90, any_type(input), k, tuple(dims))
    first, second = dims
    turns = k % 4
    if turns == 0:
        return input.clone()
    if turns == 2:
        return flip(input, first, second)
    return flip(input, second if turns == 1 else first).transpose(first, second)


@implements(F.channel_shuffle, torch.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(input: DistTensor, groups: int) -> DistTensor:
    check_on_meta(torch.channel_shuffle, any_type(input), groups)
    places = torch.arange(input.shape[1], device=input.device)
    return index_select(input, 1, places.view(groups, -1).t().flatten())


@implements(torch.repeat_interleave, torch.Tensor.repeat_interleave)
def repeat_interleave(
    input: Tensor,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> DistTensor:
    if repeats is None:
        reason = "numbers of repetitions alone are not supported"
        refuse("repeat_interleave", reason, input, way_out="Call it on x.full_tensor()")
    x: Any = as_distributed(input, common_grid("repeat_interleave", tensors_in(input, repeats)))
    if dim is None:
        x = x.flatten()
    d = normalize_dim(0 if dim is None else dim, x.dim())
    if not x.dim():
        x = x.reshape(1)
    places = torch.arange(x.shape[d], device=x.device)
    counts = gather_whole(repeats, "repeat_interleave")
    chosen = torch.repeat_interleave(places, counts, output_size=output_size)
    return index_select(x, d, chosen)


@implements(torch.unravel_index)
def unravel_index(indices: Tensor, shape: Any) -> tuple[Tensor, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    check_on_meta(_unraveled, indices, sizes)
    return tuple(unravel(indices, sizes))


def _unraveled(indices: Tensor, sizes: tuple[int, ...]) -> Any:
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"unravel_index: indices of {indices.dtype}; expected whole numbers")
    if min(sizes, default=0) < 0:
        raise ValueError(f"unravel_index: the shape {sizes} has a negative size")
    return [indices for _ in sizes]


# Functions that return a copy where the function without `_copy` returns a view.


def _copied(function: Callable[..., Any], view: Callable[..., Any]) -> None:
    @implements(function)
    def rule(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        if isinstance(result, Tensor):
            return result.clone()
        return tuple(part.clone() for part in result)


for _name in """
    detach diagonal narrow permute select split split_with_sizes squeeze t transpose unbind
    unsqueeze view_as_complex view_as_real
""".split():
    _copied(getattr(torch, f"{_name}_copy"), getattr(torch, _name))
_copied(torch.Tensor.narrow_copy, torch.narrow)
_copied(torch.alias_copy, lambda input: input)
_copied(torch.expand_copy, lambda input, size, *, implicit=False: expand(input, size))
_copied(torch.slice_copy, slice_of)
_copied(torch.unfold_copy, torch.Tensor.unfold)
_copied(torch.view_copy, torch.Tensor.view)


def _in_place(method: Callable[..., Any], view: Callable[..., Any]) -> None:
    name = method.__name__
    rule = RULES[view]

    @implements(method)
    def reshaped(input: DistTensor, *args: Any, **kwargs: Any) -> DistTensor:
        hooked = input.is_leaf or input.gradient_hook or not torch.is_grad_enabled()
        if input.requires_grad and hooked:
            reason = "the gradient that is kept of the tensor, or its history, would not take part"
            way_out = f"Use the view that x.{name.removesuffix('_')}(...) returns"
            refuse(name, reason, input, way_out=way_out)
        made = rule(input, *args, **kwargs)
        # Below torch's functions, a tensor without elements holds the shape, too.
        with torch.no_grad(), without_torch_function(), without_torch_dispatch():
            method(input, *args, **kwargs)
        input.become(made)
        return input


for _name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"):
    _in_place(getattr(torch.Tensor, f"{_name}_"), getattr(torch.Tensor, _name))
