"""Arguments of unusual types and sizes are taken, or refused on all ranks, as by serial torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import agrees, random_tensor, refused

TWO = np.int64(2)
ONE = torch.tensor(1)
HUGE = 2**63 - 1
KERNEL = random_tensor(random.Random(9), (4, 4, 3, 3))

ACCEPTED: dict[str, Callable[..., Any]] = {
    "numpy integers as padding": lambda x: F.conv2d(x, KERNEL, padding=TWO),
    "numpy integers as stride": lambda x: F.conv_transpose2d(x, KERNEL, stride=TWO),
    "a tensor as dilation": lambda x: F.conv2d(x, KERNEL, dilation=ONE),
    "numpy integers as kernel and stride": lambda x: F.max_pool2d(x, TWO, TWO),
    "a tensor as kernel": lambda x: F.avg_pool2d(x, ONE),
    "numpy integers as divisor": lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=TWO),
    "numpy integers as dimension": lambda x: x.sum(TWO),
    "a tensor as dimension": lambda x: x.mean(ONE),
    "numpy integers in a tuple": lambda x: x.amax((np.int64(-1), TWO)),
    "numpy integers to softmax": lambda x: x.softmax(np.int64(-2)),
    "numpy integers to sort": lambda x: tuple(x.sort(TWO)),
    "numpy integers to split along": lambda x: x.split(3, TWO),
    "numpy integers to roll": lambda x: x.roll(TWO, np.int64(2)),
    "numpy integers to repeat": lambda x: x.repeat(1, TWO, 1, 1),
    "a tensor to repeat": lambda x: x.repeat(1, 1, ONE, 1),
    "a tuple as positions": lambda x: x[:, (0, 2)] + x[..., (0, 2), :, :],
    "strides beyond any plane": lambda x: F.conv2d(x, KERNEL, stride=HUGE),
}

TABLE = random_tensor(random.Random(8), (4, 3))
LABELS = torch.arange(16).reshape(2, 8) % 4

LOOKED_UP: dict[str, Callable[..., Any]] = {
    "rows": lambda index, table: table[index],
    "class weights": lambda index, table: table[:, 1][index],
    "one of the columns": lambda index, table: table[index, 1],
    "one-hot vectors": lambda index, table: torch.eye(4, dtype=table.dtype)[index] @ table,
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", LOOKED_UP)
@pytest.mark.parametrize("d", [0, 1])
def test_a_plain_table_is_looked_up_by_a_cut_index(name: str, d: int) -> None:
    grid, layout = dc.ProcessGrid(height=-1), dc.Layout.of((("height",) * (1 - d), ("height",) * d))
    agrees(LOOKED_UP[name], [LABELS], [TABLE], grid, random.Random(name), [layout])


@pytest.mark.parallel([1, 2])
def test_no_grid_and_no_tensor_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="grid=None is not a ProcessGrid"):
        dc.DistTensor.from_local(TABLE, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="grid=None is not a ProcessGrid"):
        dc.distribute_tensor(TABLE, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="grid=None is not a ProcessGrid"):
        dc.parallelize(torch.nn.Linear(2, 2), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="local is a list"):
        dc.DistTensor.from_local([1.0], dc.ProcessGrid(height=-1))  # type: ignore[arg-type]


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_torch_takes_for_whole_numbers_gives_what_it_gives(name: str) -> None:
    rng = random.Random(name)
    x, grid = random_tensor(rng, (2, 4, 8, 6)), dc.ProcessGrid(height=-1)
    agrees(ACCEPTED[name], [x], [], grid, rng, [dc.Layout(height="height")])


@pytest.mark.parallel([2])
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_windows_without_end_are_refused_not_computed_one_by_one(pool: Callable[..., Any]) -> None:
    x, layout = torch.ones(1, 1, 8, 6), dc.Layout(height="height")
    refused(lambda x: pool(x, 2**15), [x], [], dc.ProcessGrid(height=2), random.Random(0), [layout])


@pytest.mark.parallel([1, 2])
def test_a_correction_that_is_no_number_is_refused() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 1, 8, 6), grid)
    with pytest.raises(dc.UnsupportedOperation, match="correction=nan"):
        x.var(correction=float("nan"))


@pytest.mark.parallel([1, 2])
def test_a_tensor_in_place_of_a_number_is_refused_with_the_way_out() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 4, 8, 6), grid)
    with pytest.raises(TypeError, match=r"group_norm.*pass \.item\(\)"):
        F.group_norm(x, torch.tensor(2))


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("shape", ["84", (8.0, 4), (8, "4"), (8, None)])
def test_the_box_of_what_is_no_shape_is_refused(shape: Any) -> None:
    with pytest.raises(TypeError, match="is not a whole number"):
        dc.local_box(shape, dc.ProcessGrid(sample=-1))


@pytest.mark.parallel([1, 2])
def test_the_box_of_a_negative_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="negative size"):
        dc.local_box((8, -4), dc.ProcessGrid(sample=-1))


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("pair", [False, True])
def test_a_stride_that_is_a_tensor_is_read_in_every_call(pair: bool) -> None:
    x = dc.distribute_tensor(torch.ones(1, 4, 8, 8, dtype=KERNEL.dtype), dc.ProcessGrid(height=-1))
    stride = torch.tensor(2)
    for n in (2, 1):
        stride.fill_(n)
        y = F.conv2d(x, KERNEL, stride=[stride, stride] if pair else stride)
        assert y.shape[2:] == (6 // n, 6 // n)


EMPTY = {
    "no filters": lambda x: F.conv2d(x, torch.ones(0, 4, 3, 3)),
    "no kernel": lambda x: F.conv2d(x, torch.ones(2, 4, 0, 3)),
    "no filters of groups": lambda x: F.conv2d(x, torch.ones(0, 1, 3, 3), groups=4),
    "no transposed filters": lambda x: F.conv_transpose2d(x, torch.ones(4, 0, 3, 3)),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", EMPTY)
def test_weights_without_elements_are_refused_before_any_message(name: str) -> None:
    with pytest.raises(RuntimeError):
        EMPTY[name](torch.ones(1, 4, 8, 8))
    x, rng, grid = torch.ones(1, 4, 8, 8), random.Random(0), dc.ProcessGrid(height=-1)
    refused(EMPTY[name], [x], [], grid, rng, [dc.Layout(height="height")], RuntimeError)


@pytest.mark.parallel([1, 2])
def test_an_input_without_channels_is_convolved_as_by_serial_torch() -> None:
    x, weight, bias = torch.ones(1, 0, 8, 8), torch.ones(2, 0, 3, 3), torch.arange(2.0)
    cut = dc.distribute_tensor(x, dc.ProcessGrid(height=-1))
    assert F.conv2d(cut, weight, bias).shape == F.conv2d(x, weight, bias).shape


def classes(*shape: int) -> torch.Tensor:
    """Return numbers of which the last one is out of the range of the tests below."""
    numbers = torch.zeros(shape, dtype=torch.long)
    numbers.view(-1)[-1] = 7
    return numbers


OUT_OF_RANGE: dict[str, Callable[[dc.ProcessGrid], Any]] = {
    "cross_entropy": lambda grid: F.cross_entropy(
        dc.distribute_tensor(torch.ones(4, 3, 2), grid), classes(4, 2), reduction="none"
    ),
    "nll_loss": lambda grid: F.nll_loss(
        dc.distribute_tensor(torch.ones(4, 3), grid), classes(4), reduction="none"
    ),
    "embedding": lambda grid: F.embedding(
        dc.distribute_tensor(classes(4, 2), grid), torch.ones(3, 2)
    ),
    "one_hot": lambda grid: F.one_hot(dc.distribute_tensor(classes(4, 2), grid), 3),
    "index_select": lambda grid: torch.ones(3, 2).index_select(
        0, dc.distribute_tensor(classes(4), grid)
    ),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_the_rank_that_meets_a_number_out_of_range_names_it(name: str) -> None:
    grid = dc.ProcessGrid(sample=-1)
    raised = ""
    try:
        OUT_OF_RANGE[name](grid)
    except (IndexError, RuntimeError) as error:
        raised = str(error)
    assert raised or grid.rank < grid.size - 1
    assert not raised or (name in raised and "7 is out of range" in raised and "0 to 2" in raised)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("x, weight", [((5,), (2, 1, 3)), ((1, 2, 5), (3,)), ((2, 5), ())])
@pytest.mark.parametrize("function", [F.conv1d, F.conv_transpose1d])
def test_tensors_of_too_few_dimensions_are_refused(x: Any, weight: Any, function: Any) -> None:
    block, kernel = torch.ones(x), torch.ones(weight)
    with pytest.raises(RuntimeError):
        function(block, kernel)
    with pytest.raises(RuntimeError, match="dimension|tensor"):
        function(dc.distribute_tensor(block, dc.ProcessGrid(height=-1), dc.Layout()), kernel)
