"""Functions of one's own, given a rule, compute on distributed tensors as on plain ones."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from distconv.tensor.dispatch import RULES
from tests.support.serial import (
    agrees,
    examples,
    noted,
    raised_everywhere,
    random_grid,
    random_layout,
    random_tensor,
    refused,
)

RANKS = [1, 2, 4]
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "extending.md"


@pytest.fixture
def page() -> Any:
    """Yield the names that the examples of the page define; their rules are gone afterwards."""
    before = dict(RULES)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    yield names
    RULES.clear()
    RULES.update(before)


@pytest.mark.parallel(RANKS)
def test_the_element_wise_example_of_the_page(page: dict[str, Any]) -> None:
    rng = random.Random(0)
    for _ in range(8):
        grid = random_grid(rng)
        x, slope = random_tensor(rng, (3, 4, 5, 6)), random_tensor(rng, (4, 1, 1))
        agrees(page["swish"], [x], [slope], grid, rng)
        agrees(page["swish"], [x, slope], [], grid, rng)


@pytest.mark.parallel(RANKS)
def test_the_windowed_example_of_the_page(page: dict[str, Any]) -> None:
    rng = random.Random(1)
    for _ in range(8):
        x = random_tensor(rng, (3, 2, rng.randrange(1, 9), rng.randrange(1, 9)))
        agrees(page["median"], [x], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_the_example_by_hand_of_the_page(page: dict[str, Any]) -> None:
    rng = random.Random(2)
    for _ in range(8):
        grid = random_grid(rng)
        x, y = random_tensor(rng, (11,)), random_tensor(rng, (11,))
        layout = random_layout(rng, grid, (11,))
        agrees(torch.dot, [x, y], [], grid, rng, [layout, layout])


@pytest.mark.parallel(RANKS)
def test_windows_of_any_geometry_that_mix_channels() -> None:
    rng = random.Random(3)
    for _ in examples(20):
        n = rng.choice([1, 2, 3])
        conv = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        geometry = [(rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 3])) for _ in range(n)]
        stride, padding = rng.choice([1, 2, 3]), rng.choice([0, 1, 2])
        kernel, dilation = (tuple(g) for g in zip(*geometry, strict=True))

        @dc.windowed(kernel=kernel, stride=stride, dilation=dilation, padding=padding, channels=3)
        def mix(
            x: Tensor, w: Tensor, conv: Any = conv, s: int = stride, d: Any = dilation
        ) -> Tensor:
            return conv(x, w, stride=s, dilation=d)

        plane = [d * (k - 1) + rng.randrange(1, 8) for k, d in geometry]
        x, w = random_tensor(rng, (2, 2, *plane)), random_tensor(rng, (3, 2, *kernel))
        torch.testing.assert_close(
            mix(x, w), conv(x, w, stride=stride, dilation=dilation, padding=padding)
        )
        with noted(kernel, stride, dilation, padding, plane):
            agrees(mix, [x], [w], random_grid(rng), rng)
            agrees(mix, [x, w], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2])
def test_a_function_that_does_not_keep_to_its_rule_is_told_so() -> None:
    rng = random.Random(4)
    grid = dc.ProcessGrid(height=-1)
    x = random_tensor(rng, (1, 2, 6, 6))
    cut = dc.distribute_tensor(x, grid)
    with pytest.raises(ValueError, match="returned .* but its rule expects"):
        dc.elementwise(lambda t: t.sum())(cut)
    for given in (x, cut):
        with pytest.raises(ValueError, match=r"no_stride: returned .* but its rule expects"):
            dc.windowed(kernel=2, stride=2)(no_stride)(given)
    refused(dc.windowed(kernel=9)(no_stride), [x], [], grid, rng, [None], ValueError)
    refused(dc.windowed(kernel=2)(no_stride), [x[0, 0]], [], grid, rng, [None], ValueError)


def no_stride(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2, 1)


@pytest.mark.parallel([3, 4])
def test_ranks_without_outputs_have_the_same_type_and_graph() -> None:
    x = dc.distribute_tensor(torch.randn(1, 2, 2, 5), dc.ProcessGrid(height=-1)).requires_grad_()
    above = dc.windowed(kernel=1)(lambda t: t > 0)(x)
    assert above.dtype == torch.bool and not above.requires_grad
    assert int(above.sum()) == int((x.detach().full_tensor() > 0).sum())


@pytest.mark.parallel([1, 2])
def test_a_function_is_not_taken_to_write_because_of_its_name() -> None:
    def more_(x: Tensor, inplace: bool = False) -> Tensor:
        return x + 1

    x = torch.arange(8.0).reshape(1, 1, 8, 1)
    d = dc.distribute_tensor(x, dc.ProcessGrid(height=-1))
    for arguments in ({}, {"inplace": True}):
        y = dc.elementwise(more_)(d, **arguments)
        assert torch.equal(y.full_tensor(), x + 1) and torch.equal(d.full_tensor(), x)


@pytest.mark.parallel([1, 2])
def test_impossible_windows_are_refused() -> None:
    for arguments in ({"kernel": 0}, {"kernel": 2, "stride": 0}, {"kernel": 2, "dilation": -1}):
        with pytest.raises(ValueError, match="is too small; choose 1 or more"):
            dc.windowed(**arguments)(no_stride)(torch.zeros(1, 1, 8, 8))


@pytest.mark.parallel([2])
@pytest.mark.parametrize("size", [1, 6])
def test_leaves_that_are_no_arguments_are_refused_unless_a_module_adds_up(size: int) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.rand(1, 2, size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    d = dc.distribute_tensor(x, grid).requires_grad_()
    free = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    layer = nn.PReLU(dtype=torch.float64)
    serial = nn.PReLU(dtype=torch.float64)
    dc.parallelize(layer, grid)
    handed = (d * 2).sum().full_tensor()
    for decorate in (dc.elementwise, dc.windowed(kernel=1)):
        for outside in (free, free.exp(), handed):
            function = decorate(lambda y, t=outside: y * t)
            raised_everywhere(dc.UnsupportedOperation, function, d.sin())
        as_argument = decorate(lambda y, t: y * t)
        as_argument(d, free).square().sum().backward()
        assert free.grad is not None
        assert abs(free.grad.item() / (3 * x.square().sum().item()) - 1) < 1e-12
        free.grad = None
        for module, y in ((layer, d), (serial, x)):
            own = decorate(lambda y, w=module.weight: y * w)
            own(y.sin()).square().mean().backward()
        assert abs(layer.weight.grad.item() / serial.weight.grad.item() - 1) < 1e-12
        layer.weight.grad = serial.weight.grad = None
