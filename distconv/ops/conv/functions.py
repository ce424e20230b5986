"""torch's convolutions and transposed convolutions, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from distconv.ops.conv.convolution import Convolution
from distconv.ops.conv.no_outputs import without_outputs
from distconv.ops.conv.spatial import convolve
from distconv.ops.conv.transposed_convolution import TransposedConvolution
from distconv.ops.support.argument_forms import accepts_unbatched, to_tuple
from distconv.ops.support.merged import (
    factors_of,
    is_merged,
    merge_as,
    treats_samples_alone,
    unmerged,
)
from distconv.ops.support.operands import distributed_input
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor

_INTEGERS = frozenset({int})
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}


def _convolution(function: Callable[..., Tensor], n: int, kind: Any) -> None:
    """Register the rule of torch's `function`, a convolution of `n` spatial dimensions.

    `kind` is the class of its arguments, `Convolution` or `TransposedConvolution`.
    """

    @implements(function)
    @treats_samples_alone(function, n + 2)
    @accepts_unbatched(function.__name__, n)
    def rule(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **named: Any
    ) -> DistTensor:
        given = map(_hashable, (*args, *named.values()))
        spec = _specification(kind, function, n, *given, named=tuple(named))
        if is_merged(input) and not kind.transposed:
            made = _convolve_points(input, weight, bias, spec)
            if made is not None:
                return made
        x = distributed_input(spec.name, input, weight, bias)
        if isinstance(spec, TransposedConvolution) and spec.has_no_outputs(
            tuple(x.shape), tuple(weight.shape[2:])
        ):
            return without_outputs(x, weight, bias, spec)
        return convolve(x, weight, bias, spec)


def _hashable(argument: Any) -> Any:
    """Return an argument as a key of a cache: a list as a tuple, a 0-d tensor as its number."""
    if type(argument) is tuple and _INTEGERS.issuperset(map(type, argument)):
        return argument
    if isinstance(argument, (tuple, list)):
        return tuple(map(_hashable, argument))
    return argument.item() if isinstance(argument, Tensor) else argument


@lru_cache(maxsize=4096)
def _specification(
    kind: Any, function: Callable[..., Tensor], n: int, *given: Any, named: tuple[str, ...]
) -> Convolution:
    """Return an object of class `kind` with the arguments of torch's `function` after the bias.

    `given` are the values of these arguments. The last of them were passed by keyword, under the
    names `named`. Equal arguments give the same cached object, which other caches find faster.
    """
    names = "stride padding dilation groups".split()
    if kind.transposed:
        names = "stride padding output_padding groups dilation".split()
    names = [*names[: len(given) - len(named)], *named]
    values: dict[str, Any] = _DEFAULTS | dict(zip(names, given, strict=True))
    groups = values.pop("groups")
    sizes = {k: x if isinstance(x, str) else to_tuple(x, n, k) for k, x in values.items()}
    extra = [sizes.pop("output_padding")][: kind.transposed]
    return cast(Convolution, kind(function, *sizes.values(), groups, *extra))


def _convolve_points(
    input: Tensor, weight: Tensor, bias: Tensor | None, spec: Convolution
) -> DistTensor | None:
    """Return the convolution of a merged tensor by a kernel of one element, without moving blocks.

    Returns None for a larger kernel, a stride other than 1, padding, merged samples or channels,
    and more than three unmerged spatial dimensions.
    """
    runs = factors_of(input)
    space = sum(map(len, runs[2:]))
    points = prod(weight.shape[2:]) == 1 and set(spec.stride) == {1}
    padded = not isinstance(spec.padding, str) and any(spec.padding)
    if not points or padded or space > 3 or any(len(run) > 1 for run in runs[:2]):
        return None
    kernel = weight.reshape((*weight.shape[:2], *(1,) * space))
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[space - 1]
    made = convolve(unmerged(input), kernel, bias, groups=spec.groups)
    return cast(DistTensor, merge_as(made, (*made.shape[:2], *input.shape[2:])))


_convolution(torch.conv1d, 1, Convolution)
_convolution(torch.conv2d, 2, Convolution)
_convolution(torch.conv3d, 3, Convolution)
_convolution(torch.conv_transpose1d, 1, TransposedConvolution)
_convolution(torch.conv_transpose2d, 2, TransposedConvolution)
_convolution(torch.conv_transpose3d, 3, TransposedConvolution)
