"""Losses: each rank sums its own elements, and an all-reduce sums one or two numbers per rank."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.layout import Cuts, cutting_axes
from distconv.grid.interface import Grid
from distconv.grid.words import user_line
from distconv.ops.support.arguments import in_range
from distconv.ops.support.operands import (
    as_distributed,
    broadcast_cuts,
    broadcast_shape,
    common_grid,
    gather_whole,
    local_operand,
    to_accumulation_type,
    uncut,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import in_order_of_memory
from distconv.tensor.recording import recorded
from distconv.torch_private import dropped_weight, reduction_of_flags

Loss = TypeVar("Loss", bound=Callable[..., Tensor])


def _reducing(
    function: Callable[..., Tensor], *others: str
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Return a decorator that registers the rule of the loss `function`.

    The decorated function takes torch's arguments by name. Its `reduction` is "none", "mean", "sum"
    or one of `others`. The rule raises ValueError for another reduction, and translates torch's
    deprecated `size_average` and `reduce`.
    """
    signature = inspect.signature(function)

    def register(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @implements(function)
        def rule(*args: Any, **options: Any) -> Tensor:
            given = signature.bind(*args, **options).arguments
            flags = given.pop("size_average", None), given.pop("reduce", None)
            reduction = given.pop("reduction", "mean")
            if flags != (None, None):
                reduction = reduction_of_flags(*flags)
            if reduction not in (known := ("none", *others, "mean", "sum")):
                *first, last = map(repr, known)
                raise ValueError(
                    f"{function.__name__}: reduction={reduction!r} is not valid; choose "
                    f"{', '.join(first)} or {last}"
                )
            return loss(reduction=reduction, **given)

        return rule

    return register


def terms_of(function: Callable[..., Tensor]) -> Callable[[Loss], Loss]:
    """Return a decorator that registers the rule of the loss `function`.

    The decorated function takes torch's arguments by name, except the reduction, and returns the
    loss of each element. The rule reduces the losses.
    """

    def register(terms: Loss) -> Loss:
        @_reducing(function)
        def loss(reduction: str, **given: Any) -> Tensor:
            found = terms(**given)
            if reduction == "none":
                return found
            return found.mean() if reduction == "mean" else found.sum()

        return terms

    return register


def _total(local: Tensor, divisor: Any, cuts: Cuts, grid: Grid, kind: torch.dtype) -> DistTensor:
    """Return the sum of `local` over all blocks, divided by `divisor`, on every rank. Collective.

    `cuts` are the grid axes that partition each dimension of the tensor whose blocks are summed. A
    `divisor` that is a tensor is this rank's summand, and is summed over the blocks as well. The
    result has the type `kind`, or the real type of a complex one.
    """
    axes = cutting_axes(cuts)
    if isinstance(divisor, Tensor):
        both = all_reduce_with_grad(torch.stack([local, divisor.to(local.dtype)]), grid, axes)
        total = both[0] / both[1]
    else:
        total = all_reduce_with_grad(local, grid, axes)
        total = total if divisor == 1 else total / divisor
    return DistTensor(total.to(kind.to_real()), (), (), grid)


def _to_summed_type(reduction: str, *tensors: Any) -> list[Any]:
    """Return `tensors` in the type in which they are summed: half types are converted to float32.

    If `reduction` is "none" the tensors are returned unchanged.
    """
    if reduction == "none":
        return list(tensors)
    return [t if t is None else to_accumulation_type(t) for t in tensors]


def _in_memory_order(reduction: str, *tensors: Any) -> list[Any]:
    """Return the operands of an element-wise loss in the form in which it is computed and summed.

    Half types are converted to float32, and dimensions are permuted to the order of memory. If
    `reduction` is "none" the tensors are returned unchanged.
    """
    return _to_summed_type(
        reduction, *(tensors if reduction == "none" else in_order_of_memory(tensors))
    )


def _in_block(reduction: str, cuts: Cuts) -> str:
    """Return the reduction that each rank applies to its block.

    This is "sum" if blocks of a partitioned tensor are reduced, otherwise `reduction` itself.
    """
    return "sum" if reduction != "none" and cutting_axes(cuts) else reduction


def _regression(function: Callable[..., Tensor]) -> None:
    """Register the rule of an element-wise loss of input and target, such as F.mse_loss."""
    name = function.__name__

    @_reducing(function)
    def rule(
        input: Tensor,
        target: Tensor,
        reduction: str,
        weight: Tensor | None = None,
        **arguments: float,
    ) -> DistTensor:
        if weight is None:
            *_, weight = recorded(name, (input, target, dropped_weight(function)))
        grid = common_grid(name, (input, target, weight))
        shape = broadcast_shape(name, (input, target))
        cuts = broadcast_cuts([x for x in (input, target) if isinstance(x, DistTensor)], shape)
        if weight is not None and weight.shape != input.shape:
            raise ValueError(
                f"{name}: weight has shape {tuple(weight.shape)}, expected the shape of the "
                f"input, {tuple(input.shape)}"
            )
        if weight is not None and tuple(weight.shape) != shape:
            reason = "a weighted input is broadcast to the target"
            way_out = "Expand the input to the target's shape first"
            refuse(name, reason, input, target, way_out=way_out)
        blocks = [local_operand(t, shape, cuts, grid, name) for t in (input, target, weight)]
        x, y, w = _in_memory_order(reduction, *blocks)
        kept = _in_block(reduction, cuts) if w is None else "none"
        local = function(x, y, reduction=kept, **arguments)
        if w is not None:
            local = local * w
        if reduction == "none":
            return DistTensor(local, shape, cuts, grid)
        divisor: Any = 1
        if reduction == "mean" and kept != "mean":
            # torch divides a weighted Huber loss by the number of elements, unlike the others.
            by_weight = w is not None and function is not F.huber_loss
            divisor = w.sum() if by_weight else torch.Size(shape).numel()
        kind = torch.promote_types(input.dtype, target.dtype)
        return _total(local.sum() if kept == "none" else local, divisor, cuts, grid, kind)


def _cross_entropy_of_bits(function: Callable[..., Tensor]) -> None:
    """Register the rule of F.binary_cross_entropy or F.binary_cross_entropy_with_logits."""
    name = function.__name__

    @_reducing(function)
    def rule(
        input: Tensor,
        target: Tensor,
        reduction: str,
        weight: Tensor | None = None,
        **pos_weight: Tensor | None,
    ) -> DistTensor:
        weights = {"weight": weight, **pos_weight}
        grid = common_grid(name, (input, target, *weights.values()))
        if target.shape != input.shape:
            raise ValueError(
                f"{name}: target has shape {tuple(target.shape)} and input {tuple(input.shape)}; "
                "they must be the same"
            )
        shape = broadcast_shape(name, [t for t in (input, *weights.values()) if t is not None])
        if shape != tuple(input.shape):
            raise RuntimeError(
                f"{name}: the weights broadcast the input from {tuple(input.shape)} to {shape}; "
                "pass weights that are broadcast to the input"
            )
        cuts = broadcast_cuts(
            [t for t in (input, target) if isinstance(t, DistTensor)]
            or [as_distributed(input, grid)],
            shape,
        )
        operands = (input, target, *weights.values())
        blocks = [local_operand(t, shape, cuts, grid, name) for t in operands]
        x, y, *scales = _in_memory_order(reduction, *blocks)
        kept = _in_block(reduction, cuts)
        local = function(x, y, reduction=kept, **dict(zip(weights, scales, strict=True)))
        if reduction == "none":
            return DistTensor(local, shape, cuts, grid)
        divisor = torch.Size(shape).numel() if reduction != kept else 1
        return _total(local, divisor, cuts, grid, input.dtype)


def _check_without_samples(
    function: Callable[..., Tensor],
    input: Tensor,
    classes: int,
    target: Tensor,
    probabilities: bool,
    weight: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Call a loss on an empty mini-batch, so that torch checks types, weight and options.

    `classes` is the number of classes. `probabilities` states whether the target holds
    probabilities or class numbers. No communication.
    """

    def empty(like: Tensor, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    function(
        empty(input, 0, classes),
        empty(target, 0, classes) if probabilities else empty(target, 0),
        None if weight is None else empty(weight, *weight.shape),
        reduction="sum",
        **options,
    )


def _warn_of_labels_apart(name: str, x: DistTensor, target: Tensor, cuts: Cuts) -> None:
    """Warn on rank 0 if the loss `name` redistributes the labels `target` in every call.

    The labels are redistributed if their partition differs from `cuts`, the grid axes that
    partition the scores `x` in all dimensions but the classes.
    """
    if not isinstance(target, DistTensor) or target.cuts == cuts or not any(target.cuts):
        return
    if x.grid.rank == 0:
        warnings.warn(
            f"{name} at {user_line()}: the labels {tuple(target.shape)} lie in "
            f"{target.grid_layout}, the scores {tuple(x.shape)} in {x.grid_layout}, so the labels "
            "are redistributed in every call; create them in Layout.like(scores, "
            "without='channel')",
            stacklevel=2,
        )


def _classification(function: Callable[..., Tensor]) -> None:
    """Register the rule of F.cross_entropy or F.nll_loss, which gathers the classes on every rank.

    Classes are dimension 1 of the input, or its only dimension.
    """
    name = function.__name__

    @_reducing(function)
    def rule(
        input: Tensor,
        target: Tensor,
        reduction: str,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        **smoothing: float,
    ) -> DistTensor:
        grid = common_grid(name, (input, target, weight))
        x = as_distributed(input, grid)
        classes = 1 if x.dim() > 1 else 0
        shape = tuple(n for d, n in enumerate(x.shape) if d != classes)
        cuts = tuple(a for d, a in enumerate(x.cuts) if d != classes)
        probabilities = target.shape == x.shape and target.is_floating_point()
        if not probabilities and tuple(target.shape) != shape:
            error = RuntimeError if x.dim() > 2 else ValueError  # as torch
            raise error(
                f"{name}: target has shape {tuple(target.shape)}, expected {shape} for input "
                f"{tuple(x.shape)}"
            )
        # Some versions of torch check the type only on blocks with targets.
        kinds = (torch.int64,) if x.dim() > 2 else (torch.int64, torch.uint8)
        if not probabilities and target.dtype not in kinds:
            raise RuntimeError(
                f"{name}: target is {target.dtype}, expected class numbers in torch.int64, or "
                "probabilities in the shape of the input; target.long() converts"
            )
        options: Any = {"ignore_index": ignore_index, **smoothing}
        _check_without_samples(
            function, x, x.shape[classes], target, probabilities, weight, options
        )
        x = uncut(x, [classes], name)
        weight = gather_whole(weight, name)
        if probabilities:
            labels = local_operand(target, tuple(x.shape), x.cuts, grid, name)
        else:
            _warn_of_labels_apart(name, x, target, cuts)
            labels = local_operand(target, shape, cuts, grid, name)
        scores, labels, weight = _to_summed_type(reduction, x.shard, labels, weight)
        options["reduction"] = kept = _in_block(reduction, cuts)
        with in_range(f"{name}, class number", labels, x.shape[classes], ignore_index):
            local = function(scores, labels, weight, **options)
        if reduction == "none":
            return DistTensor(local, shape, cuts, grid)
        divisor: Any = 1
        if reduction != kept and probabilities:
            divisor = torch.Size(shape).numel() if x.shape[classes] else math.nan
        elif reduction != kept:
            divisor = _weight_of(labels.long(), weight, ignore_index)
        return _total(local, divisor, cuts, grid, input.dtype)


def _weight_of(labels: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Return the sum of class weights, by default 1, over labels other than `ignored`."""
    counted = labels != ignored
    if weight is not None:
        counted = torch.where(counted, weight[labels.where(counted, 0)], 0)
    return counted.sum()


@_reducing(F.kl_div, "batchmean")
def _kl_div(input: Tensor, target: Tensor, reduction: str, log_target: bool = False) -> DistTensor:
    grid = common_grid("kl_div", (input, target))
    shape = broadcast_shape("kl_div", (input, target))
    cuts = broadcast_cuts([x for x in (input, target) if isinstance(x, DistTensor)], shape)
    blocks = [local_operand(t, shape, cuts, grid, "kl_div") for t in (input, target)]
    x, y = _in_memory_order(reduction, *blocks)
    kept = "none" if reduction == "none" else "sum"
    local = F.kl_div(x, y, reduction=kept, log_target=log_target)
    if reduction == "none":
        return DistTensor(local, shape, cuts, grid)
    batch = input.shape[0] if input.dim() else 1
    divisor = {"mean": torch.Size(shape).numel(), "batchmean": batch, "sum": 1}[reduction]
    return _total(local, divisor, cuts, grid, torch.promote_types(input.dtype, target.dtype))


@terms_of(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6
) -> Tensor:
    """Return the negative log-density of `target` for Gaussians of mean `input`, variance `var`.

    The variance is clamped to `eps`. The rank that holds a negative variance raises ValueError.
    """
    if isinstance(var, Tensor) and var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.shape[:-1] != input.shape[:-1] or var.shape[-1] != 1:
            raise ValueError(
                f"gaussian_nll_loss: var has shape {tuple(var.shape)}, expected the shape of the "
                f"input, {tuple(input.shape)}, or this shape without its last dimension"
            )
    own = var.shard if isinstance(var, DistTensor) else torch.as_tensor(var)
    if (own < 0).any():
        raise ValueError(
            f"gaussian_nll_loss: var has elements down to {own.min().item():g}; expected 0 or more"
        )
    var = var.clone() if isinstance(var, Tensor) else torch.full_like(input, var)
    with torch.no_grad():
        var.clamp_(min=eps)
    terms = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        terms = terms + 0.5 * math.log(2 * math.pi)
    return terms


_regression(F.mse_loss)
_regression(F.l1_loss)
_regression(F.smooth_l1_loss)
_regression(F.huber_loss)
_cross_entropy_of_bits(F.binary_cross_entropy)
_cross_entropy_of_bits(F.binary_cross_entropy_with_logits)
_classification(F.cross_entropy)
_classification(F.nll_loss)
