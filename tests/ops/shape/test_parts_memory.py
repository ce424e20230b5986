"""Parts of a tensor need no more memory than in serial torch, also for their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from benchmarks.measuring.memory import peak_of

Parts = Callable[[Tensor], Iterable[Tensor]]


def _step(parts: Parts, serial: bool) -> Callable[[], object]:
    x = torch.ones(1, 4, 64, 64)
    if not serial:
        x = dc.distribute_tensor(x, dc.ProcessGrid(height=-1))
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        sum(part.sin().square().sum() for part in parts(x)).backward()

    return step


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "parts",
    [
        lambda x: x.chunk(4, 1),
        lambda x: x.split([1, 3], 1),
        lambda x: x.unbind(1),
        lambda x: x.permute(0, 2, 3, 1).flatten(0, 2).chunk(4, 1),
    ],
    ids=["chunk", "split", "unbind", "chunk of a merged tensor"],
)
def test_gradients_of_parts_take_a_share_of_the_serial_memory(parts: Parts) -> None:
    serial = peak_of(partial(_step, parts, serial=True)).whole
    most = max(MPI.COMM_WORLD.allgather(peak_of(partial(_step, parts, serial=False)).whole))
    assert most / serial < 1.02 / 2, most / serial


@pytest.mark.parallel([2])
def test_only_unsafe_parts_are_written_in_place_under_autograd() -> None:
    x = dc.distribute_tensor(torch.ones(1, 4, 6, 2), dc.ProcessGrid(height=-1)).requires_grad_()
    for parts in (torch.chunk, torch.unsafe_chunk):
        y = x.clone()
        part = parts(y, 2, 1)[1]
        if parts is torch.chunk:
            with pytest.raises(RuntimeError, match="multiple views"):
                part.mul_(3)
        else:
            part.mul_(3)
            assert y.sum().item() == 96
