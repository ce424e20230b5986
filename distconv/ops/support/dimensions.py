"""Decorators by which rules compute on merged tensors without redistributing them.

A rule implements a torch function for DistTensors. A merged tensor (`merged.py`) keeps the tensor
before a reshape, `unmerged`. A decorator here states which dimensions a rule treats equally. For a
merged tensor it calls the rule with `unmerged`, and returns the result as a merged tensor. If that
is not possible, or a rule has no decorator, the rule reads `shard`, which redistributes the
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from distconv.geometry.layout import Shape, replaced_at
from distconv.ops.support.arguments import (
    check_on_meta,
    normalize_dims,
    strided_run,
    to_tuple,
)
from distconv.ops.support.merged import (
    factors_of,
    fitting_factors,
    is_merged,
    merge_as,
    places_of_factors,
    unmerge,
    unmerged,
)
from distconv.ops.support.operands import broadcast_shape
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import Rule
from distconv.tensor.dist_tensor import WITHOUT_MERGED, DistTensor


def _on_merged(special: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Return a decorator: for a merged input, call `special(rule, input, ...)` instead of the rule.

    If `special` returns `NotImplemented`, call the rule.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def either(input: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(input, DistTensor) and input.unmerged is not None:
                result = special(rule, input, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            return rule(input, *args, **kwargs)

        WITHOUT_MERGED[either] = rule
        return cast(Rule, either)

    return decorate


def _on_any_merged(special: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Return a decorator: if any operand is merged, call `special(rule, ...)` instead of the rule.

    If `special` returns `NotImplemented`, call the rule.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def either(*args: Any, **kwargs: Any) -> Any:
            for x in tensors_in(*args, *kwargs.values()):
                if isinstance(x, DistTensor) and x.unmerged is not None:
                    result = special(rule, *args, **kwargs)
                    return rule(*args, **kwargs) if result is NotImplemented else result
            return rule(*args, **kwargs)

        WITHOUT_MERGED[either] = rule
        return cast(Rule, either)

    return decorate


# Functions that treat elements, or the positions of some dimensions, alike.


def works_elementwise(
    name: str, in_place: bool = False, takes_inplace: bool = False
) -> Callable[[Rule], Rule]:
    """Return a decorator by which an element-wise rule computes on the unmerged operands.

    For merged tensors see `merged.py`. All operands must split into common factors.

    Parameters
    ----------
    name: the torch function, for errors.
    in_place: whether the rule writes to its first argument, and returns this argument.
    takes_inplace: whether the rule writes to its first argument if called with `inplace=True`.
    """

    def special(rule: Rule, *args: Any, **kwargs: Any) -> Any:
        written: Any = None
        if in_place or (takes_inplace and kwargs.get("inplace")):
            written = args[0] if args else kwargs["input"]
            if not is_merged(written) or written.brought:
                return NotImplemented
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        shape = broadcast_shape(name, operands)
        factors = fitting_factors([factors_of(x) for x in operands], shape)
        if factors is None:
            return NotImplemented
        if written is not None and (shape != written.shape or factors != factors_of(written)):
            return NotImplemented

        def apart(x: Any) -> Any:
            return unmerge(x, factors) if isinstance(x, Tensor) else x

        result = rule(*map(apart, args), **{k: apart(x) for k, x in kwargs.items()})
        if written is not None:
            written.sync_requires_grad()
            return written
        # A conversion that changes nothing returns the tensor itself.
        same = [x for x in operands if is_merged(x) and result is unmerged(x)]
        return same[0] if same else merge_as(result, shape)

    return _on_any_merged(special)


def keeps_shape(rule: Rule) -> Rule:
    """Let an element-wise rule of one tensor compute on merged tensors, unless it is in place.

    For merged tensors see `merged.py`. The result may have further dimensions after those of the
    tensor.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("inplace"):
            return NotImplemented
        own = input.unmerged
        result = rule(own, *args, **kwargs)
        if result is own:
            return input
        if not isinstance(result, Tensor):
            return result
        return merge_as(result, (*input.shape, *result.shape[own.dim() :]))

    return _on_merged(special)(rule)


def works_on_last(count: Callable[..., int]) -> Callable[[Rule], Rule]:
    """Return a decorator by which a rule of the last dimensions computes on merged tensors.

    The last dimensions must not be merged (`merged.py`). `count` takes the rule's arguments after
    the input, and returns the number of last dimensions.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        n = count(*args, **kwargs)
        if not n or any(len(run) > 1 for run in factors_of(input)[-n:]):
            return NotImplemented
        result = rule(input.unmerged, *args, **kwargs)
        return merge_as(result, (*input.shape[:-n], *result.shape[-n:]))

    return _on_merged(special)


def works_on_channels(*, of_each_sample: bool) -> Callable[[Rule], Rule]:
    """Return a decorator for rules of (sample, channel, *space) that treat all positions equally.

    The decorated rule computes on merged spatial dimensions (`merged.py`). Samples may be merged,
    too, unless the rule computes each sample separately (`of_each_sample`). The inner factors of
    samples become spatial dimensions.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        if input.dim() < 2:
            return NotImplemented
        samples, channels, *_ = factors_of(input)
        if len(channels) != 1 or (of_each_sample and len(samples) != 1):
            return NotImplemented
        place = len(samples)
        result = rule(input.unmerged.movedim(place, 1), *args, **kwargs)
        return merge_as(result.movedim(1, place), input.shape)

    return _on_merged(special)


def convolves(function: Callable[..., Tensor], n: int, transposed: bool) -> Callable[[Rule], Rule]:
    """Return a decorator by which the rule of a convolution computes on merged tensors.

    `function` is torch's convolution of `n` spatial dimensions. Merged samples (`merged.py`) are
    supported if no other dimension is partitioned: each rank calls `function` on its own samples.
    Merged spatial dimensions are supported if the kernel has one element, and the convolution is
    not `transposed`.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        if input.dim() == n + 1:  # one sample
            input = input.unsqueeze(0)
            made = special(rule, input, *args, **kwargs) if is_merged(input) else NotImplemented
            return made if made is NotImplemented else made.squeeze(0)
        if input.dim() != n + 2:
            return NotImplemented
        made = _on_own_samples(function, input, *args, **kwargs)
        if made is NotImplemented and not transposed:
            made = _convolve_points(n, input, *args, **kwargs)
        return made

    return _on_merged(special)


def works_on_samples(function: Callable[..., Tensor], n: int) -> Callable[[Rule], Rule]:
    """Return a decorator by which the rule of a pooling computes on merged samples (`merged.py`).

    `function` is torch's pooling of `n` spatial dimensions. If only samples are partitioned, each
    rank calls `function` on its own samples.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        if input.dim() != n + 2:
            return NotImplemented
        return _on_own_samples(function, input, *args, **kwargs)

    return _on_merged(special)


def _on_own_samples(function: Callable[..., Tensor], input: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `function` of an input with merged samples, computed by each rank on its own samples.

    Returns `NotImplemented` if other dimensions are merged or partitioned, if another argument is
    distributed, or if a result has no elements. No communication.
    """
    own, runs = unmerged(input), factors_of(input)
    lead = len(runs[0])
    if (
        any(len(run) > 1 for run in runs[1:])
        or any(isinstance(x, DistTensor) for x in (*args, *kwargs.values()))
        or any(own.cuts[lead:])
    ):
        return NotImplemented
    given = check_on_meta(function, input, *args, **kwargs)
    several = not isinstance(given[0], int)  # maxima and their places
    shapes = given if several else (given,)
    if any(0 in shape for shape in shapes):
        return NotImplemented
    found = function(own.shard.flatten(0, lead - 1), *args, **kwargs)

    def merged(block: Tensor, shape: Shape) -> Tensor:
        block = block.reshape((*own.shard.shape[:lead], *shape[1:]))
        made = (*own.shape[:lead], *shape[1:])
        result: Tensor = merge_as(DistTensor(block, made, own.cuts, own.grid), shape)
        return result

    results = tuple(map(merged, found if several else (found,), shapes))
    return results if several else results[0]


def _convolve_points(
    n: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Return the convolution of an input with merged positions by a kernel of one element.

    `n` is the number of spatial dimensions. Returns `NotImplemented` for a larger kernel, a stride
    other than 1, padding, merged samples or channels, and more than three unmerged spatial
    dimensions.
    """
    runs = factors_of(input)
    space = sum(map(len, runs[2:]))
    points = prod(weight.shape[2:]) == 1 and set(to_tuple(stride, n, "stride")) == {1}
    padded = not isinstance(padding, str) and any(to_tuple(padding, n, "padding"))
    if not points or padded or space > 3 or any(len(run) > 1 for run in runs[:2]):
        return NotImplemented
    kernel = weight.reshape((*weight.shape[:2], *(1,) * space))
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[space - 1]
    made = convolve(unmerged(input), kernel, bias, groups=groups)
    return merge_as(made, (*made.shape[:2], *input.shape[2:]))


# Functions that work along the dimensions that an argument names, and treat all others alike.


def works_along(*, reduces: bool, several: bool = True) -> Callable[[Rule], Rule]:
    """Return a decorator by which a rule with an argument `dim` computes on the unmerged tensor.

    For merged tensors see `merged.py`. Dimensions in `dim` may be merged only if the rule accepts
    several dimensions, or None for all.

    Parameters
    ----------
    reduces: whether the rule reduces the dimensions in `dim` to size 1.
    several: whether `dim` may be a sequence of dimensions.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature(rule).bind(input, *args, **kwargs)
        dim = given.arguments.get("dim")
        places = places_of_factors(input)
        over = _dims(dim, input.dim())
        single = over is not None and all(len(places[d]) == 1 for d in over)
        if over is None or not (single or several or dim is None):
            return NotImplemented
        if dim is not None:
            inner = [i for d in over for i in places[d]]
            given.arguments["dim"] = inner[0] if isinstance(dim, int) and single else inner
        given.arguments["input"] = input.unmerged
        result = rule(*given.args, **given.kwargs)
        kept = bool(given.arguments.get("keepdim")) or not reduces
        sizes = [
            1 if reduces and d in over else n
            for d, n in enumerate(input.shape)
            if kept or d not in over
        ]
        if isinstance(result, tuple):
            make = getattr(type(result), "_make", tuple)
            return make(merge_as(x, sizes) for x in result)
        return merge_as(result, sizes)

    return _on_merged(special)


def _dims(dim: Any, ndim: int) -> tuple[int, ...] | None:
    """Return the dimensions that the argument `dim` names; None for a bool or empty sequence."""
    if isinstance(dim, bool) or (isinstance(dim, Sequence) and not dim):
        return None
    return normalize_dims(dim, ndim)


def joins_along(rule: Rule) -> Rule:
    """Let a rule of (tensors, d, ...) that joins along dimension `d` compute on merged tensors.

    No tensor may be merged (`merged.py`) along `d`, and the other dimensions must split into common
    factors.
    """

    def special(rule: Rule, pieces: Sequence[DistTensor], d: int, *_: Any) -> Any:
        runs = [factors_of(x) for x in pieces]
        shape = [*pieces[0].shape]
        factors = fitting_factors([(*run[:d], (), *run[d + 1 :]) for run in runs], shape)
        if factors is None or any(len(run[d]) > 1 for run in runs):
            return NotImplemented
        apart = [unmerge(x, replaced_at(factors, d, (x.shape[d],))) for x in pieces]
        shape[d] = sum(x.shape[d] for x in pieces)
        return merge_as(rule(apart, sum(map(len, factors[:d]))), shape)

    return _on_any_merged(special)(rule)


def divides_along(rule: Rule) -> Rule:
    """Let a rule of (input, d, ...) that divides along dimension `d` compute on merged tensors.

    The rule returns a tuple of tensors, all with dimension `d` or all without. `d` itself must not
    be merged (`merged.py`).
    """

    def special(rule: Rule, input: Any, d: int, *args: Any) -> Any:
        inner, *others = places_of_factors(input)[d]
        if others:
            return NotImplemented

        def merged(part: Tensor) -> Tensor:
            kept = part.shape[inner : inner + part.dim() + 1 - input.unmerged.dim()]
            result: Tensor = merge_as(part, (*input.shape[:d], *kept, *input.shape[d + 1 :]))
            return result

        return tuple(map(merged, rule(input.unmerged, inner, *args)))

    return _on_merged(special)(rule)


def gathers_along(rule: Rule) -> Rule:
    """Let a rule of (input, index, d), for torch.gather, compute on merged tensors.

    Neither tensor may be merged (`merged.py`) along `d`. All other dimensions need equal sizes and
    common factors.
    """

    def special(rule: Rule, input: Tensor, index: Tensor, d: int) -> Any:
        runs = [factors_of(input), factors_of(index)]
        sizes = replaced_at(tuple(input.shape), d, index.shape[d])
        if sizes != tuple(index.shape) or any(len(run[d]) > 1 for run in runs):
            return NotImplemented
        factors = fitting_factors([replaced_at(run, d, ()) for run in runs], input.shape)
        if factors is None:
            return NotImplemented
        x, named = (unmerge(t, replaced_at(factors, d, (t.shape[d],))) for t in (input, index))
        return merge_as(rule(x, named, sum(map(len, factors[:d]))), index.shape)

    return _on_any_merged(special)(rule)


def picks_in_order(rule: Rule) -> Rule:
    """Let a rule of (input, mask, ...) that selects rows compute on merged tensors (`merged.py`).

    The rule returns the rows of `input` at which `mask`, a tensor over the leading dimensions, is
    true, in row-major order.
    """

    def special(rule: Rule, input: Tensor, mask: Tensor, *args: Any) -> Any:
        runs, over = factors_of(input), mask.dim()
        factors = fitting_factors([runs[:over], factors_of(mask)], mask.shape)
        factors = factors or tuple((n,) for n in mask.shape)
        rows = rule(unmerge(input, (*factors, *runs[over:])), unmerge(mask, factors), *args)
        return merge_as(rows, (len(rows), *input.shape[over:]))

    return _on_any_merged(special)(rule)


# Slices of a tensor, read and written.


def takes_slices(rule: Rule) -> Rule:
    """Let a rule of (input, index), which returns `input[index]`, compute on merged tensors.

    `index` has an integer or slice for each dimension, and None for each new dimension. Merged
    dimensions (`merged.py`) must be selected in full.
    """

    def special(rule: Rule, input: Any, index: Sequence[Any]) -> Any:
        found = _index_of_factors(input, index)
        if found is None:
            return NotImplemented
        own, factors = found
        return merge_as(rule(input.unmerged, own), [prod(run) for run in factors])

    return _on_merged(special)(rule)


def assigns_slices(rule: Rule) -> Rule:
    """Let a rule of (input, index, value), for `input[index] = value`, compute on merged tensors.

    `index` has an integer or slice for each dimension, and None for each new dimension. Merged
    dimensions (`merged.py`) must be selected in full. The elements of `input` must not have been
    redistributed yet.
    """

    def special(rule: Rule, input: Any, index: Sequence[Any], value: Any) -> Any:
        found = None if input.brought else _index_of_factors(input, index)
        if found is None:
            return NotImplemented
        own, factors = found
        if isinstance(value, Tensor):
            while value.dim() > len(factors) and value.shape[0] == 1:
                value = value.squeeze(0)
            sizes = zip(value.shape[::-1], factors[::-1], strict=False)
            if value.dim() > len(factors) or any(n not in (1, prod(run)) for n, run in sizes):
                return NotImplemented
            value = unmerge(value, factors)
        rule(input.unmerged, own, value)
        input.sync_requires_grad()
        return None

    return _on_merged(special)(rule)


def _index_of_factors(
    input: DistTensor, index: Sequence[Any]
) -> tuple[tuple[Any, ...], list[Shape]] | None:
    """Return the index into `input.unmerged` for `input[index]`, and the factors of the result.

    The factors are listed for each dimension of the result. Returns None unless `index` selects
    merged dimensions in full.
    """
    runs = enumerate(zip(factors_of(input), input.shape, strict=True))
    own: list[Any] = []
    factors: list[Shape] = []
    for pick in index:
        if pick is None:
            own.append(None)
            factors.append((1,))
            continue
        d, (run, size) = next(runs)
        outputs = strided_run(pick, size, d)
        if len(run) == 1:
            own.append(pick)
        elif isinstance(pick, int) or outputs != (0, 1, size):
            return None
        else:
            own += [slice(None)] * len(run)
        if not isinstance(pick, int):
            factors.append(run if len(run) > 1 else (outputs[2],))
    return tuple(own), factors
