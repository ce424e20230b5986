"""Parameters meet planes of fewer rows than ranks, so that some ranks have empty blocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, random_tensor

CHANNELS = ((4,),)
WITH_PARAMETERS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "slopes of channels": (F.prelu, CHANNELS),
    "one slope": (F.prelu, ((1,),)),
    "a factor of channels": (lambda x, w: x * w.view(-1, 1, 1), CHANNELS),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), CHANNELS * 2),
    "instance norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), CHANNELS * 2),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), CHANNELS * 2),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), ((5,), (5,))),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), ((6, 4, 3, 3), (6,))),
    "pointwise convolution": (F.conv2d, ((6, 4, 1, 1), (6,))),
    "grouped convolution": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), ((4, 1, 3, 3),)),
    "transposed convolution": (F.conv_transpose2d, ((4, 6, 2, 2), (6,))),
    "a fully connected layer": (F.linear, ((3, 5), (3,))),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_parameters_on_planes_of_few_rows_equal_serial(name: str, rows: int) -> None:
    rng = random.Random(name)
    function, shapes = WITH_PARAMETERS[name]
    x, parameters = random_tensor(rng, (2, 4, rows, 5)), [random_tensor(rng, s) for s in shapes]
    layout = dc.Layout(height="height")
    agrees(function, [x], parameters, dc.ProcessGrid(height=-1), rng, [layout])
