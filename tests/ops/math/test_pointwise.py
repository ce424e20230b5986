"""Element-wise functions: edges, refusals and writes to plain tensors; see also test_coverage."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import agrees, deviation, raises_alike, random_grid, random_tensor


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "module",
    [
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.ELU(inplace=True),
        nn.SELU(inplace=True),
        nn.SiLU(inplace=True),
        nn.Mish(inplace=True),
        nn.Hardswish(inplace=True),
        nn.Hardsigmoid(inplace=True),
        nn.ReLU6(True),
        nn.Hardtanh(-0.5, 0.5, True),
        nn.Threshold(0.1, 2.0, True),
        nn.PReLU(3).double(),
    ],
    ids=str,
)
def test_activations_that_write_in_place_equal_serial(module: nn.Module) -> None:
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
        with pytest.raises(dc.UnsupportedOperation, match="out= must be"):
            torch.exp(x, out=wrong)


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
            assert y.grid_layout == (
                dc.Layout(sample="height") if shape[:-1] == (4,) else dc.Layout()
            )
            assert torch.equal(y.full_tensor(), torch.full(shape, value, dtype=y.dtype))
