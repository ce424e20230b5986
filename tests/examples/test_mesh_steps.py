"""Five steps of the mesh-tangling networks end where the serial steps end, on grids of 4 ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from examples.mesh_tangling.network import NETWORKS
from tests.support.everywhere import from_rank_zero
from tests.support.serial import deviation, random_tensor

CASES = [
    ("1k", {"sample": 2, "height": 2}),
    ("2k", {"height": 2, "width": 2}),
]


def batches(name: str) -> Iterator[tuple[Tensor, Tensor]]:
    rng = random.Random(name)
    for _ in range(5):
        x = random_tensor(rng, (4, 18, 64, 64))
        yield x, (random_tensor(rng, (4, 1, 64, 64)) > 1).double()


def trained(model: nn.Module, samples: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    # Thirty batch norms amplify rounding: at a rate of 0.1, reversing the samples of the serial
    # mini-batches moves the parameters by 1e-3 in five steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    for x, y in samples:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parallel([4])
@pytest.mark.parametrize(("name", "extents"), CASES)
def test_five_steps_equal_serial(name: str, extents: dict[str, int]) -> None:
    torch.manual_seed(0)
    serial = NETWORKS[name](0.06, 64).double()
    grid = dc.ProcessGrid(**extents)
    model = dc.parallelize(copy.deepcopy(serial), grid)
    cut = ((dc.distribute_tensor(t, grid) for t in batch) for batch in batches(name))
    state = trained(model, cut)
    expected = from_rank_zero(lambda: trained(serial, batches(name)))
    for key, tensor in state.items():
        assert deviation(tensor, expected[key]) <= 1e-9, key
