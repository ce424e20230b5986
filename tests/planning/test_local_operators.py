"""Local operators, and the text by which their times are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from distconv.planning.local_operators import LocalOperator, TensorSpec, spec_of


def operator(*arguments: object, **keywords: object) -> LocalOperator:
    """An operator of these arguments."""
    return LocalOperator("aten.cat.default", spec_of(arguments), spec_of(tuple(keywords.items())))


def hollow(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without elements."""
    return torch.empty(shape, dtype=dtype, device="meta")


def test_operators_on_tensors_alike_are_one_and_on_others_are_not() -> None:
    x = hollow(2, 3)
    assert operator([x, x], 1) == operator([hollow(2, 3), x], 1)
    others = [
        operator([x, x], 1),
        operator([x, x], 0),
        operator([x], 1),
        operator([x, hollow(3, 2).T], 1),
        operator([x, hollow(2, 3, dtype=torch.float64)], 1),
        operator([x, x], dim=1),
    ]
    assert len({o.key for o in others}) == len(set(others)) == len(others)


def test_an_operator_tells_its_tensors_and_their_bytes() -> None:
    taken = operator([hollow(2, 3), (hollow(4, dtype=torch.int64),)], 1, out=hollow(5)).taken
    assert taken[0] == TensorSpec((2, 3), (3, 1), torch.float32)
    assert [spec.nbytes for spec in taken] == [24, 32, 20]
