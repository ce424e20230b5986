"""Products equal the serial ones, whichever of their dimensions are cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from tests.support.strategies import Case, on_any_grid, shapes, sizes

pytestmark = pytest.mark.gpu


@on_any_grid(18)
def test_matrix_products_broadcast_as_serial(case: Case) -> None:
    rows, inner, columns = (case.draw(sizes(1, 7)) for _ in range(3))
    batch = case.draw(shapes(0, 2, 4))
    left, right = (
        [case.one_of(n, n, 1) for n in batch[case.one_of(0, 0, 1, 2) :]] for _ in range(2)
    )
    dtype = case.one_of(torch.float64, torch.float64, torch.float32)
    x = case.tensor(case.one_of([*left, rows, inner], [inner]), dtype=dtype)
    y = case.tensor(case.one_of([*right, inner, columns], [inner]), dtype=dtype)
    case.agrees(lambda x, y: x @ y, x, y)


@on_any_grid(9)
def test_named_products_equal_serial(case: Case) -> None:
    n, m, k, b = (case.draw(sizes(1, 6)) for _ in range(4))
    name, first, second = case.one_of(
        ("mm", [n, m], [m, k]),
        ("bmm", [b, n, m], [b, m, k]),
        ("mv", [n, m], [m]),
        ("dot", [n], [n]),
        ("outer", [n], [m]),
        ("mm", [n, m], [k, n]),
    )
    function = getattr(torch, name)
    case.agrees(lambda x, y: function(x, y), case.tensor(first), case.tensor(second))


@on_any_grid(18)
def test_einstein_sums_equal_serial(case: Case) -> None:
    extent = {letter: case.draw(sizes(1, 6)) for letter in "abcd"}
    terms = [case.draw(st.text("abcd", max_size=4)) for _ in range(case.draw(sizes(1, 3)))]
    used = sorted(set("".join(terms)))
    result = "".join(case.some(used))
    equation = ",".join(terms) + case.one_of(f"->{result}", "")
    tensors = [case.tensor([extent[letter] for letter in term]) for term in terms]
    case.agrees(lambda *t: torch.einsum(equation, *t), *tensors)


@on_any_grid(9)
def test_linear_layers_equal_serial(case: Case) -> None:
    shape, features = case.draw(shapes(1)), case.draw(sizes(1, 7))
    tensors = [case.tensor(shape), case.tensor([features, shape[-1]])]
    if case.flag():
        tensors.append(case.tensor([features]))
    case.agrees(lambda x, w, b=None: F.linear(x, w, b), *tensors)


@on_any_grid(14)
def test_attention_equals_serial(case: Case) -> None:
    lead = case.draw(shapes(0, 2, 4))
    rows, columns, features, values = (case.draw(sizes(1, 7)) for _ in range(4))
    tensors = [
        case.tensor([*lead, *plane])
        for plane in ((rows, features), (columns, features), (columns, values))
    ]
    causal, scale, frozen = case.flag(), case.one_of(None, 0.3), []
    if not causal and case.flag():
        full = [*lead, rows, columns]
        kept = [case.one_of(n, 1) for n in full[case.draw(st.integers(0, len(lead))) :]]
        tensors.append(case.tensor(kept))
        if kept[-1] == 1:  # what adds the same to all keys changes nothing, but for rounding
            frozen = [3]
    case.agrees(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=causal, scale=scale),
        *tensors,
        frozen=frozen,
    )
