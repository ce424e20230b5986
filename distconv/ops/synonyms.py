"""Rules of functions that are synonyms of functions with rules, or single expressions of them.

Parameters have torch's names, as programs may pass them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.support.arguments import check_on_meta, takes_sequence
from distconv.ops.support.operands import as_distributed, common_grid, gather_whole
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import RULES
from distconv.torch_private import composition, is_all_true, is_any_true, of_sequence

_BY_NAME: dict[str, Callable[..., Any]] = {
    "allclose": lambda input, other, *tolerances, **named: bool(
        torch.isclose(input, other, *tolerances, **named).all()
    ),
    "broadcast_to": takes_sequence("size")(lambda input, *size: input.expand(*size)),
    "count_nonzero": lambda input, dim=None: input.bool().sum(dim),
    "diagflat": lambda input, offset=0: input.flatten().diag_embed(offset),
    "equal": lambda input, other: input.shape == other.shape and bool((input == other).all()),
    "expand_as": lambda input, other: input.expand(tuple(other.shape)),
    "fliplr": lambda input: input.flip(1),
    "is_same_size": lambda input, other: input.shape == other.shape,
    "msort": lambda input: input.sort(0).values,
    "nuclear_norm": lambda input, dim=(-2, -1), keepdim=False: torch.linalg.matrix_norm(
        input, "nuc", dim, keepdim
    ),
    "ravel": lambda input: input.flatten(),
    "reshape_as": lambda input, other: input.reshape(tuple(other.shape)),
    "split_with_sizes": lambda input, split_sizes, dim=0: input.split(tuple(split_sizes), dim),
    "swapaxes": lambda input, axis0, axis1: input.transpose(axis0, axis1),
    "swapdims": lambda input, dim0, dim1: input.transpose(dim0, dim1),
    "type_as": lambda input, other: input.type(other.dtype),
    "view_as": lambda input, other: input.view(tuple(other.shape)),
    "__reversed__": lambda input: input.flip(0) if input.dim() else input,
    "__rmatmul__": lambda input, other: torch.matmul(other, input),
}
"""Rules by name, each for the functions of this name in torch and in torch.Tensor."""

_CHECKED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.bilinear: lambda input1, input2, weight, bias=None: (
        torch.einsum("...a,...b,cab->...c", input1, input2, weight) + (0 if bias is None else bias)
    ),
    F.pairwise_distance: lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: (x1 - x2 + eps).norm(
        p, -1, keepdim
    ),
    torch.chain_matmul: lambda *matrices: reduce(torch.matmul, matrices),
    torch.bucketize: lambda input, boundaries, **options: torch.searchsorted(
        boundaries, input, **options
    ),
    torch.cross: lambda input, other, dim=None: torch.linalg.cross(
        input,
        other,
        dim=torch.broadcast_shapes(input.shape, other.shape).index(3) if dim is None else dim,
    ),
    torch.diag: lambda input, diagonal=0: (
        input.diag_embed(diagonal) if input.dim() == 1 else input.diagonal(diagonal).clone()
    ),
    torch.dist: lambda input, other, p=2: (input - other).norm(p),
    torch.dot: lambda input, tensor: torch.matmul(input, tensor),
    torch.flipud: lambda input: input.flip(0),
    torch.linalg.cross: lambda input, other, *, dim=-1: (
        input.roll(-1, dim) * other.roll(-2, dim) - input.roll(-2, dim) * other.roll(-1, dim)
    ),
    torch.inner: lambda input, other: (
        torch.tensordot(input, other, ((-1,), (-1,)))
        if input.dim() and other.dim()
        else input * other
    ),
    torch.linalg.multi_dot: lambda tensors: reduce(torch.matmul, tensors),
    torch.linalg.vecdot: lambda x, y, *, dim=-1: (x.conj() * y).sum(dim),
    torch.mm: lambda input, mat2: torch.matmul(input, mat2),
    torch.mv: lambda input, vec: torch.matmul(input, vec),
    torch.nanmean: lambda input, dim=None, keepdim=False, *, dtype=None: (
        torch.nansum(input, dim, keepdim, dtype=dtype)
        / input.detach().isnan().logical_not().sum(dim, keepdim)
    ),
    torch.outer: lambda input, vec2: torch.einsum("a,b->ab", input, vec2),
    torch.trace: lambda input: input.diagonal().sum(),
    torch.vdot: lambda input, other: torch.dot(input.conj(), other),
}
"""Rules of functions whose arguments torch checks first, by their global shapes and types."""

_OTHERS: dict[Any, Callable[..., Any]] = {
    F.normalize: lambda input, p=2.0, dim=1, eps=1e-12: (
        input / input.norm(p, dim, keepdim=True).clamp_min(eps)
    ),
    # Samples and lengths of queries stay partitioned; features, keys and values are gathered.
    F.multi_head_attention_forward: composition(F.multi_head_attention_forward),
    is_all_true: lambda input: input.all(),
    is_any_true: lambda input: input.any(),
    torch.linalg.diagonal: lambda A, *, offset=0, dim1=-2, dim2=-1: A.diagonal(offset, dim1, dim2),
    Tensor.mT.__get__: lambda input: input.transpose(-2, -1),  # type: ignore[attr-defined]
    **dict.fromkeys((torch.ger, Tensor.ger), lambda input, vec2: torch.outer(input, vec2)),
    Tensor.to_dense: lambda input, dtype=None, *, masked_grad=None: (
        input if dtype is None else input.to(dtype)
    ),
    Tensor.where: lambda input, condition, other: torch.where(condition, input, other),
}

_TWINS = {
    "alpha_dropout": "input p training",
    "batch_norm": "input weight bias running_mean running_var training momentum eps",
    "binary_cross_entropy_with_logits": "input target weight pos_weight reduction",
    "cosine_embedding_loss": "input1 input2 target margin reduction",
    "dropout": "input p training",
    "feature_alpha_dropout": "input p training",
    "feature_dropout": "input p training",
    "hinge_embedding_loss": "input target margin reduction",
    "instance_norm": "input weight bias running_mean running_var use_input_stats momentum eps",
    "kl_div": "input target reduction",
    "margin_ranking_loss": "input1 input2 target margin reduction",
    "poisson_nll_loss": "input target log_input full eps reduction",
    "triplet_margin_loss": "anchor positive negative margin p eps swap reduction",
}
"""Functions of torch with a namesake in torch.nn.functional, and the namesake's parameters."""


def _twin(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def rule(*args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        given["training"] = given.pop("train", given.get("training"))
        if "reduction" in names:
            given["reduction"] = ("none", "mean", "sum")[given.get("reduction", 0)]
        return function(**{key: x for key, x in given.items() if key in names})

    return rule


def _checked(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **named: Any) -> Any:
        check_on_meta(function, *args, **named)
        return rule(*args, **named)

    return checked


for _name, _rule in _BY_NAME.items():
    for _home in (torch, Tensor):
        if hasattr(_home, _name):
            RULES[getattr(_home, _name)] = _rule
for _function, _rule in _CHECKED.items():
    RULES[_function] = _checked(_function, _rule)
    if hasattr(Tensor, _function.__name__):
        RULES[getattr(Tensor, _function.__name__)] = RULES[_function]
for _name, _parameters in _TWINS.items():
    _twin_of = getattr(F, "dropout2d" if _name == "feature_dropout" else _name)
    RULES[getattr(torch, _name)] = _twin(_twin_of, _parameters.split())
RULES |= _OTHERS


# Functions that every rank computes in full: operands are gathered, results are replicated.


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
