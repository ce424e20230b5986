"""Products of matrices and tensors: sums over shared dimensions, partitioned or not.

All products are computed as Einstein sums. Each index is partitioned as in the largest operand in
which the index is partitioned. The other operands are redistributed to match. If an index is
partitioned and summed over, an all-reduce sums the partial sums of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import prod
from string import ascii_letters
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.index_maps import Same
from distconv.geometry.layout import Axes, Cuts, common_factors, cutting_axes, replaced_at
from distconv.geometry.topology import Topology
from distconv.ops.attention.arrangement import over_batch
from distconv.ops.conv.channel_algorithms import LayerCall, WeightMeta, algorithm, local_layer
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.dimensions import works_on_last
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.merged import (
    factors_of,
    in_blocks,
    is_merged,
    merge_as,
    unmerge,
    unmerged,
)
from distconv.ops.support.operands import (
    Placement,
    box_on_rank,
    broadcast_shape,
    check_same_types,
    common_grid,
    distributed_input,
    empty_block,
    local_operand,
    uncut,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.one_rank import serial_by
from distconv.tensor.redistribution import gather_inputs, redistribute


@implements(torch.einsum, torch.functional.einsum)
def einsum(equation: str, *operands: Any) -> DistTensor:
    """Return the Einstein sum of `operands` by `equation`, in torch's notation. Collective."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    check_on_meta(torch.einsum, equation, *operands)
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        once = "".join(c for c in letters if left.count(c) == 1)
        result = f"...{once}" if "." in left else once
    terms, rest = _without_ellipsis(left, operands)
    return contract("einsum", terms, result.replace("...", rest), operands)


def _without_ellipsis(left: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Return an einsum's terms with letters in place of each ellipsis, and all the new letters.

    `left` is the equation before "->". The dimensions of ellipses are broadcast against each other,
    aligned at the last dimension.
    """
    terms = left.split(",")
    free = [c for c in ascii_letters if c not in left]
    counts = [x.dim() - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True)]
    rest = "".join(free[: max([n for t, n in zip(terms, counts, strict=True) if "." in t] or [0])])
    return [
        t.replace("...", rest[len(rest) - n :]) for t, n in zip(terms, counts, strict=True)
    ], rest


def contract(
    name: str, terms: Sequence[str], result: str, operands: Sequence[Tensor]
) -> DistTensor:
    """Return the sum of products of operands over all letters not in `result`. Collective.

    Parameters
    ----------
    name: the called function, for errors.
    terms: a letter for each dimension of each operand, as in torch.einsum, without ellipses.
    result: the letters of the dimensions of the result.

    Raises RuntimeError if a term does not fit its operand, or if sizes of a letter or types differ.
    """
    grid = common_grid(name, operands)
    check_same_types(name, *operands)
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        if len(term) != x.dim():
            raise RuntimeError(
                f"{name}: {term!r} names {len(term)} dimensions of a tensor that has {x.dim()}"
            )
        for letter, n in zip(term, x.shape, strict=True):
            if sizes.setdefault(letter, n) != n and 1 not in (n, sizes[letter]):
                raise RuntimeError(
                    f"{name}: dimension {letter!r} has {sizes[letter]} elements in one operand "
                    f"and {n} in another, {tuple(x.shape)}"
                )
            sizes[letter] = max(sizes[letter], n)
    if any(map(is_merged, operands)):
        apart = _unmerged(terms, result, operands, sizes)
        if apart is not None:
            return cast(DistTensor, merge_as(contract(name, *apart), [sizes[c] for c in result]))
    cuts: dict[str, Axes] = dict.fromkeys(sizes, ())
    # A letter that occurs twice in a term is a diagonal, which does not lie within one block.
    fixed = {c for term in terms for c in term if term.count(c) > 1}
    ranked = sorted(zip(terms, operands, strict=True), key=lambda pair: -pair[1].numel())
    home = _result_partition(ranked, result, sizes)
    if home is not None and home.weights != ranked[0][0]:
        ranked = ranked[::-1]
    for term, x in ranked:
        for d, letter in enumerate(term):
            if isinstance(x, DistTensor) and x.shape[d] == sizes[letter] and letter not in fixed:
                if not set(x.cuts[d]) & set(cutting_axes(cuts.values())) and not cuts[letter]:
                    cuts[letter] = x.cuts[d]
    if len(operands) == 2 and home is None:
        cuts |= _cuts_by_batch(ranked, result, sizes, cuts, grid.topology)
    blocks = [
        local_operand(x, tuple(sizes[c] for c in term), tuple(cuts[c] for c in term), grid, name)
        for term, x in zip(terms, operands, strict=True)
    ]
    joined, blocks = _with_runs_joined(terms, result, blocks)
    local = torch.einsum(f"{','.join(joined)}->{result}", *blocks)
    summed = cutting_axes(cuts[c] for c in sizes if c not in result)
    shape = [sizes[c] for c in result]
    made = DistTensor(
        all_reduce_with_grad(local, grid, summed), shape, tuple(cuts[c] for c in result), grid
    )
    return made if home is None else home.applied(made, name)


# Attention written as products: q and k, partitioned along their positions, and then v.


Ranked = Sequence[tuple[str, Tensor]]
"""The terms of a product, each with its operand, the largest operand first."""


def _cuts_by_batch(
    ranked: Ranked, result: str, sizes: dict[str, int], cuts: dict[str, Axes], topology: Topology
) -> dict[str, Axes]:
    """Return better cuts, by letter, for a product such as q k^T; {} if `cuts` are best.

    Both operands are partitioned over the same grid axes, but along different dimensions, so one
    operand would be gathered. Instead, the axes may partition dimensions that both operands share
    with the result, such as samples and heads, if that sends less. `cuts` has the grid axes over
    which each letter is partitioned, and `sizes` the size of each letter.
    """
    (term, x), (other, y) = ranked
    own, others = (
        cutting_axes(z.cuts[d] for d, c in enumerate(t) if c in result and c not in u)
        if isinstance(z, DistTensor)
        else ()
        for t, u, z in ((term, other, x), (other, term, y))
    )
    if not own or set(own) != set(others):
        return {}
    batch = [
        c
        for c in result
        if c in term and c in other and x.shape[term.index(c)] == y.shape[other.index(c)]
    ]
    given = tuple(cuts[c] for c in batch)
    found = over_batch(topology, tuple(sizes[c] for c in batch), given, range(len(batch)), own)
    if found is None:
        return {}
    placed, idle = found
    if (x.numel() + y.numel()) * idle >= topology.parts(own) * y.numel():
        return {}
    return {c: () for c in term if c in result and c not in other} | dict(
        zip(batch, placed, strict=True)
    )


class _ResultPartition(NamedTuple):
    """The partition to which to redistribute the result of a product such as softmax(q k^T) v.

    The weights, softmax(q k^T), are partitioned over samples and heads, v along its positions, over
    the same grid axes. v is redistributed to match the weights, and the result is redistributed
    to be partitioned along its positions, as v was.

    Attributes
    ----------
    weights: the term of the weights.
    place: the dimension of the positions in the result.
    factors: the sizes of the dimensions that make up the positions, such as height and width.
    along: the cuts of these dimensions: the grid axes over which each is partitioned.
    """

    weights: str
    place: int
    factors: tuple[int, ...]
    along: Cuts

    def applied(self, made: DistTensor, name: str) -> DistTensor:
        """Return the product `made` with its positions partitioned as in v. Collective."""
        merged, place = len(self.factors) > 1, self.place
        split = cast(DistTensor, made.unflatten(place, self.factors)) if merged else made
        kept = [tuple(a for a in axes if a not in cutting_axes(self.along)) for axes in made.cuts]
        cuts = (*kept[:place], *self.along, *kept[place + 1 :])
        moved = redistribute(split, cuts, name)
        return cast(DistTensor, merge_as(moved, made.shape)) if merged else moved


def _result_partition(
    ranked: Ranked, result: str, sizes: dict[str, int]
) -> _ResultPartition | None:
    """Return the partition to which to redistribute the result of a product; None to keep it."""
    if any(len(set(term)) < len(term) for term, _ in ranked):  # of diagonals
        return None
    for (term, x), (other, y) in (ranked, ranked[::-1]) if len(ranked) == 2 else ():
        summed = "".join(c for c in other if c in term and c not in result)
        free = [c for c in result if c not in other]
        if not (isinstance(x, DistTensor) and isinstance(y, DistTensor) and len(free) == 1):
            continue
        along = tuple(y.cuts[other.index(c)] for c in summed)
        factors = tuple(sizes[c] for c in summed)
        held = cutting_axes(x.cuts[term.index(c)] for c in result if c in term and c in other)
        moved = cutting_axes(along)
        if not moved or not set(moved) <= set(held) or x.cuts[term.index(free[0])]:
            continue
        if summed in other and prod(factors) == sizes[free[0]]:
            return _ResultPartition(term, result.index(free[0]), factors, along)
    return None


def _with_runs_joined(
    terms: Sequence[str], result: str, blocks: Sequence[Tensor]
) -> tuple[list[str], list[Tensor]]:
    """Return an einsum's terms and blocks after flattening adjacent summed dimensions.

    Two dimensions are flattened if they are adjacent in every term that has one of the two.
    torch.einsum itself flattens such dimensions, but transposes a partitioned weight to do so,
    which was measured to take several times as long.
    """
    terms, blocks = list(terms), list(blocks)
    kept = terms[0][:1]
    for letter in terms[0][1:]:
        pair = kept + letter
        holding = [i for i, term in enumerate(terms) if kept in term or letter in term]
        found = {
            tuple(blocks[i].shape[terms[i].index(pair) :][:2]) if pair in terms[i] else None
            for i in holding
        }
        once = all(terms[i].count(c) == 1 for i in holding for c in pair)
        if once and len(found) == 1 and None not in found and not set(pair) & set(result):
            for i in holding:
                d = terms[i].index(pair)
                blocks[i], terms[i] = blocks[i].flatten(d, d + 1), terms[i].replace(letter, "")
        else:
            kept = letter
    return terms, blocks


def _unmerged(
    terms: Sequence[str], result: str, operands: Sequence[Tensor], sizes: dict[str, int]
) -> tuple[list[str], str, list[Tensor]] | None:
    """Return an einsum's terms, result and operands with merged dimensions split into factors.

    Each factor has a letter of its own. `sizes` has the size of each letter in the given `terms`,
    and is not changed. Returns None if the factors of the operands do not fit together, or letters
    run out.
    """
    splits: dict[str, list[tuple[int, ...]]] = {letter: [(n,)] for letter, n in sizes.items()}
    for term, x in zip(terms, operands, strict=True):
        for letter, run in zip(term, factors_of(x), strict=True):
            if prod(run) == sizes[letter]:
                splits[letter].append(run)
    free = (c for c in ascii_letters if c not in sizes)
    factors, letters = {}, {}
    for letter, rows in splits.items():
        found = common_factors(rows)
        if found is None:
            return None
        factors[letter], letters[letter] = found, letter + "".join(islice(free, len(found) - 1))
        if len(letters[letter]) < len(found):
            return None
    return (
        ["".join(letters[c] for c in term) for term in terms],
        "".join(letters[c] for c in result),
        [unmerge(x, [factors[c] for c in term]) for term, x in zip(terms, operands, strict=True)],
    )


@implements(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul)
def matmul(input: Tensor, other: Tensor) -> DistTensor:
    if _is_sparse(input) or _is_sparse(other):
        return _by_sparse(input, other)
    check_on_meta(torch.matmul, input, other)
    batch = max(input.dim(), other.dim(), 2) - 2
    lead = ascii_letters[:batch]
    rows, inner, columns = (ascii_letters[batch + i] for i in range(3))
    left = inner if input.dim() == 1 else lead[batch - input.dim() + 2 :] + rows + inner
    right = inner if other.dim() == 1 else lead[batch - other.dim() + 2 :] + inner + columns
    result = lead + (rows if input.dim() > 1 else "") + (columns if other.dim() > 1 else "")
    return contract("matmul", [left, right], result, [input, other])


def _is_sparse(x: Tensor) -> bool:
    return not isinstance(x, DistTensor) and x.layout is not torch.strided


def _by_sparse(left: Tensor, right: Tensor) -> DistTensor:
    """Return left @ right, of a plain sparse matrix and a DistTensor. Collective.

    The summed dimension of the DistTensor is gathered first; its other dimension stays partitioned.
    Raises UnsupportedOperation if the DistTensor is a batch of matrices.
    """
    dense, sparse, inner = (right, left, 0) if isinstance(right, DistTensor) else (left, right, -1)
    check_on_meta(torch.matmul, left, right)
    if dense.dim() > 2:
        reason = f"a matrix of layout {sparse.layout} is combined with a batch of matrices"
        refuse("matmul", reason, dense, way_out="Use x.to_dense()")
    x = uncut(cast(DistTensor, dense), [inner % dense.dim()], "matmul")
    block = left @ x.shard if dense is right else x.shard @ right
    shape = (*left.shape[:-1], *right.shape[1:])
    cuts = ((), *x.cuts[1:]) if dense is right else (*x.cuts[:-1], ())
    return DistTensor(block, shape, cuts, x.grid)


@implements(torch.bmm, Tensor.bmm)
def bmm(input: Tensor, mat2: Tensor) -> DistTensor:
    """Return products of matrices; `input` may be a plain sparse COO batch. Collective."""
    check_on_meta(torch.bmm, input, mat2)
    if _is_sparse(mat2):
        refuse("bmm", "the second operand is sparse", input, way_out="Use x.to_dense()")
    if not _is_sparse(input):
        return torch.matmul(input, mat2)  # type: ignore[return-value]
    if input.layout is not torch.sparse_coo:
        refuse("bmm", f"a batch of layout {input.layout}", mat2, way_out="Use x.to_sparse_coo()")
    x = uncut(cast(DistTensor, mat2), [1], "bmm")
    shape = (input.shape[0], input.shape[1], x.shape[2])
    box = box_on_rank(shape, x.cuts, x.grid)
    if 0 in box.shape:
        return DistTensor(empty_block(x.shard, box.shape), shape, x.cuts, x.grid)
    own = input.index_select(0, torch.arange(box.start[0], box.stop[0], device=x.device))
    return DistTensor(own.bmm(x.shard), shape, x.cuts, x.grid)


@implements(torch.sparse.mm)
def sparse_mm(mat1: Tensor, mat2: Tensor, reduce: str | None = None) -> DistTensor:
    """Return the product of a plain sparse matrix and a distributed dense matrix. Collective."""
    if mat1.layout is torch.strided or isinstance(mat1, DistTensor):
        refuse("sparse.mm", "both matrices are dense", mat1, mat2, way_out="Use torch.mm")
    if reduce is not None:
        refuse("sparse.mm", f"reduce={reduce!r} is not supported", mat2, way_out="Leave it out")
    return torch.mm(mat1, mat2)  # type: ignore[return-value]


def _added(
    function: Any, product: Callable[[Tensor, Tensor], Tensor], first: str, second: str
) -> None:
    """Register the rule of beta * input + alpha * product(first, second), such as torch.addmm.

    `first` and `second` are torch's names of the factors.
    """
    name = function.__name__

    @implements(function, getattr(torch.Tensor, name))
    def rule(
        input: Tensor, *factors: Tensor, beta: float = 1, alpha: float = 1, **named: Tensor
    ) -> Tensor:
        factors = (*factors, *(named.pop(n) for n in (first, second) if n in named))
        check_same_types(name, input, *factors)
        shape = check_on_meta(product, *factors, **named)
        if broadcast_shape(name, (input, torch.empty(shape, device="meta"))) != shape:
            raise RuntimeError(
                f"{name}: the input {tuple(input.shape)} does not broadcast to the product, {shape}"
            )
        if input.dtype == torch.bool:
            reason = "sums of booleans are not supported"
            refuse(name, reason, input, *factors, way_out="Convert the tensors, x.int()")
        whole_numbers = not (input.is_floating_point() or input.is_complex())
        if whole_numbers and not (isinstance(beta, int) and isinstance(alpha, int)):
            reason = f"beta={beta} and alpha={alpha} of {input.dtype} are not supported"
            way_out = "Use whole numbers, or convert the tensors"
            refuse(name, reason, input, *factors, way_out=way_out)
        # A term that is multiplied by 0 is left out, nan included.
        start = (
            input * beta
            if beta
            else input.masked_fill(torch.ones((), dtype=torch.bool, device=input.device), 0)
        )
        return torch.add(start, product(*factors), alpha=alpha)

    implements_in_place(getattr(torch.Tensor, f"{name}_"), rule)


_added(torch.addmm, torch.mm, "mat1", "mat2")
_added(torch.addmv, torch.mv, "mat", "vec")
_added(torch.baddbmm, torch.bmm, "batch1", "batch2")
_added(torch.addbmm, lambda x, y: torch.bmm(x, y).sum(0), "batch1", "batch2")
_added(torch.addr, torch.outer, "vec1", "vec2")


# Fully connected layers: 1x1 convolutions whose channels are the last dimension.


@implements(F.linear)
@serial_by(F.linear)
@works_on_last(lambda weight, bias=None: weight.dim() - 1)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x A^T + b for x, (..., in), the weight A, (out, in), and the bias b. Collective."""
    x = distributed_input("linear", input, weight, bias)
    check_same_types("linear", x, weight, bias)
    if x.shape[-1] != weight.shape[-1]:
        raise RuntimeError(
            f"linear: the input {tuple(x.shape)} ends in {x.shape[-1]} features, the weight "
            f"{tuple(weight.shape)} takes {weight.shape[-1]}"
        )
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:-1]):
        reason = f"the bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:-1])}"
        refuse("linear", reason, x, way_out="Expand it")
    if weight.dim() == 1:
        row = None if bias is None else bias.unsqueeze(0)
        return linear(x, weight.unsqueeze(0), row).squeeze(-1)
    if is_merged(x):
        return _along_merged(x, weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    needs = (Same(),) * x.dim()
    meta, d = WeightMeta.of(weight, bias), x.dim() - 1
    layer = local_layer(
        LayerCall("linear", Placement.of(x), meta, shape, needs, algorithm(), dimension=d)
    )
    weight, bias, late = layer.operands(weight, bias)
    buffer = gather_inputs(x, layer.needs, layer.cuts, layer.operator)
    return layer.output(F.linear(buffer, weight, bias), late, x.grid)


def _along_merged(x: DistTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear of an input whose features are merged, such as all flattened positions.

    For few outputs, an all-reduce sums the partial sums of the ranks. Otherwise the input is
    redistributed, so that each rank has all features of some rows. If the numbers of outputs and
    features are equal, the outputs are partitioned as the features were. Collective.
    """
    own, features = unmerged(x), factors_of(x)[-1]
    lead = own.dim() - len(features)
    axes = cutting_axes(own.cuts[lead:])
    parts = own.grid.topology.parts(axes)
    if 2 * parts * weight.shape[0] < weight.shape[0] + weight.shape[1]:
        rows = ascii_letters[2 : x.dim() + 1]
        total = contract("linear", [f"{rows}a", "ba"], f"{rows}b", [x, weight])
        return total if bias is None else total + bias.to(total.dtype)
    free = [d for d in range(lead) if not own.cuts[d] and own.shape[d] >= parts]
    if not free:
        return linear(in_blocks(x), weight, bias)
    rows_of = max(free, key=lambda d: own.shape[d])
    whole = replaced_at((*own.cuts[:lead], *((),) * len(features)), rows_of, axes)
    y = linear(redistribute(own, whole, "linear").flatten(lead), weight, bias)
    if weight.shape[0] == weight.shape[1]:
        y = redistribute(cast(DistTensor, y.unflatten(-1, features)), own.cuts, "linear")
    return y.reshape((*x.shape[:-1], weight.shape[0]))
