"""Blocks, halos and mesh names, as kernels written for LBANN's package use them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.lbann import (
    DCTensor,
    DistConvDDP,
    ParallelStrategy,
    backward_halo_exchange,
    forward_halo_exchange,
)
from tests.support.serial import raised_everywhere, same_gradients

WORLD = MPI.COMM_WORLD
close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("in_double")

STRATEGIES: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    1: [((1,), (2,))],
    2: [((2,), (2,)), ((1, 2), (2, 3))],
    3: [((3,), (3,))],
    4: [((4,), (2,)), ((2, 2), (2, 3)), ((2, 2), (3, 2)), ((2,), (3,))],
}


def strategy(shards: Any = 2, dims: Any = 2) -> ParallelStrategy:
    return ParallelStrategy(shards, dims, "cpu")


def samples(ps: ParallelStrategy, *shape: int) -> Tensor:
    """Return the samples of this rank's replica."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(ps.ddp_ind))


def box(ps: ParallelStrategy, whole: Tensor) -> tuple[slice, ...]:
    return dc.local_box(whole.shape, ps.grid, ps.layout(whole.dim())).slices


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("strategy_of", STRATEGIES[min(WORLD.size, 4)])
@pytest.mark.parametrize("halo", [0, 1, 3])
@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("size", [3, 9])
def test_blocks_get_the_halos_of_the_padded_tensor_and_give_gradients_back(
    strategy_of: tuple[tuple[int, ...], tuple[int, ...]], halo: int, periodic: bool, size: int
) -> None:
    ps = strategy(*strategy_of)
    whole = samples(ps, 2, 3, size, size + 1).requires_grad_()
    own = box(ps, whole)
    block = whole.detach()[own].clone().requires_grad_()
    found = block
    if size < max(ps.num_shards):
        message = raised_everywhere(ValueError, lambda: forward_halo_exchange(found, halo, ps))
        assert "an empty block has no halo" in message
        return
    pads, wider = [0] * 4, list(own)
    for i, dim in enumerate(ps.shard_dim):
        found = forward_halo_exchange(found, halo, ps, i, is_periodic=periodic)
        pads[2 * (3 - dim)] = pads[2 * (3 - dim) + 1] = halo
        wider[dim] = slice(own[dim].start, own[dim].stop + 2 * halo)
    padded = F.pad(whole, pads, mode="circular" if periodic else "constant")
    upstream = samples(ps, *padded.shape)  # each rank has a loss of its part
    (back,) = torch.autograd.grad((found * upstream[tuple(wider)]).sum(), block)
    everyones = torch.zeros_like(padded)
    for replica, parts, gradient in WORLD.allgather(
        (ps.ddp_ind, tuple(wider), upstream[tuple(wider)])
    ):
        if replica == ps.ddp_ind:
            everyones[parts] += gradient
    (expected,) = torch.autograd.grad(padded, whole, everyones)
    close(found, padded[tuple(wider)], rtol=0, atol=0)
    close(back, expected[own])
    folded = upstream[tuple(wider)]
    for i in reversed(range(len(ps.shard_dim))):
        folded = backward_halo_exchange(folded, halo, ps, i, is_periodic=periodic)
    close(folded, back)


class Kernel(nn.Module):
    """A convolution of a program's own, which exchanges halos and computes on the block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DCTensor):
            return self.conv(x)
        ps = x._parallel_strategy
        block = x._tensor
        for i in range(len(ps.shard_dim)):
            block = forward_halo_exchange(block, 1, ps, i)
        padding = [0 if dim in ps.shard_dim else 1 for dim in (2, 3)]
        return DCTensor(F.conv2d(block, self.conv.weight, self.conv.bias, padding=padding), ps)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("strategy_of", STRATEGIES[min(WORLD.size, 4)])
def test_a_kernel_on_blocks_trains_as_serial_replicas(
    strategy_of: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    ps = strategy(*strategy_of)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Kernel(), nn.Tanh())
    plain = copy.deepcopy(net)
    whole = samples(ps, 2, 3, 9, 7).requires_grad_()
    block = whole.detach()[box(ps, whole)].clone().requires_grad_()
    x = DCTensor(block, parallel_strategy=ps)
    assert isinstance(x, DCTensor) and x.shape == whole.shape and x._parallel_strategy is ps
    y = DistConvDDP(net, parallel_strategy=ps)(x)
    y.square().mean().backward()
    for replica in range(ps.ddp_ranks):
        every = WORLD.bcast(whole.detach(), replica * ps.total_num_shards).requires_grad_()
        result = plain(every)
        (result.square().mean() / ps.ddp_ranks).backward()
        if replica == ps.ddp_ind:
            close(y._tensor, result[box(ps, result)])
            close(x.grad.to_replicate(), every.grad * ps.ddp_ranks)
            close(block.grad, every.grad[box(ps, every)] * ps.ddp_ranks)
    same_gradients(net, plain)


@pytest.mark.parallel([2, 4])
def test_a_block_shares_memory_and_passes_no_gradient_of_a_plain_loss() -> None:
    ps = strategy(WORLD.size)
    x = DCTensor(torch.zeros(1, 1, 8, 2), ps)
    x._tensor.fill_(1.0)
    assert x.shape == (1, 1, 8 * WORLD.size, 2) and x.mean().item() == 1.0
    y = DCTensor(torch.ones(1, 1, 8, 2, requires_grad=True), ps)

    def loss_of_the_block() -> None:
        y._tensor.mean().backward()

    assert "to_local" in raised_everywhere(RuntimeError, loss_of_the_block)


@pytest.mark.parallel([2, 4])
def test_mesh_dimensions_have_the_names_of_other_versions() -> None:
    ps = strategy(2)
    for name in ("dc0", "dc", "dc2"):
        group = ps.device_mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == list(ps.grid.ranks)
        assert ps.device_mesh.get_local_rank(name) == ps.shard_ind[0]
        assert ps.device_mesh[name] == ps.device_mesh["dc0"]
        assert ps.device_mesh["ddp", name] == ps.device_mesh["ddp", "dc0"]
    ps.shard_dim = 3
    assert ps.device_mesh["dc3"] == ps.device_mesh["dc0"]
    halves = strategy((1, 2), (3, 2))
    assert halves.device_mesh["dc3", "dc2"] == halves.device_mesh["dc0", "dc1"]
    assert halves.device_mesh.get_local_rank("dc2") == halves.shard_ind[1]
    thirds = strategy((1, 1, 2), (2, 3, 4))
    assert thirds.device_mesh.get_local_rank("dc2") == thirds.shard_ind[2]
    for mesh, unknown in ((ps, "dc2"), (halves, "dc"), (thirds, "dc3"), (thirds, "dc")):
        with pytest.raises(KeyError, match=unknown):
            mesh.device_mesh[unknown]


@pytest.mark.parallel([2, 4])
def test_misuse_of_halo_exchanges_raises_on_every_rank() -> None:
    ps = strategy(WORLD.size)
    x = torch.ones(1, 1, 4, 2)
    for error, message, call in (
        (TypeError, "already distributed", lambda: forward_halo_exchange(DCTensor(x, ps), 1, ps)),
        (TypeError, "not a ParallelStrategy", lambda: forward_halo_exchange(x, 1, ps.grid)),  # type: ignore[arg-type]
        (ValueError, "is_periodic by name", lambda: forward_halo_exchange(x, 1, ps, True)),
        (ValueError, "dim_index=1;", lambda: backward_halo_exchange(x, 1, ps, 1)),
        (ValueError, "expected 0 or more", lambda: forward_halo_exchange(x, -1, ps)),
        (ValueError, "block", lambda: forward_halo_exchange(x[..., WORLD.rank % 2 :], 1, ps)),
        (RuntimeError, "wrap around", lambda: forward_halo_exchange(x, 40, ps, 0, True)),
    ):
        assert message in raised_everywhere(error, call)
    close(forward_halo_exchange(x, 1, ps).shape, (1, 1, 6, 2))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("exchange", [forward_halo_exchange, backward_halo_exchange])
def test_arguments_of_halo_exchanges_that_differ_between_ranks_raise_on_every_rank(
    exchange: Callable[..., Tensor],
) -> None:
    ps, last = strategy(WORLD.size), WORLD.rank == WORLD.size - 1
    x = torch.ones(1, 1, 8, 2)
    for name, usual, other in (
        ("halo_size", 1, 2),
        ("halo_size", 2, 0),
        ("halo_size", 1, -1),
        ("dim_index", 0, 1),
        ("is_periodic", False, True),
    ):
        given: dict[str, Any] = dict(halo_size=1) | {name: other if last else usual}
        message = raised_everywhere(
            ValueError, lambda given=given: exchange(x, parallel_strategy=ps, **given)
        )
        assert f"{name} is {usual} on rank" in message and f"and {other} on rank" in message
    assert exchange(x, 1, ps).shape[2] in (6, 10)
