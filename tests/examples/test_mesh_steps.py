"""Five steps of the mesh-tangling networks end where the serial steps end, on grids of 4 ranks."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from examples.mesh_tangling.network import NETWORKS
from tests.support.serial import deviation, random_tensor

CASES = [
    ("1k", {"sample": 2, "height": 2}),
    ("1k", {"height": 4}),
    ("2k", {"height": 2, "width": 2}),
]


@pytest.mark.parallel([4])
@pytest.mark.parametrize(("name", "extents"), CASES)
def test_five_steps_equal_serial(name: str, extents: dict[str, int]) -> None:
    rng = random.Random(name)
    torch.manual_seed(0)
    serial = NETWORKS[name](0.06, 64).double()
    grid = dc.ProcessGrid(**extents)
    model = dc.parallelize(copy.deepcopy(serial), grid)
    # Thirty batch norms amplify rounding: at a rate of 0.1, reversing the samples of the serial
    # mini-batches moves the parameters by 1e-3 in five steps.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.003) for m in (serial, model)]
    for _ in range(5):
        x = random_tensor(rng, (4, 18, 64, 64))
        y = (random_tensor(rng, (4, 1, 64, 64)) > 1).double()
        F.mse_loss(serial(x), y).backward()
        F.mse_loss(model(dc.distribute_tensor(x, grid)), dc.distribute_tensor(y, grid)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = serial.state_dict()
    for key, tensor in model.state_dict().items():
        assert deviation(tensor, state[key]) <= 1e-9, key
