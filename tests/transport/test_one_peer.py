"""Two messages of one rank to another are matched by order: NCCL ignores tags.

The only other rank of a circular convolution on two ranks is the neighbour on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from distconv.device.streams import SideStream
from distconv.grid import communicators
from distconv.transport.nccl import NCCLTransport
from distconv.transport.torch import TorchStreamTransport
from tests.support.nccl import ProcessGroup, replace_cupy
from tests.support.serial import agrees
from tests.support.streams import replace_streams

CPU = torch.device("cpu")
CARRIERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda comm: TorchStreamTransport(
        comm, torch.distributed.HashStore(), CPU, timedelta(seconds=60), SideStream(CPU)
    ),
    "nccl": lambda comm: NCCLTransport(comm, CPU, SideStream(CPU)),
}


def circular(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve with a row from above and one from below, around the edge of the plane."""
    return F.conv2d(F.pad(x, (0, 0, 1, 1), mode="circular"), weight)


def agrees_around_the_edge(grid: dc.ProcessGrid, method: str) -> None:
    """Compare output and gradients with serial torch; no two rows are alike."""
    x = torch.arange(2 * 3 * 11 * 5, dtype=torch.float64).view(2, 3, 11, 5).div(100).sin()
    weight = torch.arange(4 * 3 * 3 * 1, dtype=torch.float64).view(4, 3, 3, 1).cos()
    with dc.method(method):
        agrees(circular, [x], [weight], grid, random.Random(0), [dc.Layout(height="height")])


@pytest.fixture(params=CARRIERS)
def grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dc.ProcessGrid:
    """Make a grid whose messages a stand-in for NCCL carries."""
    replace_streams(monkeypatch)
    replace_cupy(monkeypatch)
    monkeypatch.setattr("distconv.transport.torch.make_group", ProcessGroup)
    made = communicators._store()
    monkeypatch.setattr(made, "carriers", {})
    monkeypatch.setattr(made, "transports", {})
    monkeypatch.setattr(made, "closing", object())
    monkeypatch.setattr(communicators, "_connected", lambda comm, *_: CARRIERS[request.param](comm))
    return dc.ProcessGrid(height=2, transport="mpi")


@pytest.mark.parallel([2])
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
def test_halos_from_one_peer_on_both_sides_keep_their_sides(
    grid: dc.ProcessGrid, method: str
) -> None:
    agrees_around_the_edge(grid, method)


def matched_by_order(grid: dc.ProcessGrid) -> None:
    """Compare two messages of equal sizes each way, sent in one order and received in both."""
    peer, carrier = 1 - grid.rank, grid.transport
    for places in ((0, 1), (1, 0)):
        leaving = [torch.full((3,), 10.0 * grid.rank + i, device=grid.device) for i in range(2)]
        arriving = [carrier.empty((3,), leaving[0]) for _ in range(2)]
        messages = [[(peer, arriving[i]) for i in places], [(peer, x) for x in leaving]]
        carrier.exchange(*messages, carrier.next_tag()).wait()
        assert [x[0].item() for x in arriving] == [10.0 * peer + i for i in places]


@pytest.mark.parallel([2])
def test_two_messages_to_one_peer_are_matched_by_their_order(grid: dc.ProcessGrid) -> None:
    matched_by_order(grid)


@pytest.mark.gpu
@pytest.mark.parallel([2])
@pytest.mark.parametrize("transport", ["torch", "nccl", "mpi"])
def test_carriers_keep_sides_and_order(transport: str) -> None:
    try:
        grid = dc.ProcessGrid(height=2, transport=transport)
    except ValueError as error:
        pytest.skip(str(error))
    matched_by_order(grid)
    for method in ("overlapped", "assembled"):
        agrees_around_the_edge(grid, method)
