"""Tools of torch that change gradients themselves are refused on and in parallelized modules."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distconv as dc
from tests.support.serial import raised_everywhere

WORLD = MPI.COMM_WORLD


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Make torch's own process group of the ranks."""
    path = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    store = dist.FileStore(str(Path(path) / "store"), WORLD.size)
    dist.init_process_group("gloo", store=store, rank=WORLD.rank, world_size=WORLD.size)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))


def batch(grid: dc.ProcessGrid) -> Tensor:
    return dc.distribute_tensor(torch.ones(2 * grid.size, 3, 8, 8), grid)


def sharded(module: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD.size,))
    return fully_shard(module, mesh=mesh)


def flattened(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


WRAPPERS = [
    pytest.param(DistributedDataParallel, "DistributedDataParallel", id="DDP"),
    pytest.param(nn.DataParallel, "DataParallel", id="DataParallel"),
    pytest.param(flattened, "FullyShardedDataParallel", id="FSDP"),
]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(
    ("wrap", "name"), [*WRAPPERS, pytest.param(sharded, "FSDPModule", id="fully_shard")]
)
@pytest.mark.parametrize("part", [False, True])
def test_a_wrapped_module_is_not_parallelized(wrap: Callable, name: str, part: bool) -> None:
    module = nn.Sequential(nn.ReLU(), wrap(net())) if part else wrap(net())
    message = raised_everywhere(
        TypeError, lambda: dc.parallelize(module, dc.ProcessGrid(sample=-1))
    )
    assert f"is wrapped by {name}" in message and "parallelize(module, grid) with the" in message
    assert ("the part 1 is" if part else "the module is") in message


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(("wrap", "name"), WRAPPERS)
@pytest.mark.parametrize("part", [False, True])
def test_a_parallelized_module_is_not_wrapped(wrap: Callable, name: str, part: bool) -> None:
    module = dc.parallelize(net(), dc.ProcessGrid(sample=-1))
    whole = nn.Sequential(module, nn.ReLU()) if part else module
    message = raised_everywhere(TypeError, lambda: wrap(whole))
    assert f"{name} wraps a parallelized module" in message
    assert "unwrapped module" in message


@pytest.mark.parallel([2])
def test_replicate_is_refused_on_and_within_parallelized_modules() -> None:
    grid = dc.ProcessGrid(sample=-1)
    message = raised_everywhere(TypeError, lambda: dc.parallelize(replicate(net()), grid))
    assert "the module is wrapped by DDP" in message
    for called in (False, True):
        module = dc.parallelize(net(), grid)
        if called:
            module(batch(grid))
        replicate(module)
        message = raised_everywhere(TypeError, lambda module=module: module(batch(grid)))
        assert "unwrapped module" in message


@pytest.mark.parallel([2])
def test_a_parallelized_module_is_refused_before_torch_asks_for_a_process_group() -> None:
    module = dc.parallelize(net(), dc.ProcessGrid(sample=-1))
    ask = "torch.nn.parallel.distributed._get_default_group"
    with mock.patch(ask, side_effect=ValueError):
        message = raised_everywhere(TypeError, lambda: DistributedDataParallel(module=module))
        assert "wraps a parallelized module" in message
        with pytest.raises(ValueError):
            DistributedDataParallel(net())


@pytest.mark.parallel([2, 3])
def test_plain_modules_are_wrapped_as_ever() -> None:
    dc.parallelize(net(), dc.ProcessGrid(sample=-1))
    for wrap in (DistributedDataParallel, nn.DataParallel):
        assert wrap(net())(torch.ones(1, 3, 8, 8)).shape == (1, 2, 6, 6)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("part", [False, True])
def test_fully_shard_refuses_a_parallelized_module(part: bool) -> None:
    grid = dc.ProcessGrid(sample=-1)
    module = dc.parallelize(net(), grid)
    whole = nn.Sequential(module, nn.ReLU()) if part else module
    message = raised_everywhere(TypeError, lambda: sharded(whole))
    assert "fully_shard is called with" in message and 'shard="zero3"' in message
    module(batch(grid)).sum().backward()
    sharded(net())


@pytest.mark.parallel([2, 3])
def test_the_inside_of_a_wrapper_says_so_when_the_wrapper_is_called() -> None:
    grid = dc.ProcessGrid(sample=-1)
    outside = DistributedDataParallel(net())
    dc.parallelize(outside.module, grid)
    message = raised_everywhere(TypeError, lambda: outside(batch(grid)))
    assert "called by DistributedDataParallel" in message


@pytest.mark.parallel([1, 2])
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_old_backward_hooks_of_modules_are_refused() -> None:
    grid = dc.ProcessGrid(sample=-1)
    module = dc.parallelize(net(), grid)
    handle = module[0].register_backward_hook(lambda *_: None)
    message = raised_everywhere(dc.UnsupportedOperation, lambda: module(batch(grid)))
    assert "register_backward_hook" in message and "calls register_hook on the module" in message
    handle.remove()
    seen = []
    module[0].register_forward_hook(lambda m, i, y: y.register_hook(seen.append) and None)
    module(batch(grid)).sum().backward()
    assert [tuple(g.shape) for g in seen] == [(2 * grid.size, 4, 8, 8)]
