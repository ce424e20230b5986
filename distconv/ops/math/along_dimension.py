"""Functions along one dimension, such as sort, which treat other dimensions element by element.

If the dimension is partitioned, the tensor is redistributed first, so that every rank has all
positions along the dimension. The redistribution is recorded.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.packing import has_channels_last
from distconv.ops.shape.reshape import flatten
from distconv.ops.support.arguments import any_type, check_on_meta, normalize_dim
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.operands import (
    apply_along,
    apply_to_batches,
    as_distributed,
    common_grid,
    gather_whole,
)
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute

_ALONG = {
    "argsort": "dim=-1 descending=False stable=False",
    "glu": "dim=-1",
    "kthvalue": "k dim=-1 keepdim=False",
    "median": "dim=None keepdim=False",
    "mode": "dim=-1 keepdim=False",
    "nanmedian": "dim=None keepdim=False",
    "prod": "dim=None keepdim=False",
    "sort": "dim=-1 descending=False stable=False",
    "topk": "k dim=-1 largest=True sorted=True",
}
"""Functions along dimension `dim`, or over all for None, with their parameters after the input."""


def _along(function: Callable[..., Any], name: str, parameters: str) -> Callable[..., Any]:
    """Return the rule of a torch function that works along its argument `dim`.

    The rule redistributes its input, so that every rank has all positions along `dim`. `name` is
    the name of the function, for the records of redistributions. `parameters` are torch's names of
    the arguments after the input, with defaults, such as "k dim=-1".
    """
    pairs = [parameter.partition("=") for parameter in parameters.split()]
    defaults = {key: literal_eval(value) for key, _, value in pairs if value}

    def rule(input: DistTensor, *args: Any, **named: Any) -> Any:
        given = defaults | dict(zip((key for key, *_ in pairs), args, strict=False)) | named
        if given.get("dim") is None:
            every = range(input.dim())
            given = {key: x for key, x in given.items() if key not in ("dim", "keepdim")}
            return apply_along(function, name, input, every, dropped=every, **given)
        check_on_meta(function, input, **given)  # which raises for True, a number to Python
        d = given["dim"] = normalize_dim(given["dim"], input.dim())
        dropped = [d] if "keepdim" in given and not given["keepdim"] else []
        return apply_along(function, name, input, [d], dropped=dropped, **given)

    return rule


for _name, _parameters in _ALONG.items():
    for _home in (torch, torch.Tensor, F):
        if hasattr(_home, _name):
            _function = getattr(torch if hasattr(torch, _name) else F, _name)
            RULES[getattr(_home, _name)] = _along(_function, _name, _parameters)


@implements(torch.frexp, torch.Tensor.frexp)
def frexp(input: DistTensor) -> Any:
    return apply_along(torch.frexp, "frexp", input, [])


@implements(F.local_response_norm)
def local_response_norm(
    input: DistTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> DistTensor:
    """Return input / (k + alpha * mean square of `size` adjacent channels) ** beta. Collective."""
    check_on_meta(F.local_response_norm, any_type(input), size, alpha, beta, k)
    name = "local_response_norm"

    def normalized(x: Tensor, *args: Any) -> Tensor:
        # For volumes torch calls x.view, which raises for the strides of some blocks.
        strided = x.dim() > 4 and not has_channels_last(x)
        return F.local_response_norm(x.contiguous() if strided else x, *args)

    y = apply_along(normalized, name, input, [1], size, alpha, beta, k)
    return redistribute(y, input.cuts, name)


@implements(torch.renorm, torch.Tensor.renorm)
def renorm(input: Any, p: float, dim: int, maxnorm: float) -> Tensor:
    check_on_meta(torch.renorm, input, p, dim, maxnorm)
    d = normalize_dim(dim, input.dim())
    over = [i for i in range(input.dim()) if i != d]
    length = torch.linalg.vector_norm(input, p, over, keepdim=True)
    scale = torch.where(length > maxnorm, maxnorm / (length + 1e-7), 1.0)
    return input * scale.to(input.dtype)


implements_in_place(torch.Tensor.renorm_, renorm)


def _quantile(name: str) -> None:
    function: Callable[..., Any] = getattr(torch, name)

    @implements(function, getattr(torch.Tensor, name))
    def rule(
        input: Tensor,
        q: float | Tensor,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> Any:
        check_on_meta(function, input, q, dim, keepdim, interpolation=interpolation)
        if not isinstance(input, DistTensor):
            input = as_distributed(input, common_grid(name, tensors_in(input, q)))
        if dim is None:
            x = flatten(input)
            result = rule(x, q, 0, interpolation=interpolation)
            return result.reshape((*result.shape, *(1,) * input.dim())) if keepdim else result
        d = normalize_dim(dim, input.dim())
        fractions = gather_whole(q, name)
        if not isinstance(fractions, Tensor):
            fractions = torch.full((), fractions, dtype=input.dtype, device=input.device)
        # For a vector of fractions, torch puts the dimension of quantiles first. Here it is last,
        # so that the other dimensions keep their numbers.
        last = apply_along(
            _with_quantiles_last, name, input, [d], function, fractions, d, interpolation,
            dropped=[d],
        )  # fmt: skip
        values: Tensor = last.unsqueeze(d) if keepdim and input.dim() else last
        return values.movedim(-1, 0) if fractions.dim() else values.squeeze(-1)


def _with_quantiles_last(
    x: Tensor, function: Callable[..., Tensor], q: Tensor, d: int, interpolation: str
) -> Tensor:
    found = function(x, q.reshape(-1), d, interpolation=interpolation)
    return found.movedim(0, -1)


_quantile("quantile")
_quantile("nanquantile")


# Membership of elements in a set, and the intervals in which they lie.


@implements(torch.isin)
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Return whether each element is among `test_elements`, which are gathered. Collective."""
    among = gather_whole(test_elements, "isin")
    if not isinstance(elements, DistTensor):
        grid = test_elements.grid
        found = torch.isin(elements, among, assume_unique=assume_unique, invert=invert)
        return as_distributed(found, grid)
    common_grid("isin", (elements, test_elements))
    found = torch.isin(elements.shard, among, assume_unique=assume_unique, invert=invert)
    return DistTensor(found, elements.shape, elements.cuts, elements.grid)


@implements(torch.searchsorted)
def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """Return the indices at which elements of `input` would be inserted in sorted vectors.

    The vectors are along the last dimension of `sorted_sequence`, which is gathered first.
    Collective. Raises UnsupportedOperation for a `sorter`.
    """
    options: Any = dict(out_int32=out_int32, right=right, side=side)
    if sorter is not None:
        reason = "a sorter is not supported"
        way_out = "Pass sorted_sequence.gather(-1, sorter)"
        refuse("searchsorted", reason, sorted_sequence, input, sorter, way_out=way_out)
    grid = common_grid("searchsorted", (sorted_sequence, input))
    if not isinstance(input, Tensor):
        input = torch.tensor(input, dtype=sorted_sequence.dtype, device=sorted_sequence.device)
    if sorted_sequence.dim() > 1:
        return apply_to_batches(
            torch.searchsorted, "searchsorted", [sorted_sequence, input], [1, 1], **options
        )
    check_on_meta(torch.searchsorted, sorted_sequence, input, **options)
    x = as_distributed(input, grid)
    vector = gather_whole(sorted_sequence, "searchsorted")
    found = torch.searchsorted(vector, x.shard.contiguous(), **options)
    return DistTensor(found, x.shape, x.cuts, grid)
