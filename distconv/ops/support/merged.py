"""Merged tensors: reshapes whose cut dimensions have become inner factors of others.

Where x, (sample, channel, height, width), is cut in height, rows of all ranks take turns in
`x.permute(0, 2, 3, 1).flatten(0, 2)`, so canonical blocks would have to be moved. The result keeps
the tensor before the reshape, `unmerged`. Functions that treat all rows alike work on `unmerged`,
and their results are merged, too; reading the `shard` of a merged tensor moves its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from itertools import chain
from math import prod
from typing import Any, cast

from torch import Tensor

from distconv.geometry.layout import Shape, common_factors, merged_runs
from distconv.ops.support.arguments import check_on_meta, normalize_dims
from distconv.ops.support.operands import broadcast_shape
from distconv.tensor.dispatch import WITHOUT_MERGED, Rule
from distconv.tensor.dist_tensor import DistTensor


def is_merged(x: Any) -> bool:
    """Return whether `x` is a merged DistTensor, which is not cut in blocks."""
    return isinstance(x, DistTensor) and x.unmerged is not None


def factors_of(x: Tensor) -> tuple[Shape, ...]:
    """Return for each dimension of `x` the sizes of the unmerged dimensions that it merges.

    If `x` is not merged, each dimension has its own size as its only factor.
    """
    if isinstance(x, DistTensor) and x.unmerged is not None:
        return merged_runs(tuple(x.unmerged.shape), tuple(x.shape))
    return tuple((n,) for n in x.shape)


def places_of_factors(x: DistTensor) -> list[list[int]]:
    """Return for each dimension of `x` the dimensions of `x.unmerged` that are its factors."""
    places, i = [], 0
    for run in factors_of(x):
        places.append(list(range(i, i + len(run))))
        i += len(run)
    return places


def fitting_factors(
    operands: Sequence[Sequence[Shape]], shape: Sequence[int]
) -> tuple[Shape, ...] | None:
    """Return for each dimension of `shape` the factors into which all operands can be split.

    `operands` has for each operand the factors of its dimensions; operands are broadcast to
    `shape`. Returns None if the factors of the operands do not fit together.
    """
    splits: list[list[Shape]] = [[(n,)] for n in shape]
    for runs in operands:
        for rows, run, n in zip(splits[::-1], runs[::-1], shape[::-1], strict=False):
            if prod(run) == n:
                rows.append(run)
    found = [common_factors(rows) for rows in splits]
    return None if None in found else cast("tuple[Shape, ...]", tuple(found))


def unmerge(x: Tensor, factors: Sequence[Shape]) -> Tensor:
    """Return `x` with each dimension split into its `factors`; size 1 is split into ones."""
    own = factors[len(factors) - x.dim() :]
    sizes = zip(x.shape, own, strict=True)
    shape = tuple(chain.from_iterable(f if n == prod(f) else (1,) * len(f) for n, f in sizes))
    if isinstance(x, DistTensor) and x.unmerged is not None and x.unmerged.shape == shape:
        return x.unmerged
    return x if shape == tuple(x.shape) else x.reshape(shape)


def unmerged(x: Tensor) -> DistTensor:
    """Return `x.unmerged`, the tensor before the reshape, of a merged tensor `x`."""
    return cast(DistTensor, cast(DistTensor, x).unmerged)


def in_blocks(x: Tensor) -> Tensor:
    """Return a tensor with the same elements that is not merged. Collective."""
    if isinstance(x, DistTensor) and x.unmerged is not None:
        return DistTensor(x.shard, x.shape, x.cuts, x.grid)
    return x


def merge_as(result: Any, shape: Sequence[int]) -> Any:
    """Return `result`, computed on unmerged tensors, as a view of this merged shape."""
    return result.view(tuple(shape)) if isinstance(result, Tensor) else result


def compute_elementwise(
    name: str, rule: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], written: Any
) -> Any:
    """Return the result of an element-wise rule for operands of which some are merged.

    The rule is called with unmerged operands. Returns `NotImplemented` if the operands do not fit
    together unmerged, so that the caller must move blocks. `name` is the function, for errors;
    `written` is the operand that the rule writes to, or None.
    """
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    shape = broadcast_shape(name, operands)
    factors = fitting_factors([factors_of(x) for x in operands], shape)
    if factors is None:
        return NotImplemented
    if written is not None:
        if not is_merged(written) or written.brought:
            return NotImplemented
        if shape != written.shape or factors != factors_of(written):
            return NotImplemented

    def apart(x: Any) -> Any:
        return unmerge(x, factors) if isinstance(x, Tensor) else x

    result = rule(*map(apart, args), **{k: apart(x) for k, x in kwargs.items()})
    if written is not None:
        written.sync_requires_grad()
        return written
    # A conversion that changes nothing returns the tensor itself.
    same = [x for x in operands if is_merged(x) and result is cast(DistTensor, x).unmerged]
    return same[0] if same else merge_as(result, shape)


def _on_merged(special: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Return a decorator: a merged input calls `special(rule, input, ...)` in place of the rule.

    The rule itself is called if `special` returns `NotImplemented`.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def either(input: Any, *args: Any, **kwargs: Any) -> Any:
            if is_merged(input):
                result = special(rule, input, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            return rule(input, *args, **kwargs)

        WITHOUT_MERGED[either] = rule
        return cast(Rule, either)

    return decorate


def keeps_shape(rule: Rule) -> Rule:
    """Let an element-wise rule of one tensor, which it does not write to, take merged tensors."""

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        result = rule(input.unmerged, *args, **kwargs)
        return input if result is input.unmerged else merge_as(result, input.shape)

    return _on_merged(special)(rule)


def works_on_last(count: Callable[..., int]) -> Callable[[Rule], Rule]:
    """Let a rule that works along the last dimensions take tensors merged in earlier dimensions.

    `count` takes the rule's arguments after the input, and returns the number of last dimensions.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        n = count(*args, **kwargs)
        if not n or any(len(run) > 1 for run in factors_of(input)[-n:]):
            return NotImplemented
        result = rule(input.unmerged, *args, **kwargs)
        return merge_as(result, (*input.shape[:-n], *result.shape[-n:]))

    return _on_merged(special)


def works_on_channels(*, of_each_sample: bool) -> Callable[[Rule], Rule]:
    """Let a rule of (sample, channel, *space) that treats all positions alike take merged tensors.

    Unless the rule treats each sample alone (`of_each_sample`), samples may be merged, too: their
    inner factors become spatial dimensions.
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


def treats_samples_alone(function: Callable[..., Tensor], ndim: int) -> Callable[[Rule], Rule]:
    """Let a rule for `function`, which treats each sample alone, take tensors with merged samples.

    If only samples are cut, each rank calls `function` on its own samples; otherwise the rule is
    called. `ndim` is the number of dimensions of the input.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        own, runs = unmerged(input), factors_of(input)
        lead = len(runs[0])
        if (
            input.dim() != ndim
            or any(len(run) > 1 for run in runs[1:])
            or any(isinstance(x, DistTensor) for x in (*args, *kwargs.values()))
            or any(own.cuts[lead:])
        ):
            return NotImplemented
        shape = check_on_meta(function, input, *args, **kwargs)
        block = function(own.shard.flatten(0, lead - 1), *args, **kwargs)
        block = block.reshape((*own.shard.shape[:lead], *shape[1:]))
        made = (*own.shape[:lead], *shape[1:])
        return merge_as(DistTensor(block, made, own.cuts, own.grid), shape)

    return _on_merged(special)


def works_along(*, reduces: bool, several: bool = True) -> Callable[[Rule], Rule]:
    """Let a rule with an argument `dim` take merged tensors, by calling it with the unmerged one.

    The dimensions in `dim` may themselves be merged only if the rule `reduces` them to size 1, and
    accepts `several` dimensions or None for all.
    """

    def special(rule: Rule, input: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature(rule).bind(input, *args, **kwargs)
        dim = given.arguments.get("dim")
        places = places_of_factors(input)
        over = _dims(dim, input.dim())
        single = over is not None and all(len(places[d]) == 1 for d in over)
        if over is None or not (single or (reduces and (several or dim is None))):
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
