"""Modules with complex parameters train as the serial ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import deviation


class Spectral(nn.Module):
    """A layer of products in Fourier space beside complex convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product = nn.Parameter(torch.randn(2, 4, 4, 3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.complex128))
        self.conv = nn.Conv2d(2, 4, 3, padding=1, dtype=torch.complex128)
        self.real = nn.Conv2d(4, 2, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft2(x)[:, :, :4, :3]
        y = torch.einsum("bixy,ioxy->boxy", modes, self.product) + self.shift
        z = self.conv(torch.complex(x, x.sin()))
        return self.real(torch.fft.irfft2(y, s=(9, 7)) + z.real * z.imag)


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "axes, options",
    [
        ({"sample": -1}, {}),
        ({"height": -1}, {"bucket_bytes": 64}),
        ({"width": -1}, {"wire": "bfloat16"}),
        ({"channel": -1}, {"shard_parameters": True}),
    ],
)
def test_complex_parameters_train_as_in_serial(axes: Any, options: Any) -> None:
    grid = dc.ProcessGrid(**axes)
    serial, model = Spectral(), dc.parallelize(Spectral(), grid, **options)
    exact = "wire" not in options
    for m in (serial, model):
        optimizer = torch.optim.Adam(m.parameters(), 0.01 if exact else 1e-5)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            # Fewer samples than ranks at the end.
            x = torch.randn((4, 4, 1)[seed], 2, 9, 7, dtype=torch.float64, generator=generator)
            for part in x.chunk(2):
                y = m(part if m is serial else dc.distribute_tensor(part, grid))
                y.square().mean().backward()
            dc.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    state, expected = dc.full_state_dict(model), serial.state_dict()
    for name, wanted in expected.items():
        assert deviation(state[name], wanted) < (1e-8 if exact else 1e-4), name
