"""Element-wise functions equal serial ones: every registered one, all kinds of operands."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.tensor.dispatch import RULES
from tests.support.serial import (
    agrees,
    deviation,
    examples,
    noted,
    raises_alike,
    random_grid,
    random_layout,
    random_tensor,
    refused,
)

RANKS = [1, 2, 4]
BINARY = set(
    """
    add and arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
    copy copysign div divide eq float_power floor_divide floordiv fmax fmin fmod gcd ge greater
    greater_equal gt heaviside hypot idiv igamma igammac isclose iadd iand ifloordiv ilshift imod
    imul ior ipow irshift isub itruediv ixor lcm ldexp le less less_equal logaddexp logaddexp2
    logical_and logical_or logical_xor lshift lt maximum minimum mod mul multiply ne nextafter
    not_equal or pow radd rand rdiv remainder rfloordiv rlshift rmod rmul ror rpow rrshift rshift
    rsub rtruediv rxor sub subtract true_divide truediv xlog1py xlogy xor zeta
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    complex gammainc gammaincc hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
    legendre_polynomial_p polar shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
""".split()
)
INTEGER = set(
    """
    and bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor gcd
    iand ilshift invert ior irshift ixor lcm lshift or rand rlshift ror rrshift rshift rxor xor
""".split()
)
TERNARY = {"addcdiv", "addcmul", "lerp", "clamp", "clip"}
NUMBERS = {
    "_threshold": (0.4, 7.0),
    "threshold": (0.4, 7.0),
    "multigammaln": (2,),
    "mvlgamma": (2,),
    "softshrink": (0.2,),
    "fill": (2.5,),
    "hardshrink": (0.6,),
}
COMPLEX = {"real", "imag", "resolve_conj", "conj", "conj_physical", "angle", "sgn"}
DOMAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "acosh": lambda x: x + 1,
    "arccosh": lambda x: x + 1,
    "multigammaln": lambda x: x + 2,
    "mvlgamma": lambda x: x + 2,
    "zeta": lambda x: x + 2,
}
"""Maps from (0, 1), where values lie, to the domains of functions that need others."""


def registered() -> list[Callable[..., Any]]:
    made = ("pointwise_rule", "_torch_rule")
    names = {f: getattr(rule, "__qualname__", "") for f, rule in RULES.items()}
    return [f for f, name in names.items() if name.startswith(made)]


def base_name(function: Callable[..., Any]) -> str:
    name = function.__name__.removeprefix("special_")
    return name.strip("_") if name != "_threshold" else name


def writes_in_place(function: Callable[..., Any]) -> bool:
    name = function.__name__
    return (
        name.endswith("_")
        and not name.endswith("__")
        or name.startswith("__i")
        and (name != "__invert__")
    )


def values(rng: random.Random, name: str, shape: list[int]) -> Tensor:
    x = random_tensor(rng, shape)
    if name in INTEGER:
        return (x * 3).abs().long() + 1
    if name in COMPLEX:
        return torch.complex(x, random_tensor(rng, shape))
    if rng.random() < 0.2:
        x = x.round()  # many equal values, and the borders of the domain
    return DOMAIN.get(name, lambda x: x)(x.abs().frac() * 0.98 + 0.01)


def broadcasting(rng: random.Random, shape: list[int]) -> list[int]:
    """Return a shape that broadcasts to `shape`: fewer dimensions, some of one element."""
    kept = shape[rng.choice([0, 0, 0, 1, 2]) :]
    return [n if rng.random() < 0.75 else 1 for n in kept]


def random_operands(rng: random.Random, function: Callable[..., Any]) -> list[Any]:
    """Draw the operands of one call, accepted by serial torch: tensors and numbers."""
    name = base_name(function)
    count = 3 if name in TERNARY else 2 if name in BINARY | {"clamp_max", "clamp_min"} else 1
    shape = [rng.choice([1, 2, 3, 5, 6]) for _ in range(rng.randrange(2, 5))]
    for _ in range(50):
        operands: list[Any] = [
            values(
                rng,
                name,
                shape if writes_in_place(function) and i == 0 else broadcasting(rng, shape),
            )
            for i in range(count)
        ]
        if count > 1 and rng.random() < 0.3:
            i = rng.randrange(1 if writes_in_place(function) else 0, count)
            operands[i] = rng.choice(
                [1, 2, 3] if name in INTEGER else [2, 3.5] if name in DOMAIN else [0.5, 1.25, 2]
            )
        operands += NUMBERS.get(name, ())
        if name == "polygamma":
            operands.insert(
                0 if function is not Tensor.polygamma and not writes_in_place(function) else 1, 1
            )
        if name == "masked_fill":
            operands += [values(rng, name, shape[1:]) > 0.5, 0.25]
        try:
            y = function(*(x.clone() if isinstance(x, Tensor) else x for x in operands))
            if y is not NotImplemented and any(isinstance(x, Tensor) for x in operands):
                return operands
        except (TypeError, RuntimeError, AttributeError):
            continue
    raise AssertionError(f"serial {function} takes none of these operands")


def check(rng: random.Random, function: Callable[..., Any]) -> None:
    operands = random_operands(rng, function)
    grid = random_grid(rng)
    places = [i for i, x in enumerate(operands) if isinstance(x, Tensor)]
    cut = [i for i in places if rng.random() < 0.7 or (writes_in_place(function) and not i)]
    cut = cut or places[:1]
    plain = [i for i in places if i not in cut]

    def call(*tensors: Tensor, detached: bool = False) -> Any:
        arguments = list(operands)
        for i, x in zip([*cut, *plain], tensors, strict=True):
            x = x.detach() if detached else x
            arguments[i] = x.clone() if writes_in_place(function) and not i else x
        y = function(*arguments)
        if writes_in_place(function):
            assert y is arguments[0]
        return y

    leaves = [operands[i].clone() for i in [*cut, *plain]]
    for x in leaves:
        x.requires_grad_(x.is_floating_point())
    try:
        y = call(*leaves)
        if y.requires_grad:
            y.sum().backward()
        differentiable = True
    except (RuntimeError, NotImplementedError, TypeError):
        differentiable = False
    layouts = [random_layout(rng, grid, operands[i].shape) for i in cut]
    with noted(function, [getattr(x, "shape", x) for x in operands], cut, layouts, grid):
        agrees(
            lambda *t: call(*t, detached=not differentiable),
            [operands[i] for i in cut],
            [operands[i] for i in plain],
            grid,
            rng,
            layouts,
        )


@pytest.mark.parallel(RANKS)
def test_every_registered_function_equals_serial_on_random_layouts_and_operands() -> None:
    ranks = MPI.COMM_WORLD.size
    rng = random.Random(ranks)
    functions = registered()
    assert len(functions) > 400
    for function in functions if ranks <= 2 else rng.sample(functions, 600 // ranks):
        check(rng, function)


@pytest.mark.parallel([1, 2, 4])
def test_every_combination_of_broadcasting_dimensions_equals_serial() -> None:
    rng = random.Random(1)
    sizes = [5, 1, 2]
    for n in examples(25):
        shapes = [[rng.choice([m, m, 1]) for m in sizes][rng.randrange(3) :] for _ in range(3)]
        grid = random_grid(rng)
        tensors = [random_tensor(rng, shape) for shape in shapes]
        layouts = [random_layout(rng, grid, shape) for shape in shapes]
        with noted(n, shapes, layouts, grid):
            agrees(lambda a, b, c: a * b + c / (1 + b * b), tensors, [], grid, rng, layouts)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "symbol",
    [
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.pow,
        operator.mod,
        operator.floordiv,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.eq,
        operator.ne,
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
    ],
)
def test_operators_with_numbers_and_tensors_on_either_side(symbol: Any) -> None:
    rng = random.Random(2)
    derivable = symbol not in (operator.floordiv, operator.mod)
    x, y, z = (random_tensor(rng, s).abs() + 0.5 for s in ((4, 3, 5), (4, 3, 5), (3, 1)))

    def left(x: Tensor, y: Any) -> Tensor:
        x = x if derivable else x.detach()
        return symbol(x.clone(), y if derivable or isinstance(y, float) else y.detach())

    def right(x: Tensor, y: Any) -> Tensor:
        return left(y, x) if isinstance(y, Tensor) else symbol(y, x if derivable else x.detach())

    grid = random_grid(rng)
    agrees(left, [x, y], [], grid, rng)
    agrees(left, [x, z], [], grid, rng)
    agrees(left, [x], [y], grid, rng)
    agrees(left, [x], [z], grid, rng)
    agrees(lambda x: left(x, 1.5), [x], [], grid, rng)
    agrees(lambda x: right(x, 1.5), [x], [], grid, rng)
    if not symbol.__name__.startswith("i"):
        agrees(right, [x], [y], grid, rng)
        agrees(right, [x], [z], grid, rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: torch.where(y > 0, x, 2.0),
        lambda x, y: torch.where(x > y, 0.0, y),
        lambda x, y: x.where(x > y, y),
        lambda x, y: (x > 0).where(y > 0, x < y),
        lambda x, y: x.clamp(min=y),
        lambda x, y: x.clamp(y, y + 1),
        lambda x, y: torch.clamp(x, max=0.3),
        lambda x, y: x.masked_fill(y > 0, -1.0),
        lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.addcmul(x, x, y, value=0.5),
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: torch.div(x.detach(), y.detach(), rounding_mode="floor"),
        lambda x, y: x.to(torch.float32).to(y),
        lambda x, y: x.double() + x.type_as(y) + x.type(torch.float64),
        lambda x, y: x.to(dtype=torch.int32),
        lambda x, y: torch.zeros_like(x) + x,
        lambda x, y: torch.ones_like(x, dtype=torch.int64),
        lambda x, y: torch.full_like(x, 2.5) * y,
        lambda x, y: F.gelu(x, approximate="tanh") + F.softplus(y, 2.0, 5.0),
        lambda x, y: torch.nan_to_num(torch.log(x), nan=1.0, neginf=-3.0),
        lambda x, y: torch.isclose(x, y, rtol=0.5),
        lambda x, y: x.data + y.detach(),
        lambda x, y: F.dropout(x, 0.5, training=False) + F.dropout1d(x, 0.0) * y,
    ],
)
@pytest.mark.parametrize("shape", [(5, 3, 7), (3, 1), (1, 1, 7)], ids=str)
def test_other_element_wise_functions_equal_serial(function: Any, shape: tuple[int, ...]) -> None:
    rng = random.Random(3)
    tensors = [random_tensor(rng, (5, 3, 7)), random_tensor(rng, shape)]
    agrees(function, tensors, [], random_grid(rng), rng)
    agrees(function, tensors[:1], tensors[1:], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_prelu_equals_serial_also_at_zero_and_at_infinity() -> None:
    rng = random.Random(4)
    for shape in ((4, 3, 5), (3, 2), (6,), (2, 3, 0, 4), (1, 5, 2, 3)):
        x = random_tensor(rng, shape).round()
        for slopes in ((1,), shape[1:2] or (1,)):
            agrees(F.prelu, [x], [random_tensor(rng, slopes)], random_grid(rng), rng)
    x = torch.tensor([float("inf"), 0.0, -1.0, -0.0]).double()
    agrees(F.prelu, [x], [torch.tensor([0.0]).double()], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "module",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.1),
        nn.LeakyReLU(0.1, inplace=True),
        nn.ELU(),
        nn.ELU(inplace=True),
        nn.CELU(0.5),
        nn.SELU(inplace=True),
        nn.GELU(),
        nn.SiLU(inplace=True),
        nn.Mish(inplace=True),
        nn.Hardswish(inplace=True),
        nn.Hardsigmoid(inplace=True),
        nn.ReLU6(True),
        nn.Hardtanh(-0.5, 0.5, True),
        nn.Threshold(0.1, 2.0, True),
        nn.Softplus(),
        nn.Softsign(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.Tanhshrink(),
        nn.LogSigmoid(),
        nn.Hardshrink(),
        nn.Softshrink(),
        nn.PReLU(3).double(),
        nn.Identity(),
        nn.Dropout().eval(),
    ],
    ids=str,
)
def test_activation_modules_equal_serial(module: nn.Module) -> None:
    rng = random.Random(5)
    x = random_tensor(rng, (3, 3, 5, 4))
    # A parameter of a module that is not parallelized gets no gradient.
    module.requires_grad_(False)
    agrees(lambda x: module(x * 1), [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_an_operand_of_another_kind_is_left_to_python() -> None:
    rng = random.Random(6)
    grid = random_grid(rng)
    x = dc.distribute_tensor(random_tensor(rng, (4, 4)), grid)
    assert (x == None) is False and (x != "name") is True  # noqa: E711
    for symbol in (operator.add, operator.lt, operator.mul, operator.and_):
        raises_alike(lambda x, s=symbol: s(x, "name"), [torch.ones(4, 4)], [], grid, rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.exp(x, out=torch.empty(4, 6)),
        lambda x: torch.add(torch.ones(4, 6), 1, out=x),
        lambda x: torch.sum(x, 0, out=torch.empty(6)),
        lambda x: torch.mm(x, x.t(), out=torch.empty(4, 4)),
        lambda x: torch.amax(x, 0, out=torch.empty(6)),
        lambda x: F.normalize(x, out=torch.empty(4, 6)),
        lambda x: x.masked_scatter(x > 0, x),
        lambda x: x.as_strided((2, 2), (1, 1)),
    ],
)
def test_what_depends_on_other_elements_or_memory_is_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(7)
    refused(function, [torch.ones(4, 6)], [], random_grid(rng), rng, None, dc.UnsupportedOperation)


@pytest.mark.parallel([1, 2, 4])
def test_a_plain_tensor_takes_in_place_what_is_made_whole_on_every_rank() -> None:
    rng = random.Random(7)
    grid = dc.ProcessGrid(height=-1)
    whole = random_tensor(rng, (4, 6, 5))
    x = dc.distribute_tensor(whole, grid, dc.Layout(channel="height"))

    def written(y: Tensor, row: Tensor) -> Tensor:
        buffer = torch.ones(3, 5, dtype=torch.float64)
        assert buffer.mul_(y.square().mean()) is buffer
        buffer += row.detach()
        with torch.no_grad():
            buffer[1:].copy_(row)
        buffer[0].masked_fill_(row > 0, 7.0)
        return buffer

    expected = written(whole, whole[:, 0].sum(0).requires_grad_())
    actual = written(x, x.redistribute(dc.Layout())[:, 0].sum(0).requires_grad_())
    assert type(actual) is Tensor and deviation(actual, expected) <= 1e-12
    windows = torch.ones(4, 6, 5, dtype=torch.float64)
    dc.redistributions(reset=True)
    windows[:, 1:4] += x[:, 1:4]
    moved = dc.redistributions(reset=True)
    assert torch.equal(windows[:, 1:4], whole[:, 1:4] + 1) and windows[:, 4:].eq(1).all()
    assert [entry.operator for entry in moved] == ["add_"] * (grid.size > 1)


@pytest.mark.parallel([1, 2, 4])
def test_a_result_is_written_to_an_out_of_its_own_shape_layout_and_type() -> None:
    rng = random.Random(8)
    grid = random_grid(rng)
    whole = random_tensor(rng, (4, 6))
    x = dc.distribute_tensor(whole, grid)
    out = torch.empty_like(x)
    assert torch.maximum(x, -x, out=out) is out
    assert torch.equal(out.full_tensor(), whole.abs())
    torch.add(x, x, out=x)
    assert torch.equal(x.full_tensor(), 2 * whole)
    for wrong in (x.float(), x[:2], x.clone().requires_grad_()):
        with pytest.raises(dc.UnsupportedOperation, match="out= has to be"):
            torch.exp(x, out=wrong)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.ones(4, 5),
        lambda x: x + torch.ones(5, 6, 4),
        lambda x: x.add_(torch.ones(2, 4, 6)),
        lambda x: x[:1].clone().add_(x[:1].new_ones(4, 6)),
        lambda x: torch.bitwise_and(x, x),
        lambda x: x.detach().requires_grad_().add_(1),
        lambda x: F.dropout(x, -0.5, training=False),
        lambda x: F.dropout(x, 1.5, training=False),
        lambda x: F.prelu(x, torch.ones(3)),
        lambda x: F.prelu(x, torch.ones(6, 1)),
        lambda x: torch.lerp(x, x, x.double()),
        lambda x: x.clamp(),
        lambda x: x.to("no type"),
        lambda x: torch.where(x, x, x),
        lambda x: x.new_zeros(3, -1),
    ],
)
def test_bad_arguments_are_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(8)
    grid = random_grid(rng)
    raises_alike(function, [torch.ones(4, 6)], [], grid, rng, [dc.Layout()])


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shape", [(4, 6), (4, 5), (1, 6), (6,), ()])
def test_new_tensors_are_cut_as_the_old_one_where_they_are_as_large(shape: tuple) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(4, 6), grid, dc.Layout(sample="height"))
    made = {
        0: [x.new_zeros(shape), x.new_zeros(size=shape), x.new_empty(shape).zero_()],
        1: [x.new_ones(*shape or [()]), x.new_ones(shape, requires_grad=True).detach()],
        2: [x.new_full(shape, 2), x.new_full(size=shape, fill_value=2, dtype=torch.int64)],
    }
    for value, tensors in made.items():
        for y in tensors:
            assert y.layout == (dc.Layout(sample="height") if shape[:-1] == (4,) else dc.Layout())
            assert torch.equal(y.full_tensor(), torch.full(shape, value, dtype=y.dtype))
