"""Modules of torch.nn equal the serial ones: recurrent layers, attention, padding modes."""

from __future__ import annotations

import random
from typing import Any

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


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_partitioned_sequence_moves_to_the_samples_and_back(kind: Any) -> None:
    grid = dc.ProcessGrid(width=-1)
    n = grid.size
    layer = kind(12, 12, batch_first=True).double().requires_grad_(False)
    x = random_tensor(random.Random(5), (12, 12, 12))
    for layout in (dc.Layout(channel="width"), dc.Layout(width="width")):
        agrees(lambda x: layer(x)[0], [x], [], grid, random.Random(6), [layout])
        shared = dc.distribute_tensor(x, grid, layout)
        dc.redistributions(reset=True)
        output, _ = layer(shared)
        moved = sum(entry.bytes for entry in dc.redistributions(reset=True))
        assert output.grid_layout == layout
        assert moved == 2 * x.nbytes * (n - 1) // n**2


class ReNet(nn.Module):
    """Sequences along the rows of images, and along the columns of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(4, 3, batch_first=True, bidirectional=True)
        self.columns = nn.LSTM(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        y, end = self.rows(x.permute(0, 2, 3, 1).reshape(n * h, w, -1))
        y = y.reshape(n, h, w, -1) + end.sum(0).reshape(n, h, 1, -1).repeat(1, 1, 1, 2)
        y, _ = self.columns(y.permute(1, 0, 2, 3).reshape(h, n * w, -1))
        return y.reshape(h, n, w, -1).permute(1, 3, 0, 2)


@pytest.mark.parallel([1, 2, 3, 4])
def test_rows_and_columns_of_images_are_sequences() -> None:
    rng = random.Random(8)
    torch.manual_seed(0)
    network = ReNet().double()
    keys, weights = zip(*network.named_parameters(), strict=True)

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(network, dict(zip(keys, weights, strict=True)), (x,))

    for _ in examples(8):
        x = random_tensor(rng, (rng.randrange(1, 4), 4, rng.randrange(1, 7), rng.randrange(1, 7)))
        agrees(function, [x], [w.detach() for w in weights], random_grid(rng), rng)


@pytest.mark.parallel([4])
def test_rows_and_columns_of_partitioned_images_stay_partitioned() -> None:
    grid = dc.ProcessGrid(height=2, width=2)
    torch.manual_seed(0)
    network = dc.parallelize(ReNet(), grid)
    plain = torch.ones(2, 4, 16, 16)
    x = dc.distribute_tensor(plain, grid)
    for _ in range(17):  # the first calls compare parameters
        with dc.count_traffic() as traffic:
            y = network(x)
    assert y.grid_layout == x.grid_layout
    assert max(grid.comm.allgather(traffic.forward)) < plain.nbytes


CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_cells_equal_serial_ones(name: str, given: bool) -> None:
    rng = random.Random(4)
    torch.manual_seed(0)
    cell = CELLS[name](4, 3).double()
    keys, weights = zip(*cell.named_parameters(), strict=True)
    x, state = random_tensor(rng, (5, 4)), random_tensor(rng, (5, 3))

    def function(x: Tensor, h: Tensor, *weights: Tensor) -> list[Tensor]:
        begun = ((h, h.sin()) if name == "LSTM" else h) if given else None
        values = dict(zip(keys, weights, strict=True))
        first = functional_call(cell, values, (x, begun))
        second = functional_call(cell, values, (x, first))
        return [*second, h.cos()] if name == "LSTM" else [second, h.cos()]

    agrees(function, [x, state], [w.detach() for w in weights], random_grid(rng), rng)


@pytest.mark.parallel([2])
def test_dropout_between_layers_is_refused() -> None:
    layer = nn.LSTM(4, 3, num_layers=2, dropout=0.5)
    rng = random.Random(3)
    refused(lambda x: layer(x), [torch.ones(5, 3, 4)], [], dc.ProcessGrid(width=2), rng)


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "samples first": {"batch_first": True},
    "keys of other features": {"kdim": 6, "vdim": 6},
    "an additional key": {"add_bias_kv": True, "add_zero_attn": True},
    "without bias": {"bias": False, "batch_first": True},
}


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_multi_head_attention_equals_serial(name: str, weights: bool) -> None:
    rng = random.Random(name)
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **OPTIONS[name]).double()
    names = [n for n, _ in module.named_parameters()]
    first = OPTIONS[name].get("batch_first", False)
    query = random_tensor(rng, (3, 5, 8) if first else (5, 3, 8))
    features = OPTIONS[name].get("kdim", 8)
    key = random_tensor(rng, (3, 4, features) if first else (4, 3, features))
    padding = torch.tensor([[False, True, False, False]] * 3)
    mask = random_tensor(rng, (5, 4)) > 1

    def function(q: Tensor, k: Tensor, *parameters: Tensor) -> Any:
        state = dict(zip(names, parameters, strict=True))
        options = {"need_weights": weights, "attn_mask": mask, "key_padding_mask": padding}
        result = functional_call(module, state, (q, k, k), options)
        return tuple(r for r in result if r is not None)

    parameters = [p.detach() for p in module.parameters()]
    for _ in range(3):
        agrees(function, [query, key], parameters, random_grid(rng), rng)


@pytest.mark.gpu
@pytest.mark.parallel([2])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_padding_modes_of_convolution_modules(mode: str, n: int) -> None:
    rng = random.Random(7 * n)
    for _ in range(2):
        grid = random_grid(rng)
        make = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[n]
        conv = make(
            2,
            3,
            rng.choice([2, 3, 4]),
            padding=rng.choice([1, 2, "same"]),
            dilation=rng.choice([1, 2]),
            padding_mode=mode,
        ).double()
        shape = (2, 2, *(rng.randrange(4, 11) for _ in range(n)))
        x = random_tensor(rng, shape)

        def function(x, w, b, conv=conv):
            return functional_call(conv, {"weight": w, "bias": b}, (x,))

        parameters = [random_tensor(rng, p.shape) for p in conv.parameters()]
        agrees(function, [x], parameters, grid, rng)
