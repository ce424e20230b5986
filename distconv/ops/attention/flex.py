"""`flex_attention` of partitioned queries, keys and values.

Torch's function computes the attention of a block of queries to all keys. An all-to-all first
partitions samples and heads over the axes that partition the positions. If there are too few
samples and heads, every rank gathers the keys. `score_mod` and `mask_mod` are called with global
indices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import handle_torch_function

from distconv.device.kinds import is_accelerator
from distconv.geometry.layout import Box, Shape
from distconv.grid.interface import Grid
from distconv.ops.attention.arrangement import Arrangement, Sizes, arrange_whole_keys
from distconv.ops.attention.scaled_dot_product import partition
from distconv.ops.support.merged import factors_of, in_blocks, merge_as, unmerge
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    check_same_types,
    common_grid,
    filled_block,
    local_operand,
)
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import origins
from distconv.tensor.redistribution import redistribute
from distconv.torch_private import (
    at_first_grid,
    flex_attention_of_torch,
    replace_flex_attention,
    run_eagerly,
)

NAME = "flex_attention"

Function = Callable[..., Any]


@run_eagerly
def _dispatch(*args: Any, **kwargs: Any) -> Any:
    return handle_torch_function(flex_attention, tensors_in(args, kwargs), *args, **kwargs)


def _either(*args: Any, **kwargs: Any) -> Any:
    """Call distconv's rule if an argument is a DistTensor, else torch's function."""
    if any(isinstance(x, DistTensor) for x in (*args, *kwargs.values())):
        return _dispatch(*args, **kwargs)
    return flex_attention_of_torch(*args, **kwargs)


at_first_grid(partial(replace_flex_attention, _either))


@implements(flex_attention)
def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *options: Any,
    **named: Any,
) -> Any:
    """Return the attention of (B, H, L, E) queries to (B or 1, K, S, E) keys. Collective.

    The arguments are those of torch's function. Results are partitioned as the query. Samples and
    heads that the query does not partition are partitioned as in key and value.
    """
    grid = common_grid(NAME, (query, key, value))
    _check(query, key, value, block_mask, enable_gqa)
    _check_captured(query, key, grid, score_mod, block_mask)
    heads = query.shape[1], key.shape[1]
    query = query.unflatten(1, (heads[1], heads[0] // heads[1] if heads[1] else 1))
    operands, sizes, base, made = _arranged(query, key.unsqueeze(2), value.unsqueeze(2), grid)
    runs = (sizes.rows, made.rows), *[(sizes.columns, made.columns)] * 2
    blocks = [
        local_operand(x, (*sizes.batch, *run, x.shape[-1]), (*made.batch, *cuts, ()), grid, NAME)
        for x, (run, cuts) in zip(operands, runs, strict=True)
    ]
    full, cuts = (*sizes.batch, *sizes.rows), (*made.batch, *made.rows)
    block = _Block.of(full, box_on_rank(full, cuts, grid), block_mask)
    attend = _compiled() if is_accelerator(blocks[0].device) else flex_attention_of_torch
    if blocks[0].is_meta:
        attend = _without_elements
    how = score_mod, block_mask, scale, enable_gqa, *options
    found = block.attention(partial(attend, **named), blocks, *how)

    def distributed(x: Tensor) -> DistTensor:
        last = x.shape[4:]
        whole = ((),) * len(last)
        x = x.reshape((*block.box.shape, *last))
        result = DistTensor(x, (*full, *last), (*cuts, *whole), grid)
        result = redistribute(result, (*base.batch, *base.rows, *whole), NAME)
        result = merge_as(result, (*sizes.batch, prod(sizes.rows), *last))
        return cast(DistTensor, result.flatten(1, 2))

    return _each(distributed, found)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Any, grouped: bool) -> None:
    """Raise if global shapes or types do not fit together, as torch's function does.

    `grouped` states that heads of queries may share keys (`enable_gqa`).
    """
    check_same_types(NAME, q, k, v)
    shapes = " ".join(str(tuple(x.shape)) for x in (q, k, v))
    if not q.dim() == k.dim() == v.dim() == 4:
        raise NotImplementedError(f"{NAME}: query, key and value must have 4 dimensions: {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{NAME}: the shapes of query, key and value do not fit: {shapes}")
    if q.shape[1] % max(k.shape[1], 1) if grouped else q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{NAME}: {q.shape[1]} heads of queries and {k.shape[1]} of keys do not fit; with "
            "enable_gqa=True the heads of queries may be a multiple"
        )
    samples = 0 if mask is None else mask.shape[0]
    if q.shape[0] != k.shape[0] and (k.shape[0] != 1 or samples != q.shape[0]):
        raise ValueError(f"{NAME}: the numbers of samples do not fit: {shapes}")
    if mask is None:
        return
    given, full = tuple(mask.shape), (*q.shape[:3], k.shape[2])
    broadcast = (n in (1, m) for n, m in zip(given[:2], full[:2], strict=True))
    if len(given) != 4 or given[2:] != full[2:] or not all(broadcast):
        raise ValueError(
            f"{NAME}: block_mask has the shape {given}; expected the global shape {full}, with 1 "
            "for samples or heads that share a mask"
        )


def _check_captured(
    query: Tensor, key: Tensor, grid: Grid, score_mod: Function | None, block_mask: Any
) -> None:
    """Raise UnsupportedOperation if `score_mod` or the mask's function reads unsupported tensors.

    Unsupported are distributed tensors, and plain tensors whose gradients would not be summed over
    the ranks. Each function is called once, for the first score. The graph of its result shows the
    tensors that it reads, also through other functions and modules.
    """
    if not (query.numel() and key.numel()) or grid.device.type == "meta":
        return
    first = [torch.zeros((), dtype=torch.int32, device=grid.device) for _ in range(4)]
    score = torch.zeros((), dtype=query.dtype, device=grid.device)
    mask_mod = block_mask and block_mask.mask_mod
    for name, function, given in (
        ("score_mod", score_mod, (score, *first)),
        ("mask_mod", mask_mod, first),
    ):
        found = function(*given) if function is not None else None
        if isinstance(found, DistTensor):
            way_out = "Let it read x.full_tensor(), made before the call"
            refuse(NAME, f"{name} reads a distributed tensor", query, way_out=way_out)
        if isinstance(found, Tensor) and found.requires_grad:
            if {"free", "out"} & origins([get_gradient_edge(found).node]).keys():
                reason = f"{name} reads a tensor whose gradient would not be summed over the ranks"
                way_out = "Make it a parameter of the parallelized module, or read x.detach()"
                refuse(NAME, reason, query, way_out=way_out)


def _arranged(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid
) -> tuple[list[DistTensor], Sizes, Arrangement, Arrangement]:
    """Return the operands, their global sizes and partition, and the partition in which to compute.

    The operands are (B, K, G, *positions, E). The positions of a merged tensor are several
    dimensions, unless the queries stay partitioned. Collective.
    """
    samples = (q.shape[0], *q.shape[1:3])
    given = [_with_own_samples(as_distributed(x, grid)) for x in (q, k, v)]
    rows, columns, others = (factors_of(x)[3] for x in given)
    if columns != others:
        given[1:] = [as_distributed(in_blocks(x), grid) for x in given[1:]]
        columns = (k.shape[3],)
    while True:
        q, k, v = operands = [
            as_distributed(unmerge(x, (*((n,) for n in x.shape[:3]), run, (x.shape[-1],))), grid)
            for x, run in zip(given, (rows, columns, columns), strict=True)
        ]
        sizes, base = partition(q, k, v, samples, rows, columns)
        made = arrange_whole_keys(grid.topology, sizes, base)
        if len(rows) == 1 or not any(made.rows):
            return operands, sizes, base, made
        given[0], rows = as_distributed(in_blocks(given[0]), grid), (prod(rows),)


def _with_own_samples(x: DistTensor) -> DistTensor:
    """Return `x` with no merged dimension other than its positions, dimension 3. Collective."""
    alone = all(len(run) == 1 for d, run in enumerate(factors_of(x)) if d != 3)
    return x if alone else as_distributed(in_blocks(x), x.grid)


@lru_cache(maxsize=1)
def _compiled() -> Function:
    """Return torch's function compiled; without compilation it keeps all scores in memory."""
    return torch.compile(flex_attention_of_torch)


def _without_elements(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    mask: Any,
    scale: Any,
    *given: Any,
    **named: Any,
) -> Any:
    """Return results of the right shapes for a dry run, in which torch's function raises."""
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    if any(given[1:2]) or named.get("return_lse"):
        return out, out.sum(-1)
    aux = named.get("return_aux")  # the result has the same fields
    return out if aux is None else (out, aux._replace(lse=out.sum(-1), max_scores=out.sum(-1)))


class _Block(NamedTuple):
    """The queries that a rank holds, and the queries with which it computes.

    Attributes
    ----------
    box: this rank's box in (B, K, G, *positions), where G heads of queries share each of K.
    computed: the box with all positions in one dimension. The box begins with the first query of a
        block of the mask, and has one element along dimensions of which this rank has none.
    shape: the global shape with all positions in one dimension.
    """

    box: Box
    computed: Box
    shape: Shape

    @classmethod
    def of(cls, shape: Shape, box: Box, mask: Any) -> _Block:
        """Return the block of a rank that holds `box` of queries of global `shape`.

        `mask` is the block mask, or None.
        """
        start, stop, full = list(box.start[:4]), list(box.stop[:4]), list(shape[:4])
        if len(shape) > 4:  # all positions, in several dimensions
            start[3], stop[3] = 0, prod(box.shape[3:])
            full[3] = prod(shape[3:])
        for d, n in enumerate(full):
            if n and start[d] >= stop[d]:
                start[d], stop[d] = n - 1, n
        if mask is not None:
            start[3] -= start[3] % mask.BLOCK_SIZE[0]
        return cls(box, Box(tuple(start), tuple(stop)), tuple(full))

    def attention(
        self, attend: Function, blocks: list[Tensor], score_mod: Any, mask: Any, *options: Any
    ) -> Any:
        """Return this rank's blocks of the results of `attend`, torch's function.

        Parameters
        ----------
        blocks: the blocks of query, key and value, (B, K, G, *positions, E).
        options: further arguments of torch's function.
        """
        q, k, v = (x.flatten(3, -2) for x in blocks)
        batch, heads, groups, rows = self.computed.shape
        own = tuple(q.shape[:4])
        if 0 in own:
            q = filled_block(q, (batch, heads, groups, rows, q.shape[4]))
            k, v = (
                filled_block(x, (x.shape[0] or batch, x.shape[1] or heads, 1, *x.shape[3:]))
                for x in (k, v)
            )
        elif rows > own[3]:
            q = F.pad(q, (0, 0, rows - own[3], 0))
        if mask is not None:
            mask = self._mask(mask, k.shape[3])
        score_mod = score_mod and self._globally(score_mod)
        found = attend(q.flatten(1, 2), k.squeeze(2), v.squeeze(2), score_mod, mask, *options)

        def cropped(x: Tensor) -> Tensor:
            x = x.unflatten(1, (heads, groups))
            return x[: own[0], : own[1], : own[2], rows - own[3] :]

        return _each(cropped, found)

    @property
    def _is_whole(self) -> bool:
        return self.computed.shape == self.shape

    def _mask(self, mask: Any, columns: int) -> Any:
        """Return the part of the global block mask `mask` for this block and `columns` keys."""
        if self._is_whole:
            return mask
        (b, k, g, row), (_, _, groups, _) = self.computed.start, self.shape
        batch, heads, own, rows = self.computed.shape
        size = mask.BLOCK_SIZE[0]
        chosen = slice(row // size, -(-(row + rows) // size))
        device = mask.kv_num_blocks.device
        number = torch.arange(k, k + heads, device=device)[:, None] * groups
        number = (number + torch.arange(g, g + own, device=device)).flatten()
        samples, every = mask.kv_num_blocks.shape[:2]
        part = mask[
            slice(b, b + batch) if samples > 1 else slice(None),
            number if every > 1 else slice(None),
            chosen,
        ]
        part.mask_mod, part.seq_lengths = self._globally(mask.mask_mod), (rows, columns)
        return part

    def _globally(self, function: Function) -> Function:
        """Return `function` of (..., sample, head, query, key), called with global indices.

        The result takes indices within this block.
        """
        if self._is_whole:
            return function
        (b, k, g, row), groups, own = self.computed.start, self.shape[2], self.computed.shape[2]
        first = k * groups + g
        split = own < groups and self.computed.shape[1] > 1

        def numbered(*args: Tensor) -> Tensor:
            *score, sample, head, query, key = args
            if split:
                head = head // own * groups + head % own
            return function(*score, sample + b, head + first, query + row, key)

        return numbered


def _each(function: Function, x: Any) -> Any:
    """Return `function(x)` of a tensor, or of each tensor in a tuple; other values unchanged."""
    if isinstance(x, tuple):
        found = [_each(function, y) for y in x]
        return type(x)(*found) if hasattr(x, "_fields") else tuple(found)
    return function(x) if isinstance(x, Tensor) else x
