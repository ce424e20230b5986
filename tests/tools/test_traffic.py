"""Traffic is counted in full, by layer, as the transport sends it and as `explain` foretells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.ops.math.test_fourier import FNO2d
from tests.support.arriving import arriving
from tests.support.verdicts import one_verdict


class Calls(nn.Module):
    """A function between two convolutions, as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.LazyConv2d(2, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def _attended(x: Tensor) -> Tensor:
    rows = x.flatten(2).transpose(1, 2).unsqueeze(1)
    return F.scaled_dot_product_attention(rows, rows, rows).squeeze(1).mT.unflatten(2, x.shape[2:])


def _recurred(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    cell = nn.GRU(4, 4, batch_first=True, device=x.device).requires_grad_(False)
    return cell(x.permute(0, 2, 3, 1).flatten(0, 1))[0].unflatten(0, (x.shape[0], -1)).movedim(3, 1)


FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: x.relu() + 1,
    "pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": F.instance_norm,
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "mean": lambda x: x - x.mean((2, 3), keepdim=True),
    "maximum": lambda x: x * x.amax(2, keepdim=True),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"),
    "roll": lambda x: x.roll((1, -2), (2, 3)),
    "slices": lambda x: torch.cat([x[:, :, 3:], x[:, :, :3]], 2),
    "transpose": lambda x: x.mT.contiguous(),
    "flip": lambda x: x.flip(2),
    "sort": lambda x: x.sort(2).values,
    "cumsum": lambda x: x.cumsum(2),
    "softmax": lambda x: x.softmax(2),
    "matmul": lambda x: x @ x.mT @ x,
    "einsum": lambda x: torch.einsum("bchw,bchv->bcwv", x, x),
    "linear": lambda x: F.linear(x, torch.ones(x.shape[3], x.shape[3], device=x.device)),
    "attention": _attended,
    "transforms": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[2:]),
    "modes": lambda x: torch.fft.rfft2(x)[..., :1, :2].abs().mean((2, 3), keepdim=True) * x,
    "reshape": lambda x: x.flatten(1).reshape(x.shape[0], 4, x.shape[3], x.shape[2]),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 3, padding=1).unflatten(2, x.shape[2:]),
    "recurrence": _recurred,
    "rows by index": lambda x: x.index_select(2, torch.tensor([5, 0, 3], device=x.device)),
}


def _network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    if name == "FNO":
        return FNO2d(modes=2, layers=2), (2, 3, 24, 24)
    network, shape = Calls(FAMILIES[name]), (4, 2, 8, 12)
    network(torch.ones(shape))
    network.zero_grad()
    return network, shape


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", [*FAMILIES, "FNO"])
def test_each_layer_receives_what_explain_says_and_nothing_is_missed(name: str) -> None:
    grid = dc.ProcessGrid(height=2, width=-1)
    network, shape = _network(name)
    plan = dc.explain(network, shape, grid, rank=grid.rank, show=False)
    module = dc.parallelize(network, grid)
    x = dc.distribute_tensor(torch.ones(shape), grid)
    for _ in range(17):  # the first calls compare plain tensors and parameters
        with dc.count_traffic() as traffic:
            with arriving(grid) as forward:
                loss = F.mse_loss(y := module(x), torch.zeros_like(y))
            with arriving(grid) as backward:
                loss.backward()
    counted, told = Counter[str](), Counter[str]()
    for entry in traffic.entries:
        if entry.operator != "torch.nn.functional.mse_loss":
            counted[f"{entry.phase} of {entry.layer or type(network).__name__}"] += entry.bytes
    for layer in plan.layers:
        told[f"forward of {layer.name}"] += layer.forward_bytes
        told[f"backward of {layer.name}"] += layer.backward_bytes
    told["backward of gradients"] = plan.gradient_bytes or 0
    with one_verdict():
        assert traffic.forward == sum(forward)
        assert traffic.backward == sum(backward)
        assert plan.refusal is None
        if name not in UNLIKE:
            assert +told == +counted, (told, counted, list(map(str, traffic.entries)))
    assert grid.comm.allgather(sum(forward) + sum(backward)) != [0] * grid.size


UNLIKE = {"recurrence", "rows by index"}
"""Families with other rows than `explain` prints.

The module of a recurrence is not part of the network, so its backward pass has its own name. Ranks
agree on kept rows by 16 bytes, which dry runs do not send.
"""


@pytest.mark.parallel([2])
def test_backward_traffic_has_the_layers_of_the_forward_pass() -> None:
    grid = dc.ProcessGrid(height=2)
    network = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 5, padding=2))
    plan = dc.explain(network, (1, 2, 8, 8), grid, rank=grid.rank, show=False)
    module = dc.parallelize(network, grid)
    x = dc.distribute_tensor(torch.ones(1, 2, 8, 8), grid)
    module(x).sum().backward()
    with dc.count_traffic() as traffic:
        module(x).sum().backward()
    by_layer = {e.layer: e.bytes for e in traffic.entries if e.phase == "backward"}
    # Only the second layer's input needs a gradient: halos of two rows of two channels of eight.
    halos = 2 * 2 * 8 * 4
    assert by_layer["2"] == halos == plan.layers[2].backward_bytes
    assert plan.layers[0].backward_bytes == 0 and "0" not in by_layer
    assert by_layer["gradients"] == plan.gradient_bytes
    assert "gradients" in str(traffic) and "backward" in str(plan)
