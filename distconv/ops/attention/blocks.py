"""Attention of a block of queries to a block of keys, forward and backward.

Each block of keys gives a separate result and the log-sum-exp of its scores, by which the results
of several blocks are combined (Milakov and Gimelshein, Online normalizer calculation for softmax,
2018; Dao et al., FlashAttention, 2022). On CPUs, torch's fused kernel computes blocks without mask
and dropout. All other blocks are computed in tiles by torch's functions, so that the memory does
not grow with the product of queries and keys. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.geometry.layout import Shape
from distconv.ops.attention.schedule import Positions, attends, stretches
from distconv.ops.random import uniform_at
from distconv.ops.support.operands import accumulation_type, in_type, numbers_in_box
from distconv.torch_private import flash_attention, flash_attention_backward

Slices = tuple[slice, ...]

TILE, ACCELERATED_TILE = 2**18, 2**24
"""The most scores that are in memory at a time, on CPUs and on accelerators."""


class Dropout(NamedTuple):
    """Dropout of attention weights, with random numbers that depend on global positions alone.

    Attributes
    ----------
    p: the probability that a weight is dropped.
    key: the key of the random numbers.
    numbers: for each query, (..., R, 1), the row-major number of its weight on the first key.
    """

    p: float
    key: Tensor
    numbers: Tensor


class Pair(NamedTuple):
    """A block of queries, a block of keys, and the settings of their attention.

    Attributes
    ----------
    rows, columns: the positions of queries and keys.
    scale: the factor of the products of queries and keys.
    causal: whether a query attends only to keys whose position is not greater than its own.
    mask: (..., R or 1, C or 1), of bool or added to the scores; or None.
    dropout: the dropout of weights, or None.
    accelerated: whether the blocks are on an accelerator.
    """

    rows: Positions
    columns: Positions
    scale: float
    causal: bool
    mask: Tensor | None
    dropout: Dropout | None
    accelerated: bool

    @property
    def tile(self) -> int:
        """Return the most scores that are in memory at a time."""
        return ACCELERATED_TILE if self.accelerated else TILE


def attend(q: Tensor, k: Tensor, v: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to one block of keys, and the log-sum-exp of the scores.

    Both results have the type in which many elements are summed, float32 for half types. For a
    query that attends to none of the keys, the log-sum-exp is -inf, and the attention is 0.

    Parameters
    ----------
    q, k, v: (..., R, E), (..., C, E) and (..., C, V), broadcast in their leading dimensions.
    """
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    kind = accumulation_type(q.dtype)
    some = attends(pair.rows, pair.columns, pair.causal) and 0 not in batch
    made: tuple[Tensor, Tensor] | None = None
    if some and _suits_kernel(q, k, v, pair):
        planes = [as_planes(x, batch) for x in (q, k, v)]
        for rows, columns, triangular in stretches(pair.rows, pair.columns, pair.causal):
            slices = (rows, columns, columns)
            pieces = [x[..., s, :] for x, s in zip(planes, slices, strict=True)]
            part, sums = flash_attention(pieces, triangular, pair.scale)
            part = in_type(part.reshape((*batch, *part.shape[-2:])), kind)
            sums = sums.reshape((*part.shape[:-1], 1))
            if made is None and part.shape[-2] == q.shape[-2]:
                made = part, sums
            else:
                out, lse = made = made or _nothing(q, v, batch)
                merge_(out[..., rows, :], lse[..., rows, :], part, sums)
        return made or _nothing(q, v, batch)
    out, lse = _nothing(q, v, batch)
    if not some:
        return out, lse
    q, keys, values = q.expand((*batch, *q.shape[-2:])), in_type(k, kind), in_type(v, kind)
    for at in _tiles((*batch, q.shape[-2]), k.shape[-2], pair.tile):
        scores = _scores(in_type(_tile(q, at), kind), _batch_of(keys, at), pair, at)
        largest = scores.amax(-1, keepdim=True)
        largest = largest.masked_fill(largest == -inf, 0)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[at] = largest + total.log()
        if pair.dropout is not None:
            weights = weights * _kept(pair.dropout, pair.columns, at, kind)
        out[at] = weights @ _batch_of(values, at) / total.masked_fill(total == 0, 1)
    return out, lse


def _nothing(q: Tensor, v: Tensor, batch: Shape) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to no keys, which is 0, and its log-sum-exp, which is -inf.

    `batch` has the sizes of samples and heads.
    """
    kind = accumulation_type(q.dtype)
    out = q.new_zeros((*batch, q.shape[-2], v.shape[-1]), dtype=kind)
    return out, q.new_full((*batch, q.shape[-2], 1), -inf, dtype=kind)


def merge_(out: Tensor, lse: Tensor, part: Tensor, sums: Tensor) -> None:
    """Combine the attention `out` with `part`, the attention of the same queries to other keys.

    `lse` and `sums` are the log-sum-exps of `out` and `part`. Writes to `out` and `lse`.
    """
    total = torch.logaddexp(lse, sums)
    base = total.masked_fill(total == -inf, 0)
    out.mul_((lse - base).exp()).addcmul_(part, (sums - base).exp())
    lse.copy_(total)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: Pair
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the contributions of a pair of blocks to the gradients of q, k, v and an added mask.

    The last result is None without an added mask. All results have the type in which many elements
    are summed, float32 for half types.

    Parameters
    ----------
    grad: the gradient of the attention to all keys.
    q, k, v: (..., R, E), (..., C, E) and (..., C, V).
    out: the attention to all keys.
    lse: the log-sum-exp of the scores with all keys.
    """
    batch = out.shape[:-2]
    kind = accumulation_type(q.dtype)
    added = pair.mask is not None and pair.mask.is_floating_point()
    dmask = torch.zeros_like(pair.mask, dtype=kind) if added else None  # type: ignore[arg-type]
    some = attends(pair.rows, pair.columns, pair.causal) and 0 not in batch
    if some and _suits_kernel(q, k, v, pair):
        planes = [as_planes(x, batch) for x in (grad, q, k, v, out)]
        sums, found = as_planes(lse, batch)[..., 0], list[Tensor]()
        for rows, columns, triangular in stretches(pair.rows, pair.columns, pair.causal):
            slices = (rows, rows, columns, columns, rows)
            pieces = [x[..., s, :] for x, s in zip(planes, slices, strict=True)]
            parts = flash_attention_backward(pieces, sums[..., rows], triangular, pair.scale)
            triples = zip((q, k, v), slices[1:4], parts, strict=True)
            found = [
                _plus(found[i] if found else None, x, s, part.reshape((*batch, *part.shape[-2:])))
                for i, (x, s, part) in enumerate(triples)
            ]
        dq, dk, dv = found
        return dq, dk, dv, dmask
    dq, dk, dv = (x.new_zeros(x.shape, dtype=kind) for x in (q, k, v))
    if not some:
        return dq, dk, dv, dmask
    q, keys, values = q.expand((*batch, *q.shape[-2:])), in_type(k, kind), in_type(v, kind)
    delta = (in_type(grad, kind) * out).sum(-1, keepdim=True)
    lse = lse.masked_fill(lse == -inf, inf)
    for at in _tiles((*batch, q.shape[-2]), k.shape[-2], pair.tile):
        own, above = in_type(_tile(q, at), kind), in_type(grad[at], kind)
        near, far = _batch_of(keys, at), _batch_of(values, at)
        weights = _scores(own, near, pair, at).sub_(lse[at]).exp_()
        kept = None if pair.dropout is None else _kept(pair.dropout, pair.columns, at, kind)
        dropped = weights if kept is None else weights * kept
        _add(_batch_of(dv, at), dropped.mT @ above)
        slopes = above @ far.mT
        if kept is not None:
            slopes *= kept
        slopes = slopes.sub_(delta[at]).mul_(weights)
        if dmask is not None:
            _add(_tile(dmask, at), slopes)
        slopes *= pair.scale
        _add(_tile(dq, at), slopes @ near)
        _add(_batch_of(dk, at), slopes.mT @ own)
    return dq, dk, dv, dmask


def differentiable(q: Tensor, k: Tensor, v: Tensor, pair: Pair) -> Tensor:
    """Return the attention of queries to all keys, with every step recorded by autograd.

    The result can be differentiated twice. The scores of all queries and keys are in memory at
    once.
    """
    kind = accumulation_type(q.dtype)
    whole = (slice(None),) * (max(q.dim(), k.dim()) - 1)
    scores = _scores(in_type(q, kind), in_type(k, kind), pair, whole)
    none = scores.detach().isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)
    if pair.dropout is not None:
        weights = weights * _kept(pair.dropout, pair.columns, whole, kind)
    return in_type(weights @ in_type(v, kind), q.dtype)


def _suits_kernel(q: Tensor, k: Tensor, v: Tensor, pair: Pair) -> bool:
    """Return whether torch's fused kernel for CPUs can compute the attention of these blocks."""
    if pair.accelerated or pair.mask is not None or pair.dropout is not None:
        return False
    if pair.causal and not (pair.rows.consecutive and pair.columns.consecutive):
        return False
    return q.shape[-1] == v.shape[-1] > 0


def as_planes(x: Tensor, batch: Shape) -> Tensor:
    """Return `x`, (..., R, E), expanded to the leading dimensions `batch`, as four dimensions."""
    x = x.expand((*batch, *x.shape[-2:]))
    x = x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    return with_rows(x)


def with_rows(x: Tensor) -> Tensor:
    """Return `x` with contiguous rows, as torch's fused kernels need.

    A block of a tensor with channels last does not have contiguous rows.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(shape: Sequence[int], columns: int, tile: int) -> Iterator[Slices]:
    """Yield slices that divide `shape`, the dimensions of samples, heads and queries, into tiles.

    Each tile has about `tile` scores or fewer, for `columns` keys. The tiles cover `shape`.
    """
    room = max(tile // columns, 1)
    steps = []
    for n in reversed(shape):
        steps.append(min(n, room))
        room //= max(n, 1)
        room = max(room, 1)
    ranges = [
        [slice(i, min(i + step, n)) for i in range(0, n, step)]
        for n, step in zip(shape, reversed(steps), strict=True)
    ]
    yield from product(*ranges)


def _tile(x: Tensor, at: Slices) -> Tensor:
    """Return the part of `x`, (..., R or 1, last dimension), that is broadcast to the tile `at`."""
    own = at[len(at) - x.dim() + 1 :]
    return x[tuple(s if n > 1 else slice(None) for s, n in zip(own, x.shape, strict=False))]


def _batch_of(x: Tensor, at: Slices) -> Tensor:
    """Return the keys or values `x`, (..., C, E), of the samples and heads of the tile `at`."""
    return _tile(x, (*at[:-1], slice(None)))


def _add(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place, summed over the dimensions in which `total` has size 1."""
    total += part.sum_to_size(total.shape)


def _plus(total: Tensor | None, x: Tensor, rows: slice, part: Tensor) -> Tensor:
    """Return `total`, a gradient of `x` or None for zeros, plus `part` in the slice `rows`.

    `part` is summed over the dimensions in which `x` has size 1.
    """
    kind = accumulation_type(x.dtype)
    if total is None and part.shape[-2] == x.shape[-2]:
        return in_type(part.sum_to_size(x.shape), kind)
    total = x.new_zeros(x.shape, dtype=kind) if total is None else total
    _add(total[..., rows, :], part)
    return total


def _scores(q: Tensor, k: Tensor, pair: Pair, at: Slices) -> Tensor:
    """Return the scores of the tile `at`, with -inf where a query does not attend to a key."""
    scores = (q * pair.scale) @ k.mT
    if pair.mask is not None:
        mask = _tile(pair.mask, at)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -inf)
        else:
            scores = scores + mask
    if pair.causal:
        rows = numbers(pair.rows, q.device)[at[-1]].unsqueeze(-1)
        scores = scores.masked_fill(rows < numbers(pair.columns, q.device), -inf)
    return scores


def _kept(dropout: Dropout, columns: Positions, at: Slices, kind: torch.dtype) -> Tensor:
    """Return the dropout factors of the weights of the tile `at`: 0 for dropped weights.

    The other factors are 1 / (1 - p). `columns` are the positions of the keys; `kind` is the type.
    """
    places = _tile(dropout.numbers, at) + numbers(columns, dropout.numbers.device)
    kept = (uniform_at(places, dropout.key) >= dropout.p).to(kind)
    return kept / (1 - dropout.p) if dropout.p < 1 else kept


def numbers(positions: Positions, device: torch.device) -> Tensor:
    """Return the positions as an integer tensor, (count,)."""
    return numbers_in_box(positions.box, positions.sizes, device).flatten()
