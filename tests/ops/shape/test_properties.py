"""Changes of shape, joins, parts, orders and assignment equal the serial ones, on any grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.support.strategies import Case, on_any_grid, shapes, sizes

pytestmark = pytest.mark.gpu

DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def tensor(case: Case, shape: list[int]) -> Tensor:
    return case.tensor(shape, "normal", "wild", dtype=case.one_of(*DTYPES))


def factored(case: Case, n: int) -> list[int]:
    """Draw numbers whose product is `n`."""
    factors = []
    while n > 1 and len(factors) < 3:
        factors.append(case.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0])))
        n //= factors[-1]
    return [*factors, n]


@on_any_grid(18)
def test_reshapes_equal_serial(case: Case) -> None:
    shape = case.draw(shapes(0, 4))
    x = tensor(case, shape)
    wanted = factored(case, x.numel())
    if x.numel() and case.flag():
        wanted[case.draw(st.integers(0, len(wanted) - 1))] = -1
    a, b = sorted(case.draw(st.tuples(*[st.integers(0, max(len(shape) - 1, 0))] * 2)))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "reshape": lambda x: x.reshape(wanted),
        "view": lambda x: x.view(*wanted),
        "flatten": lambda x: x.flatten(a, b),
        "back": lambda x: x.flatten(a, b).reshape(shape),
        "unflatten": lambda x: x.flatten().unflatten(0, wanted),
    }
    case.agrees(functions[case.one_of(*functions)], x)


@on_any_grid(22)
def test_rearrangements_equal_serial(case: Case) -> None:
    shape = case.draw(shapes(1, 4))
    n = len(shape)
    dims = st.integers(-n, n - 1)
    d, e, order = case.draw(dims), case.draw(dims), case.draw(st.permutations(range(n)))
    some = case.some(range(n))
    shifts = [case.draw(st.integers(-13, 13)) for _ in some]
    grown = [case.one_of(-1, 3) if m == 1 else case.one_of(-1, m) for m in shape]
    times = [case.draw(st.integers(0, 3)) for _ in range(n + case.draw(st.integers(0, 1)))]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "permute": lambda x: x.permute(order),
        "transpose": lambda x: x.transpose(d, e),
        "movedim": lambda x: x.movedim(d, e),
        "squeeze": lambda x: x.squeeze(),
        "squeeze some": lambda x: x.squeeze(tuple(some)),
        "unsqueeze": lambda x: x.unsqueeze(d),
        "expand": lambda x: x.expand(2, *grown),
        "repeat": lambda x: x.repeat(times),
        "tile": lambda x: x.tile(times),
        "flip": lambda x: x.flip(some),
        "roll": lambda x: x.roll(shifts, some) if some else x.roll(case_shift),
        "transposed and flat": lambda x: x.transpose(d, e).reshape(-1),
        "t": lambda x: x.t(),
        "mT": lambda x: x.mT,
    }
    case_shift = sum(shifts) + 1
    case.agrees(functions[case.one_of(*functions)], tensor(case, shape))


@on_any_grid(14)
def test_joins_of_distributed_plain_and_empty_pieces_equal_serial(case: Case) -> None:
    shape = case.draw(shapes(1, 4).filter(lambda shape: shape != [0]))
    stacked, dtype = case.flag(), case.one_of(*DTYPES)
    d = case.draw(st.integers(-len(shape), len(shape) - 1))
    pieces = []
    for _ in range(case.draw(sizes(1, 4))):
        piece = list(shape)
        if not stacked:
            # A piece of shape (0,) is skipped, and its gradient stays None.
            piece[d] = case.draw(sizes(0 if len(shape) > 1 else 1, 9))
        pieces.append(case.tensor(piece, "normal", "wild", dtype=dtype))
    join = torch.stack if stacked else torch.cat
    case.agrees(lambda *pieces: join(pieces, d), *pieces)


@on_any_grid(18)
def test_parts_equal_serial(case: Case) -> None:
    x = tensor(case, case.draw(shapes(1, 4)))
    d = case.draw(st.integers(-x.dim(), x.dim() - 1))
    size = x.shape[d]
    start = case.draw(sizes(0, size))
    length = case.draw(sizes(0, size - start))
    step = case.draw(sizes(1, size + 2))
    functions: dict[str, Callable[[Tensor], Any]] = {
        "narrow": lambda x: x.narrow(d, start, length),
        "split": lambda x: x.split(step, d),
        "split by sizes": lambda x: x.split([start, length, size - start - length], d),
        "chunk": lambda x: x.chunk(step, d),
        "select": lambda x: x.select(d, start),
        "unbind": lambda x: x.unbind(d),
        "iteration": lambda x: [part * 1 for part in x],
    }
    name = case.one_of(*functions)
    assume(size or name not in ("unbind", "iteration"))
    case.agrees(functions[name], x)


@st.composite
def picks(draw: st.DrawFn, shape: list[int]) -> tuple[Any, ...]:
    """Draw integers, slices, None and ellipses, mostly within the bounds."""
    index: list[Any] = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        bounds = st.one_of(st.none(), st.integers(-n - 1, n + 1))
        slices = st.builds(slice, bounds, bounds, st.sampled_from([None, 1, 2, 3, 7]))
        index.append(draw(st.one_of(slices, st.integers(-n, max(n - 1, 0)))))
    for other in draw(st.lists(st.sampled_from([None, ...]), max_size=2)):
        index.insert(draw(st.integers(0, len(index))), other)
    return tuple(index)


@on_any_grid(18)
def test_indexing_equals_serial(case: Case) -> None:
    shape = case.draw(shapes(1, 4))
    index = case.draw(picks(shape))
    case.agrees(lambda x: x[index], tensor(case, shape))


@on_any_grid(18)
def test_assignment_equals_serial(case: Case) -> None:
    shape = case.draw(shapes(1, 4))
    index = case.draw(picks(shape))
    x = case.tensor(shape, "normal", "wild")
    try:
        taken = list(x[index].shape)
    except (IndexError, RuntimeError):
        assume(False)
    value = case.tensor([case.one_of(n, n, 1) for n in taken[case.one_of(0, 0, 1) :]])

    def assign(x: Tensor, value: Any) -> Tensor:
        y = x * 2
        y[index] = value
        return y * x

    if case.flag():
        case.agrees(lambda x: assign(x, 7), x)
    else:
        case.agrees(assign, x, value, cut=case.one_of([0], [0, 1]))
