"""DistTensors and DTensors convert to each other, with their gradients, as grids and meshes do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_dtensor

import distconv as dc
from tests.support.serial import raised_everywhere, random_grid, random_layout

WORLD = MPI.COMM_WORLD
RANKS = [1, 2, 3, 4]


@pytest.mark.parallel(RANKS)
def test_a_grid_has_its_ranks_and_axes_as_a_mesh() -> None:
    rng = random.Random(0)
    for _ in range(4):
        grid = random_grid(rng)
        mesh = grid.device_mesh
        extents = {axis: n for axis, n in grid.shape.items() if n > 1} or {"sample": 1}
        assert dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)) == extents
        assert tuple(mesh.mesh.flatten().tolist()) == grid.ranks
        assert grid.device_mesh is mesh
        assert dc.ProcessGrid.from_device_mesh(mesh) == grid


@pytest.mark.parallel([4])
def test_the_dimensions_of_a_mesh_may_come_in_any_order_and_by_other_names() -> None:
    dc.ProcessGrid(height=-1).device_mesh  # noqa: B018  there has to be a default group
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("width", "dp"))
    grid = dc.ProcessGrid.from_device_mesh(mesh, {"dp": "sample"})
    assert grid.ranks == (0, 2, 1, 3) and grid.shape["sample"] == grid.shape["width"] == 2
    x = torch.arange(48.0).reshape(2, 3, 8)
    d = distribute_dtensor(x, mesh, [Shard(2), Shard(0)])
    cut = dc.DistTensor.from_dtensor(d, grid, {"dp": "sample"})
    assert cut.grid_layout == dc.Layout(sample="sample", width="width")
    assert torch.equal(cut.full_tensor(), x)
    with pytest.raises(ValueError, match="name each after a different axis of sample, channel"):
        dc.ProcessGrid.from_device_mesh(mesh)
    error = raised_everywhere(
        ValueError, dc.DistTensor.from_dtensor, d, dc.ProcessGrid(height=-1), {"dp": "sample"}
    )
    assert "the mesh has the ranks [0, 2, 1, 3]" in error


@pytest.mark.parallel([2])
def test_ranks_that_torch_would_sort_are_refused() -> None:
    backwards = tuple(range(WORLD.size))[::-1]
    grid = dc.ProcessGrid(backwards, height=-1)
    assert "do not ascend" in raised_everywhere(ValueError, lambda: grid.device_mesh)
    dc.ProcessGrid(height=-1).device_mesh  # noqa: B018  there has to be a default group
    mesh = DeviceMesh("cpu", torch.tensor(backwards), mesh_dim_names=("height",))
    assert "do not ascend" in raised_everywhere(ValueError, dc.ProcessGrid.from_device_mesh, mesh)


@pytest.mark.parallel([2, 4])
def test_a_grid_of_some_ranks_has_no_mesh() -> None:
    half = WORLD.size // 2
    members = range(half) if WORLD.rank < half else range(half, WORLD.size)
    grid = dc.ProcessGrid(members, height=-1)
    with pytest.raises(ValueError, match=f"the grid has {half} of {WORLD.size} ranks"):
        grid.device_mesh  # noqa: B018


@pytest.mark.parallel([2, 4])
def test_tensors_of_any_layout_become_dtensors_and_come_back_with_their_gradients() -> None:
    rng = random.Random(1)
    for _ in range(12):
        grid = random_grid(rng)
        # Sizes that the ranks divide, others, and fewer elements than ranks.
        shape = tuple(rng.choice([1, 3, 4, 5, 8]) for _ in range(4))
        layout = random_layout(rng, grid, shape)
        x = torch.randn(shape, dtype=torch.float64)
        weight = torch.randn(shape, dtype=torch.float64)
        cut = dc.distribute_tensor(x, grid, layout).requires_grad_()
        d = cut.to_dtensor()
        assert d.shape == x.shape and torch.equal(d.full_tensor(), x)
        w = distribute_dtensor(weight, d.device_mesh, d.placements)
        (d * d * w).sum().full_tensor().backward()
        torch.testing.assert_close(cut.grad.full_tensor(), 2 * x * weight)

        leaf = d.detach().requires_grad_()
        back = dc.DistTensor.from_dtensor(leaf, grid)
        # The axes of a dimension come in the order of the mesh.
        assert [set(cuts) for cuts in back.cuts] == [set(cuts) for cuts in cut.cuts]
        assert torch.equal(back.full_tensor(), x)
        (back * back * dc.distribute_tensor(weight, grid, layout)).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * x * weight)


@pytest.mark.parallel([1, 2, 3])
def test_a_loss_of_a_piece_of_a_dtensor_says_that_it_is_a_summand() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.arange(2.0 * 6 * 5).reshape(1, 2, 6, 5)
    cut = dc.distribute_tensor(x, grid).requires_grad_()
    if grid.size > 1:
        for start in (
            lambda: (cut * 2).to_dtensor().to_local().square().mean().backward(),
            lambda: torch.autograd.grad(cut.to_dtensor().exp().to_local().sum(), cut),
        ):
            assert "DTensor.to_local() of" in raised_everywhere(RuntimeError, start)
    d = (cut * 2).to_dtensor()
    d.to_local(grad_placements=d.placements).square().sum().backward()
    torch.testing.assert_close(cut.grad.full_tensor(), 8 * x)
    cut.grad = None
    d = cut.to_dtensor()
    again = DTensor.from_local(d.to_local() * 2, d.device_mesh, d.placements)
    again.full_tensor().square().sum().backward()
    torch.testing.assert_close(cut.grad.full_tensor(), 8 * x)
    cut.grad = None
    piece = (cut * 2).to_dtensor().to_local()
    dc.DistTensor.from_local(piece, grid, cut.grid_layout).square().sum().backward()
    torch.testing.assert_close(cut.grad.full_tensor(), 8 * x)


@pytest.mark.parallel([2, 4])
def test_what_torch_cuts_alike_is_not_copied() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.rand(1, 2, 2 * grid.size, 3), grid)
    d = x.to_dtensor()
    assert d.placements == (Shard(2),)
    assert d.to_local().data_ptr() == x.to_local().data_ptr()


@pytest.mark.parallel([2, 3])
def test_partial_sums_are_added_up_on_the_way() -> None:
    mesh = dc.ProcessGrid(height=-1).device_mesh
    parts = torch.full((2, 3), 1.0 + WORLD.rank)
    d = DTensor.from_local(parts, mesh, [Partial()])
    x = dc.DistTensor.from_dtensor(d)
    assert x.grid_layout == dc.Layout()
    assert x.full_tensor().eq(WORLD.size * (WORLD.size + 1) / 2).all()
    replicated = dc.DistTensor.from_dtensor(distribute_dtensor(parts[:1] * 0, mesh, [Replicate()]))
    assert torch.equal(replicated.full_tensor(), torch.zeros(1, 3))


@pytest.mark.parallel([2, 4])
def test_torch_s_checkpoints_save_and_load_sharded_parameters(folder: Path) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(channel=-1)
    layers = [nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1)]
    model = dc.parallelize(nn.Sequential(*layers), grid, shard_parameters=True)
    expected = {name: p.clone() for name, p in dc.full_state_dict(model).items()}

    def state() -> dict[str, torch.Tensor]:
        """Return sharded parameters as DTensors, the others as they are."""
        return {
            name: p.detach().to_dtensor() if isinstance(p, dc.DistTensor) else p.detach()
            for name, p in model.named_parameters()
        }

    saved = state()
    assert any(isinstance(value, DTensor) for value in saved.values())
    checkpoint.save(saved, checkpoint_id=folder / "checkpoint")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    found = state()
    checkpoint.load(found, checkpoint_id=folder / "checkpoint")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if isinstance(p, dc.DistTensor):
                p.copy_(dc.DistTensor.from_dtensor(found[name], grid).redistribute(p.grid_layout))
    for name, value in dc.full_state_dict(model).items():
        assert torch.equal(value, expected[name])
