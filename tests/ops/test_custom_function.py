"""A user's own torch.autograd.Function runs on DistTensors as it is, and is exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import agrees, deviation, random_tensor, same_gradients


class Scale(torch.autograd.Function):
    """A function with three outputs, one without a gradient; it saves one, and takes a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, power: float) -> Any:
        y = x * x * weight.view(1, -1, 1, 1) * power
        ctx.save_for_backward(x, weight, y)
        ctx.power = power
        strongest = y.argmax(1)
        ctx.mark_non_differentiable(strongest)
        return y, x.mean((2, 3)), strongest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, y = ctx.saved_variables if ctx.power == 3 else ctx.saved_tensors
        dy, dmean, _ = grads
        of_mean = dmean[:, :, None, None].expand(x.shape) / (x.shape[2] * x.shape[3])
        dx = 2 * dy * x * weight.view(1, -1, 1, 1) * ctx.power + of_mean
        return dx, (dy * y).sum((0, 2, 3)) / weight, None


class Square(torch.autograd.Function):
    """A function that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0] * ctx.saved_tensors[0]


RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "planes": lambda x: x.flatten(2),
    "rows": lambda x: x.permute(0, 2, 3, 1).reshape(-1, 3),
    "everything": lambda x: x.reshape(-1),
    "an operation on rows": lambda x: x.permute(0, 2, 3, 1).flatten(0, 2).exp(),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("height", [1, 5])
@pytest.mark.parametrize("axis", ["height", "sample"])
@pytest.mark.parametrize("case", RESHAPES)
def test_a_reshape_whose_cut_dimension_is_merged_has_its_gradient(
    case: str, axis: str, height: int
) -> None:
    rng = random.Random(case)
    x, grid = random_tensor(rng, (3, 3, height, 7)), dc.ProcessGrid(height=-1)
    layout = dc.Layout(**{axis: "height"})
    agrees(lambda x: Square.apply(RESHAPES[case](x)), [x], [], grid, rng, [layout])


class Reverse(torch.autograd.Function):
    """A function in torch's newer form, with `setup_context`, whose output is a view."""

    @staticmethod
    def forward(x: Tensor, strength: float = 0.5) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.strength * grads[0], None


class Same(torch.autograd.Function):
    """A function that returns its input, and no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
        self.weight = nn.Parameter(torch.rand(3, dtype=torch.float64) + 1)

    def forward(self, x: Tensor) -> Tensor:
        y, mean, _ = SCALE(self.conv(x), self.weight, 2.0)
        return (Reverse.apply(y.sin()) ** 2).sum() + (mean**3).sum()


SCALE = Scale.apply
"""A bound `apply`, which programs keep, maybe before distconv is imported."""

GRIDS = {
    1: [{}],
    2: [{"height": 2}, {"sample": 2}, {"channel": 2}],
    3: [{"height": 3}],
    4: [{"sample": 2, "height": 2}, {"height": 2, "width": 2}],
}


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 2, 7, 5, dtype=torch.float64)


def grids() -> list[dc.ProcessGrid]:
    size = dc.ProcessGrid(sample=-1).size
    return [dc.ProcessGrid(**axes) for axes in GRIDS[size]]


def close(actual: Any, expected: Any) -> None:
    whole = actual.full_tensor() if isinstance(actual, dc.DistTensor) else actual
    torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parallel([1, 2, 4])
def test_a_function_in_a_network_gives_the_serial_gradients() -> None:
    for grid in grids():
        serial, model = Net(), dc.parallelize(Net(), grid)
        x = inputs().requires_grad_()
        d = dc.distribute_tensor(inputs(), grid).requires_grad_()
        expected, actual = serial(x), model(d)
        close(actual, expected)
        expected.backward()
        actual.backward()
        close(d.grad, x.grad)
        same_gradients(model, serial)


@pytest.mark.parallel([1, 2, 4])
def test_second_derivatives_run_through_the_backward_of_a_function() -> None:
    def derivatives(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, mean, _ = Scale.apply(x, weight, 3.0)
        z = (Reverse.apply(y, 0.3) ** 2).sum() + (mean**3).sum()
        first = torch.autograd.grad(z, (x, weight), create_graph=True)
        return (*first, *torch.autograd.grad(sum((g**2).sum() for g in first), (x, weight)))

    for grid in grids():
        weight = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        expected = derivatives(inputs().requires_grad_(), weight)
        distributed = dc.distribute_tensor(inputs(), grid).requires_grad_()
        for actual, wanted in zip(derivatives(distributed, weight), expected, strict=True):
            close(actual, wanted)


@pytest.mark.parallel([1, 2])
def test_a_function_may_give_no_gradient() -> None:
    for grid in grids():
        d = dc.distribute_tensor(inputs(), grid).requires_grad_()
        y = Same.apply(d)
        assert y.requires_grad and repr(y).startswith("DistTensor(shape=")
        y.sum().backward()
        assert d.grad is None


@pytest.mark.parallel([1, 2])
def test_a_graph_can_be_used_once_only() -> None:
    d = dc.distribute_tensor(inputs(), grids()[0]).requires_grad_()
    y = Scale.apply(d, torch.ones(2, dtype=torch.float64), 1.0)[0].sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


class Between(torch.autograd.Function):
    """A function in torch's first form, with arguments that it takes by name as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offset: Any = 0.0, factor: Any = 1.0) -> Tensor:
        ctx.save_for_backward(x, factor)
        return (x + offset) * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, factor = ctx.saved_tensors
        return grads[0] * factor, None, (grads[0] * (x + 2.0)).sum()


@pytest.mark.parallel([1, 2])
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="earlier torch takes none by name")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Between.apply(x, factor=x.mean() * 0 + 3.0, offset=2.0),
        lambda x: Between.apply(factor=x.mean() * 0 + 3.0, offset=2.0, x=x),
        lambda x: Reverse.apply(strength=0.3, x=x),
        lambda x: Reverse.apply(x=x),
    ],
)
def test_a_function_takes_arguments_by_name_as_torch_does(make: Any) -> None:
    for grid in grids():
        x, d = inputs().requires_grad_(), dc.distribute_tensor(inputs(), grid).requires_grad_()
        expected, actual = make(x), make(d)
        close(actual, expected)
        (expected**2).sum().backward()
        (actual**2).sum().backward()
        close(d.grad, x.grad)


@pytest.mark.parallel([1, 2])
def test_a_function_takes_no_argument_by_name_behind_one_that_is_left_out() -> None:
    for grid in grids():
        for x in (inputs().requires_grad_(), dc.distribute_tensor(inputs(), grid)):
            with pytest.raises(TypeError):
                Between.apply(x.requires_grad_(), factor=x.mean())


class Boxed(torch.autograd.Function):
    """A function whose backward takes a list of gradients."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, grads: Any) -> Any:  # type: ignore[override]
        assert isinstance(grads, list) and len(grads) == 2
        second = grads.pop()
        return 2 * grads.pop().double() + 3 * second


class Narrow(Boxed):
    """One whose backward takes the gradient of its first output in another type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_output_grad_dtype(torch.float32, None)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, grads: Any) -> Any:
        assert [g.dtype for g in grads] == [torch.float32, torch.float64]
        return Boxed.backward(ctx, grads)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (Boxed, hasattr(torch.autograd.Function, "boxed_grads_call")),
        (Narrow, hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype")),
    ],
)
def test_a_function_says_how_its_backward_takes_gradients(function: Any, wanted: bool) -> None:
    if not wanted:
        pytest.skip("this torch has no such functions")
    for grid in grids():
        x, d = inputs().requires_grad_(), dc.distribute_tensor(inputs(), grid).requires_grad_()
        for y in (x, d):
            first, second = function.apply(y)
            (first.sum() + (second**2).sum()).backward()
        close(d.grad, x.grad)


class Dirty(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Plain(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ones(2)


class Deeper(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.aten.relu(x)


class Short(Scale):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


@pytest.mark.parallel([1, 2])
def test_what_cannot_be_exact_is_refused() -> None:
    for grid in grids():
        d = dc.distribute_tensor(inputs(), grid).requires_grad_() * 1
        with pytest.raises(dc.UnsupportedOperation, match=r"Dirty.apply: it writes to its inputs"):
            Dirty.apply(d)
        with pytest.raises(
            dc.UnsupportedOperation, match="Plain.apply: it computes a plain tensor"
        ):
            Plain.apply(d)
        with pytest.raises(dc.UnsupportedOperation, match="there is no rule"):
            Deeper.apply(d)


@pytest.mark.parallel([1, 2])
def test_a_backward_with_too_few_gradients_is_an_error() -> None:
    for grid in grids():
        d = dc.distribute_tensor(inputs(), grid).requires_grad_()
        y = Short.apply(d, torch.ones(2, dtype=torch.float64), 1.0)[0]
        with pytest.raises(RuntimeError, match=r"returned 1 gradients; expected 3"):
            y.sum().backward()


class _Assigned(torch.autograd.Function):
    """As torchdiffeq's solvers do, write a value into memory that is then returned."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, value: Tensor, index: int) -> Tensor:
        ctx.index = index
        scratch.data[..., index] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0][..., ctx.index], None


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axis", ["height", "sample"])
def test_memory_that_differs_between_ranks_before_it_is_written_takes_values(axis: str) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    values = torch.arange(60.0, dtype=torch.float64).view(3, 2, 5, 2).sin()

    def stages(x: Tensor) -> Tensor:
        k = torch.full((*x.shape, 3), float(grid.rank), dtype=x.dtype)
        for i in range(3):
            before = (k[..., :i] * torch.arange(i, dtype=x.dtype)).sum(-1) if i else 0
            k = _Assigned.apply(k, (x + before).sin() * (i + 1), i)
        steps = torch.full((2, *x.shape), float(grid.rank), dtype=x.dtype)
        steps[0], steps[1] = x, k.sum(-1)
        kept = torch.full(tuple(x.shape), float(grid.rank), dtype=x.dtype)
        with torch.no_grad():
            kept.copy_(x)
        return (steps * kept).square().mean()

    gradients = []
    for x in (values.clone(), dc.distribute_tensor(values, grid)):
        stages(x.requires_grad_()).backward()
        gradients.append(x.grad)
    assert deviation(gradients[1], gradients[0]) < 1e-12
