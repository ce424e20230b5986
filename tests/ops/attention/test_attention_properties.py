"""Attention equals serial torch's, forward and backward, in whatever way it is computed."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import distconv as dc
from tests.ops.attention.ways import WAYS, attending_by
from tests.support.serial import agrees, deviation, random_tensor
from tests.support.strategies import Case, on_any_grid, shapes, sizes


@on_any_grid(40, more=[3])
def test_attention_equals_serial(case: Case) -> None:
    lead = case.draw(shapes(0, 2, 4))
    rows, features, values = (case.draw(sizes(1, 9)) for _ in range(3))
    columns = case.draw(sizes(2, 9))  # of one key the weight is 1, and the gradient rounding
    values = case.one_of(features, values)
    # Torch's own kernels do not agree about broadcasting and masks where there are no elements.
    leads = [[n if 0 in lead else case.one_of(n, n, n, 1) for n in lead] for _ in range(3)]
    planes = ((rows, features), (columns, features), (columns, values))
    tensors = [case.tensor([*own, *plane]) for own, plane in zip(leads, planes, strict=True)]
    scale, frozen = case.one_of(None, 0.3), []
    full = [*torch.broadcast_shapes(*leads[:2]), rows, columns]
    mask = "none" if 0 in lead else case.one_of("none", "none", "added", "chosen")
    if mask != "none":
        kept = [case.one_of(n, n, 1) for n in full[case.draw(st.integers(0, len(lead))) :]]
        tensors.append(case.tensor(kept))
        if mask == "chosen":
            tensors[3] = tensors[3] > -0.5
        if kept[-1] == 1:  # an addition of the same to all keys changes nothing but rounding
            frozen = [3]
    with attending_by(case.one_of(*WAYS)):
        case.agrees(
            lambda *t: F.scaled_dot_product_attention(*t, scale=scale), *tensors, frozen=frozen
        )


@on_any_grid(30, more=[3])
def test_causal_attention_equals_serial(case: Case) -> None:
    lead = case.draw(shapes(0, 2, 4))
    rows, features = case.draw(sizes(2, 13)), case.draw(sizes(1, 5))
    columns = case.one_of(rows, rows, case.draw(sizes(2, 13)))
    tensors = [case.tensor([*lead, n, features]) for n in (rows, columns, columns)]
    # Often all are partitioned alike, which makes a triangle of blocks.
    layout = case.layout(tensors[0].shape)
    if case.flag() and rows == columns:
        case.layout = lambda _: layout  # type: ignore[method-assign]
    with attending_by(case.one_of(*WAYS)):
        case.agrees(
            lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), *tensors, cut=[0, 1, 2]
        )


@on_any_grid(20, more=[3])
def test_grouped_queries_equal_serial(case: Case) -> None:
    groups, heads, batch = case.draw(sizes(1, 3)), case.draw(sizes(1, 3)), case.draw(sizes(1, 3))
    rows, columns, features = case.draw(sizes(2, 7)), case.draw(sizes(2, 7)), case.draw(sizes(1, 5))
    tensors = [
        case.tensor([batch, n, m, features])
        for n, m in ((groups * heads, rows), (heads, columns), (heads, columns))
    ]
    causal = case.flag()
    if not causal and case.flag():
        tensors.append(case.tensor([case.one_of(groups * heads, 1), rows, columns]))
    with attending_by(case.one_of(*WAYS)):
        case.agrees(
            lambda *t: F.scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=True),
            *tensors,
        )


def _positions(x: Tensor, heads: int) -> Tensor:
    """Return the positions of a plane as a sequence, (sample, head, position, feature)."""
    return x.flatten(2).unflatten(1, (heads, -1)).transpose(-2, -1)


@on_any_grid(20, more=[3])
def test_attention_between_the_positions_of_planes_equals_serial(case: Case) -> None:
    heads, features, batch = case.draw(sizes(1, 3)), case.draw(sizes(1, 3)), case.draw(sizes(1, 3))
    plane = [batch, heads * features, case.draw(sizes(2, 6)), case.draw(sizes(1, 6))]
    other = case.one_of(plane, [*plane[:2], case.draw(sizes(2, 6)), case.draw(sizes(1, 6))])
    causal = case.flag()
    tensors = [case.tensor(shape) for shape in (plane, other, other)]
    layout = case.layout(plane)
    if case.flag():
        case.layout = lambda _: layout  # type: ignore[method-assign]
    with attending_by(case.one_of(*WAYS)):
        case.agrees(
            lambda *t: F.scaled_dot_product_attention(
                *(_positions(x, heads) for x in t), is_causal=causal
            ),
            *tensors,
        )


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_draws_the_same_numbers_in_every_way(causal: bool) -> None:
    grid = dc.ProcessGrid(height=-1)
    rng = random.Random(3)
    given = [random_tensor(rng, (2, 3, 9, 4)) for _ in range(3)]

    def dropped(layout: dc.Layout, way: str) -> list[Tensor]:
        tensors = [dc.distribute_tensor(x, grid, layout).requires_grad_() for x in given]
        torch.manual_seed(5)
        with attending_by(way):
            out = F.scaled_dot_product_attention(*tensors, dropout_p=0.4, is_causal=causal)
            out.sin().sum().backward()
        return [x.full_tensor() for x in (out, *(x.grad for x in tensors))]  # type: ignore[union-attr]

    # The weights times the values, which are dropped as dropout drops elements of the weights.
    q, k, v = (dc.distribute_tensor(x, grid, dc.Layout()).requires_grad_() for x in given)
    scores = q @ k.mT / 2
    if causal:
        scores = scores.masked_fill(torch.ones(9, 9).tril() == 0, -torch.inf)
    torch.manual_seed(5)
    out = F.dropout(scores.softmax(-1), 0.4) @ v
    out.sin().sum().backward()
    expected = [x.full_tensor() for x in (out, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]
    for layout in (dc.Layout(), dc.Layout(height="height")):
        for way in WAYS:
            for got, wanted in zip(dropped(layout, way), expected, strict=True):
                assert deviation(got, wanted) < 1e-12, (layout, way)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("way", ["ring", "few queries"])
def test_second_derivatives_of_attention_equal_serial(way: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    rng = random.Random(4)
    given = [random_tensor(rng, (2, 7, 4)) for _ in range(3)]
    given.append(random_tensor(rng, (7, 7)))

    def curvature(tensors: list[Tensor]) -> list[Tensor]:
        out = F.scaled_dot_product_attention(*tensors)
        first = torch.autograd.grad(out.sin().sum(), tensors, create_graph=True)
        return list(torch.autograd.grad(sum(x.cos().sum() for x in first), tensors))  # type: ignore[arg-type]

    expected = curvature([x.clone().requires_grad_() for x in given])
    cut, rows = dc.Layout(channel="height"), dc.Layout(sample="height")
    layouts = [cut, cut, cut, rows]
    with attending_by(way):
        found = curvature(
            [
                dc.distribute_tensor(x, grid, layout).requires_grad_()
                for x, layout in zip(given, layouts, strict=True)
            ]
        )
    for got, wanted in zip(found, expected, strict=True):
        assert deviation(got, wanted) < 1e-10


@pytest.mark.parallel([4])
def test_a_query_that_attends_to_no_key_gives_zeros_and_no_gradient() -> None:
    grid = dc.ProcessGrid(height=-1)
    rng = random.Random(5)
    tensors = [random_tensor(rng, (1, 2, 6, 4)) for _ in range(3)]
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    layout = dc.Layout(height="height")
    for way in WAYS:
        with attending_by(way):
            agrees(
                lambda *t: F.scaled_dot_product_attention(*t, mask),
                tensors,
                [],
                grid,
                rng,
                [layout] * 3,
            )
