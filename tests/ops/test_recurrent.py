"""Recurrent layers equal serial ones: mini-batches cut, sequences cut, fewer samples than ranks."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import distconv as dc
from tests.support.serial import agrees, examples, random_grid, random_tensor, refused

LAYERS = {
    "LSTM": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True),
    "LSTM of projections": lambda: nn.LSTM(4, 3, proj_size=2),
    "GRU": lambda: nn.GRU(4, 3, bias=False),
    "RNN": lambda: nn.RNN(4, 3, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_equal_serial_ones(name: str) -> None:
    rng = random.Random(1)
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    keys, weights = zip(*layer.named_parameters(), strict=True)

    def function(x: Tensor, *weights: Tensor) -> list[Tensor]:
        output, ends = functional_call(layer, dict(zip(keys, weights, strict=True)), (x,))
        return [output, *([ends] if isinstance(ends, Tensor) else ends)]

    for _ in examples(4):
        x = random_tensor(rng, (rng.randrange(1, 5), rng.randrange(1, 5), 4))
        agrees(function, [x], [w.detach() for w in weights], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 3])
def test_a_state_that_is_given_is_cut_like_the_samples() -> None:
    rng = random.Random(2)
    cell = nn.GRU(4, 3).double().requires_grad_(False)
    x, begun = random_tensor(rng, (5, 3, 4)), random_tensor(rng, (1, 3, 3))
    agrees(lambda x, h: list(cell(x, h)), [x, begun], [], random_grid(rng), rng)
    agrees(lambda x, h: list(cell(x, h)), [x], [begun], random_grid(rng), rng)


@pytest.mark.parallel([2])
def test_dropout_between_layers_is_refused() -> None:
    layer = nn.LSTM(4, 3, num_layers=2, dropout=0.5)
    rng = random.Random(3)
    refused(lambda x: layer(x), [torch.ones(5, 3, 4)], [], dc.ProcessGrid(width=2), rng)
