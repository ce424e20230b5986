"""Deep levels of the network, cut by channels."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from examples.fractals.network import UNet
from examples.fractals.score import fractal_loss

WORLD = MPI.COMM_WORLD
LABELS = dc.Layout.of(((), ("depth",), ("height",), ("width",)))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_deep_levels_that_are_cut_by_channels_train_as_the_serial_network(recompute: bool) -> None:
    torch.manual_seed(0)
    serial = UNet(3, 5, 8).double()
    model = UNet(3, 5, 8, recompute=recompute).double()
    model.load_state_dict(serial.state_dict())
    layouts = model.channel_layouts(2)
    grid = dc.ProcessGrid(depth=2, height=WORLD.size // 2)
    dc.parallelize(model, grid, layouts=layouts, shard_parameters=True)
    x, labels = torch.randn(1, 3, 16, 16, 16).double(), torch.randint(3, (1, 16, 16, 16))
    cut = [dc.distribute_tensor(x, grid), dc.distribute_tensor(labels, grid, LABELS)]
    optimizers = [torch.optim.Adam(m.parameters()) for m in (serial, model)]
    for _ in range(2):
        fractal_loss(serial(x), labels, torch.ones(3)).backward()
        fractal_loss(model(cut[0]), cut[1], torch.ones(3)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dc.full_state_dict(model), serial.state_dict())
    kept = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, dc.DistTensor))
    assert kept > 0.9 * sum(p.numel() for p in serial.parameters()) / 2
