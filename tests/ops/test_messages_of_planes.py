"""Halos of planes in float32, whose messages have channels last whatever the blocks have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

import distconv as dc

WEIGHT = torch.arange(36.0).view(2, 2, 3, 3).remainder(7) - 3
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conv2d": lambda x, w: F.conv2d(x, w, padding=1),
    "strided conv2d": lambda x, w: F.conv2d(x, w, stride=2, padding=1),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w, padding=1),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x, w: F.avg_pool2d(x, 4, 2, 1),
}


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_halos_arrive_whatever_the_memory_formats_of_the_ranks(
    name: str, width: int, samples: int
) -> None:
    if MPI.COMM_WORLD.size % width:
        pytest.skip("the width cannot be cut by two")
    call, grid = CALLS[name], dc.ProcessGrid(height=-1, width=width)
    # Sums of these integers are exact.
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-9, 10, (samples, 2, 13, 12), generator=generator).float()
    w = WEIGHT.clone().requires_grad_()
    expected = call(x.requires_grad_(), w)
    dy = torch.randint(-9, 10, expected.shape, generator=generator).float()
    serial = torch.autograd.grad((expected * dy).sum(), [x, w], allow_unused=True)
    for method in ("assembled", "overlapped"):
        for last in (True, grid.rank % 2 == 0, False):
            form = torch.channels_last if last else torch.contiguous_format
            block = x.detach()[dc.local_box(x.shape, grid).slices]
            cut = dc.DistTensor.from_local(block.contiguous(memory_format=form), grid)
            weight = dc.distribute_tensor(w.detach(), grid, dc.Layout()).requires_grad_()
            with dc.method(method):
                made = call(cut.requires_grad_(), weight)
                loss = (made * dc.distribute_tensor(dy, grid)).sum()
                found = torch.autograd.grad(loss, [cut, weight], allow_unused=True)
            assert torch.equal(made.full_tensor(), expected), (method, last)
            for a, b in zip(found, serial, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a.full_tensor(), b), (method, last)
