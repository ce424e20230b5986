"""Element-wise functions equal serial: operands, types, broadcasting and writing in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume
from torch import Tensor

from tests.support.strategies import FLOATING, INTEGER, Case, on_any_grid, shapes

pytestmark = pytest.mark.gpu

DTYPES = (*FLOATING, *INTEGER, torch.bool)
KINDS = ("normal", "negative", "ties", "equal", "wild")
UNARY = """
    abs neg sign sgn signbit square exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan
    asin atan sinh cosh tanh asinh sigmoid erf erfc lgamma ceil floor round trunc frac isnan isinf
    isfinite logical_not bitwise_not nan_to_num positive relu sinc clone
""".split()
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 0.5),
    "celu": lambda x: F.celu(x, 0.5),
    "selu": F.selu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, 2.0, 5.0),
    "softsign": F.softsign,
    "softshrink": lambda x: F.softshrink(x, 0.2),
    "hardshrink": lambda x: F.hardshrink(x, 0.6),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logsigmoid": F.logsigmoid,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 7.0),
}
BINARY = """
    add sub mul div true_divide maximum minimum fmax fmin atan2 hypot copysign logaddexp lt le gt ge
    eq ne logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor gcd lcm pow
    float_power xlogy ldexp floor_divide remainder fmod heaviside nextafter isclose rsub
    bitwise_left_shift bitwise_right_shift true_divide logaddexp2 clamp_min clamp_max
""".split()
WITHOUT_GRADIENT = {
    "floor_divide",
    "remainder",
    "fmod",
    "heaviside",
    "nextafter",
    "clamp_min",
    "clamp_max",
}
IN_PLACE = """
    add_ sub_ mul_ div_ pow_ atan2_ copysign_ lt_ eq_ logical_or_ bitwise_and_ fill_ xlogy_ copy_
""".split()


def broadcasting(case: Case, shape: list[int]) -> list[int]:
    """Draw a shape that broadcasts to `shape`: fewer dimensions, some of one element."""
    kept = shape[case.one_of(0, 0, *range(len(shape) + 1)) :]
    return [case.one_of(n, n, 1) for n in kept]


def numbers(case: Case) -> Any:
    return case.one_of(2, 0.5, -3, 0, True, 1.0)


@on_any_grid(18)
def test_functions_of_one_tensor_equal_serial_in_every_type(case: Case) -> None:
    function = getattr(torch, case.one_of(*UNARY))
    x = case.tensor(case.draw(shapes(0)), *KINDS, dtype=case.one_of(*DTYPES))
    case.agrees(lambda x: function(x), x)


@on_any_grid(9)
def test_activations_equal_serial_in_every_type(case: Case) -> None:
    function = ACTIVATIONS[case.one_of(*ACTIVATIONS)]
    # What torch gives as the gradient at nan depends on the place in memory.
    x = case.tensor(case.draw(shapes(0)), *KINDS[:-1], "infinite", dtype=case.one_of(*DTYPES))
    case.agrees(lambda x: function(x), x)


@on_any_grid(45)
def test_functions_of_two_operands_broadcast_and_promote_types_as_serial(case: Case) -> None:
    name = case.one_of(*BINARY)
    shape = case.draw(shapes(0))
    first, second = (
        case.tensor(broadcasting(case, shape), *KINDS, dtype=case.one_of(*DTYPES)) for _ in "ab"
    )
    frozen = (0, 1) if name in WITHOUT_GRADIENT else ()
    kind = case.one_of("tensors", "tensors", "number", "number first")
    number = numbers(case) if kind != "tensors" else None
    function = getattr(torch, name)
    if kind == "number":
        case.agrees(lambda x: function(x, number), first, frozen=frozen)
    elif kind == "number first":
        reverse = {"add": "radd", "sub": "rsub", "mul": "rmul", "pow": "rpow", "div": "rtruediv"}
        assume(name in reverse)
        case.agrees(lambda x: getattr(x, f"__{reverse[name]}__")(number), first)
    else:
        case.agrees(lambda x, y: function(x, y), first, second, frozen=frozen)


@on_any_grid(18)
def test_writing_in_place_equals_serial(case: Case) -> None:
    name, shape = case.one_of(*IN_PLACE), case.draw(shapes(0))
    x = case.tensor(shape, *KINDS, dtype=case.one_of(*DTYPES))
    y = case.tensor(broadcasting(case, shape), *KINDS, dtype=case.one_of(*DTYPES))
    if name == "fill_":
        y = y.flatten()[:1].sum()

    def write(x: Tensor, y: Any) -> Tensor:
        z = x.clone()
        assert getattr(z, name)(y) is z
        return z

    if case.flag():
        number = numbers(case)
        case.agrees(lambda x: write(x, number), x)
    else:
        case.agrees(write, x, y, cut=case.one_of([0], [0, 1]))


@on_any_grid(22)
def test_functions_of_three_operands_equal_serial(case: Case) -> None:
    shape = case.draw(shapes(0))
    tensors = [case.tensor(broadcasting(case, shape), *KINDS) for _ in "abc"]
    number = case.one_of(0.3, -2)
    functions: dict[str, Callable[..., Tensor]] = {
        "where": lambda x, y, z: torch.where(x > 0, y, z),
        "where with a number": lambda x, y: torch.where(x > y, y, number),
        "where with a number first": lambda x, y: torch.where(x > y, number, y),
        "where of truth values": lambda x, y: (x > 0).where(y > 0, x < y),
        "clamp": lambda x, y, z: torch.clamp(x, y.detach(), z.detach()),
        "clamp by numbers": lambda x: torch.clamp(x, -0.4, 0.7),
        "clamp from above": lambda x, y: x.clamp(max=y.detach()),
        "lerp": lambda x, y, z: torch.lerp(x, y, z),
        "lerp by a number": lambda x, y: torch.lerp(x, y, number),
        "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=number),
        "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=number),
        "masked_fill": lambda x, y: x.masked_fill(y > 0, number),
        "add with alpha": lambda x, y: torch.add(x, y, alpha=number),
        "types of others": lambda x, y: x.to(torch.float32).to(y) + x.type_as(y) * y,
        "tensors alike": lambda x, y: torch.zeros_like(x) + torch.full_like(x, 2.5) * y,
        "without gradients": lambda x, y: x.data + y.detach(),
        "dropout of nothing": lambda x: F.dropout(x, 0.5, training=False),
        "div rounded": lambda x, y: torch.div(x.detach(), y.detach(), rounding_mode="trunc"),
        "isclose": lambda x, y: torch.isclose(x, y, rtol=0.5, equal_nan=number < 0),
        "operators": lambda x, y, z: x * y + z / (1 + y * y) - number,
    }
    function = functions[case.one_of(*functions)]
    case.agrees(function, *tensors[: function.__code__.co_argcount])


@on_any_grid(9)
def test_conversions_equal_serial(case: Case) -> None:
    before, after = (case.one_of(*DTYPES) for _ in "ab")
    x = case.tensor(case.draw(shapes(0)), "normal", "ties", dtype=before)
    if after == torch.uint8 and before != torch.bool:
        x = x.abs()
    case.agrees(case.one_of(lambda x: x.to(after), lambda x: x.type(after)), x)


@on_any_grid(7)
def test_parametric_relu_equals_serial(case: Case) -> None:
    shape = case.draw(shapes(1))
    slopes = case.one_of([1], shape[1:2] or [1])
    x = case.tensor(shape, "normal", "ties", "nan")
    case.agrees(F.prelu, x, case.tensor(slopes), cut=[0])
