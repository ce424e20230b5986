"""Random programs of views and writes in place mean what they mean on one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import distconv as dc
from tests.support.serial import (
    REFUSALS,
    TOLERANCE,
    deviation,
    examples,
    noted,
    random_grid,
    random_layout,
    random_tensor,
)

View = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any]]
"""A view of a serial tensor, and what makes the same one of a distributed tensor."""


def same(function: Callable[[Tensor], Tensor]) -> View:
    return function, function


def piece(x: Tensor, d: int, pieces: int, i: int, recorded: bool) -> View:
    """Return a piece of a chunked tensor, which torch allows to write to if it is narrowed."""
    function = torch.unsafe_chunk if recorded else torch.chunk
    parts = x.chunk(pieces, d)
    i %= len(parts)
    start = sum(part.shape[d] for part in parts[:i])
    return lambda y: y.narrow(d, start, parts[i].shape[d]), lambda y: function(y, pieces, d)[i]


def random_view(rng: random.Random, x: Tensor, recorded: bool) -> View:
    """Draw a view of a tensor of this shape."""
    n, d = x.dim(), rng.randrange(max(x.dim(), 1))
    if not n:
        return same(lambda y: y.unsqueeze(0))
    size = x.shape[d]
    a = rng.randint(0, size)
    b = rng.randint(a, size)
    other = rng.randrange(n)
    order = rng.sample(range(n), n)
    i = rng.randrange(max(size, 1))
    kinds: list[View] = [
        same(lambda y: y[(*(slice(None),) * d, slice(a, b))]),
        same(lambda y: y[(..., slice(1, None, 2), *(slice(None),) * (n - 1 - d))]),
        same(lambda y: y.narrow(d, a, b - a)),
        same(lambda y: y.permute(order)),
        same(lambda y: y.unsqueeze(d)),
        same(lambda y: y[(*(slice(None),) * d, None)]),
        same(lambda y: y.detach()),
        same(lambda y: y.transpose(d, other)),
    ]
    if x.is_contiguous() and x.numel():
        merged = [*x.shape[:d], *([size * x.shape[d + 1]] if d + 1 < n else [size])]
        kinds += 2 * [same(lambda y: y.view(*merged, *x.shape[d + 2 :]))]
        if size % 2 == 0:
            halves = (*x.shape[:d], size // 2, 2, *x.shape[d + 1 :])
            kinds += 2 * [same(lambda y: y.view(halves))]
    if size:
        kinds += 3 * [same(lambda y: y.select(d, i))]
        kinds += [piece(x, d, rng.randint(1, 3), i, recorded)]
        alone = same(lambda y: y.select(d, i))
        kinds += [alone if recorded else (alone[0], lambda y: y.unbind(d)[i])]
    if size == 1:
        kinds += [same(lambda y: y.squeeze(d))]
    if size > 1:
        step = rng.choice((2, 3))
        kinds += [same(lambda y: y.unfold(d, 2, step))]
    if n > 1 and d != other:
        offset = rng.randint(-1, 1)
        kinds += 2 * [same(lambda y: y.diagonal(offset, d, other))]
    return rng.choice(kinds)


def random_write(
    rng: random.Random, x: Tensor, parameter: Callable[[tuple[int, ...]], Any]
) -> Callable[[Tensor, Any], object]:
    """Draw a function that writes to a tensor of this shape, and its operand."""
    n, squares = x.dim(), rng.random() < 0.1

    def add(y: Tensor, p: Tensor) -> None:
        y += p

    def assign(y: Tensor, p: Tensor) -> None:
        y[...] = p

    def add_to_part(y: Tensor, p: Tensor) -> None:
        y[1:] += p[1:]

    def assign_part(y: Tensor, p: Tensor) -> None:
        y[:1] = p[:1]

    kinds: list[Callable[[Tensor, Any], object]] = [
        add,
        assign,
        lambda y, p: y.mul_(p.detach()),
        lambda y, p: y.sub_(p, alpha=2),
        lambda y, p: y.copy_(p),
        lambda y, p: y.fill_(0.5),
        lambda y, p: y.zero_(),
        lambda y, p: y.relu_(),
        lambda y, p: y.masked_fill_(p.detach() > 0, 2.0),
        lambda y, p: y.mul_(p) if squares else y.mul_(-1.5),
    ]
    if n:
        kinds += 2 * [add_to_part, assign_part]
        d = rng.randrange(n)
        index = torch.tensor([0] if x.shape[d] else [], dtype=torch.int64)
        kinds += [lambda y, p: y.index_fill_(d, index, -1.0)]
        kinds += [lambda y, p: y.index_add_(d, index, p.narrow(d, 0, len(index)))]
    return rng.choice(kinds)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("seed", examples(120))
def test_random_views_and_writes_are_serial(seed: int, recorded: bool) -> None:
    rng = random.Random(seed)
    grid = random_grid(rng)
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 7]) for _ in range(rng.randint(1, 4)))
    layout = random_layout(rng, grid, shape)
    start = random_tensor(rng, shape)
    x = start.clone().requires_grad_(recorded)
    y = dc.distribute_tensor(start, grid, layout).requires_grad_(recorded)
    pairs: list[tuple[Tensor, Any]] = [(x.clone(), y.clone())]
    parameters: list[tuple[Tensor, Tensor]] = []
    losses: list[tuple[Tensor, Any]] = []
    said = []
    with noted(grid, shape, layout, said):
        for _ in range(rng.randint(4, 12)):
            at = rng.randrange(len(pairs))
            a, b = pairs[at]
            kind = rng.choice(["view", "view", "write", "read"])
            said.append((kind, at, tuple(a.shape)))
            if kind == "view":
                serial, distributed = random_view(rng, a, recorded)
                pairs.append((serial(a), distributed(b)))
            elif kind == "write":
                p = random_tensor(rng, tuple(a.shape))
                q = p.clone()
                if rng.random() < 0.5:
                    p.requires_grad_(recorded)
                    q.requires_grad_(recorded)
                    parameters.append((p, q))
                elif rng.random() < 0.5:
                    q = dc.distribute_tensor(q, grid, random_layout(rng, grid, q.shape))
                write = random_write(rng, a, lambda shape: None)
                try:
                    write(a, p)
                except REFUSALS as error:
                    said.append(repr(error))
                    return
                write(b, q)
            else:
                weights = random_tensor(rng, tuple(a.shape))
                losses.append(((a * weights).sum(), (b * weights).sum()))
        for i, (a, b) in enumerate(pairs):
            said.append(("at last", i, tuple(a.shape)))
            assert b.shard.shape == b.box.shape
            assert deviation(b.detach().full_tensor(), a.detach()) <= TOLERANCE
            assert b.requires_grad == a.requires_grad
            weights = random_tensor(rng, tuple(a.shape))
            losses.append(((a * weights).sum(), (b * weights).sum()))
        if not recorded:
            return
        total = sum(b for _, b in losses)
        try:
            torch.stack([a for a, _ in losses]).sum().backward()
        except RuntimeError:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()
            return
        total.backward()
        assert deviation(y.grad.full_tensor(), x.grad) <= TOLERANCE, "gradient"
        for p, q in parameters:
            if p.grad is None:
                assert q.grad is None
            else:
                assert deviation(q.grad, p.grad) <= TOLERANCE, "parameter"
