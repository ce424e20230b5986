"""DistTensor: into and out of the distributed world, gradients, metadata, and refusals."""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from tests.support.serial import (
    TOLERANCE,
    deviation,
    noted,
    raised_everywhere,
    random_grid,
    random_layout,
    random_tensor,
    refused,
)

RANKS = [1, 2, 4]
WORLD = MPI.COMM_WORLD


def cases(seed: int, n: int = 12):
    """Yield random grids, tensors and layouts, replicated ones among them."""
    rng = random.Random(seed)
    for i in range(n):
        grid = random_grid(rng)
        shape = [rng.randrange(4, 8) for _ in range(rng.randrange(1, 5))]
        layout = dc.Layout() if i == 0 else random_layout(rng, grid, shape)
        with noted(shape, layout, grid):
            yield rng, grid, random_tensor(rng, shape), layout


def close(actual: Tensor, expected: Tensor) -> bool:
    return deviation(actual, expected) <= TOLERANCE


# Into and out of the distributed world


@pytest.mark.parallel(RANKS)
def test_a_distributed_tensor_does_not_share_memory_with_what_it_was_made_of() -> None:
    for _, grid, x, layout in cases(1, 5):
        before = x.clone()
        d = dc.distribute_tensor(x, grid, layout)
        d.to_local().zero_()
        assert torch.equal(x, before)
        assert not d.full_tensor().any()


@pytest.mark.parallel(RANKS)
def test_a_redistributed_tensor_does_not_share_memory_with_its_source() -> None:
    for rng, grid, x, layout in cases(2, 30):
        d = dc.distribute_tensor(x, grid, layout)
        other = random_layout(rng, grid, x.shape)
        if other != layout:
            d.redistribute(other).add_(1)
            assert torch.equal(d.full_tensor(), x)


@pytest.mark.parallel(RANKS)
def test_without_a_layout_every_dimension_is_cut_over_the_axis_of_its_name() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.zeros(2, 3, 8, 5)
    d = dc.distribute_tensor(x, grid)
    cut = dc.Layout(height="height") if grid.size > 1 else dc.Layout()
    assert d.grid_layout == cut == dc.default_layout(grid, 4)
    assert dc.DistTensor.from_local(d.to_local(), grid).grid_layout == cut
    assert dc.local_box(x.shape, grid) == d.box


@pytest.mark.parallel(2)
def test_a_sample_that_no_axis_cuts_is_warned_of() -> None:
    grid, x = dc.ProcessGrid(depth=2), torch.zeros(2, 3, 8, 5)
    with pytest.warns(UserWarning, match=r"depth=2.* partitions none of .*height, width"):
        assert dc.distribute_tensor(x, grid).to_local().shape == x.shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dc.distribute_tensor(x, grid, dc.Layout())


# Gradients


@pytest.mark.parallel(RANKS)
def test_a_loss_of_the_full_tensor_gives_the_serial_gradient_of_any_leaf() -> None:
    for rng, grid, x, layout in cases(3):
        w = random_tensor(rng, x.shape)
        box = dc.local_box(x.shape, grid, layout)
        plain, local = x.clone().requires_grad_(), x[box.slices].clone().requires_grad_()
        leaf = dc.distribute_tensor(x, grid, layout).requires_grad_()
        for d in (
            dc.distribute_tensor(plain, grid, layout),
            dc.DistTensor.from_local(local, grid, layout),
            leaf,
        ):
            (w * d.full_tensor() ** 2).sum().backward()
        assert close(plain.grad, 2 * w * x)
        assert close(local.grad, (2 * w * x)[box.slices])
        assert leaf.grad.grid_layout == layout
        assert close(leaf.grad.to_local(), (2 * w * x)[box.slices])


@pytest.mark.parallel(RANKS)
def test_losses_of_the_local_blocks_give_the_serial_gradient_also_on_replicas() -> None:
    for rng, grid, x, layout in cases(6):
        w = random_tensor(rng, x.shape)
        d = dc.distribute_tensor(x, grid, layout).requires_grad_()
        (w[d.box.slices] * d.to_local(grad="part") ** 2).sum().backward()
        assert close(d.grad.full_tensor(), 2 * w * x)


@pytest.mark.parallel(RANKS)
def test_second_derivatives_go_into_the_distributed_world_and_back() -> None:
    for rng, grid, x, layout in cases(8):
        v, w = random_tensor(rng, x.shape), random_tensor(rng, x.shape)
        box = dc.local_box(x.shape, grid, layout)
        x.requires_grad_()
        loss = (w * (dc.distribute_tensor(x, grid, layout) ** 3).full_tensor()).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (product,) = torch.autograd.grad((v * gradient).sum(), x)
        assert close(product, 6 * v * w * x.detach())

        local = x.detach()[box.slices].requires_grad_()
        inside = dc.DistTensor.from_local(local, grid, layout) ** 3
        loss = (w[box.slices] * inside.to_local(grad="part")).sum()
        (gradient,) = torch.autograd.grad(loss, local, create_graph=True)
        (product,) = torch.autograd.grad((v[box.slices] * gradient).sum(), local)
        assert close(product, (6 * v * w * x.detach())[box.slices])


@pytest.mark.parallel(RANKS)
def test_a_leaf_that_stops_and_starts_requiring_gradients_gets_them_once() -> None:
    for _, grid, x, layout in cases(9, 4):
        d = dc.distribute_tensor(x, grid, layout).requires_grad_()
        assert d.requires_grad
        d.requires_grad_(False)
        assert not d.requires_grad
        d.requires_grad = True
        (d * d).sum().backward()
        assert close(d.grad.full_tensor(), 2 * x)


@pytest.mark.parallel(RANKS)
def test_backward_takes_its_gradient_distributed_or_plain() -> None:
    for rng, grid, x, layout in cases(10):
        w = random_tensor(rng, x.shape)
        for gradient in (w, dc.distribute_tensor(w, grid, random_layout(rng, grid, x.shape))):
            d = dc.distribute_tensor(x, grid, layout).requires_grad_()
            (d * d).backward(gradient)
            assert close(d.grad.full_tensor(), 2 * w * x)


@pytest.mark.parallel(RANKS)
def test_backward_without_a_gradient_is_for_one_element_only() -> None:
    for _, grid, x, layout in cases(11, 4):
        d = dc.distribute_tensor(x, grid, layout).requires_grad_()
        (d * d).sum().backward()
        assert close(d.grad.full_tensor(), 2 * x)
        assert "only for scalar outputs" in raised_everywhere(RuntimeError, (d * d).backward)
        wrong = torch.ones(2, *x.shape)
        message = raised_everywhere(RuntimeError, (d * d).backward, wrong)
        assert f"has shape {tuple(wrong.shape)}, expected {tuple(x.shape)}" in message


@pytest.mark.parallel([2])
def test_a_gradient_that_lives_on_another_grid_is_refused() -> None:
    x = torch.arange(16.0).reshape(4, 4)
    d = dc.distribute_tensor(x, dc.ProcessGrid(sample=-1)).requires_grad_()
    turned = WORLD.Split(0, -WORLD.rank)
    elsewhere = dc.distribute_tensor(x, dc.ProcessGrid(turned, sample=-1))
    turned.Free()
    assert "grid" in raised_everywhere(ValueError, (d * d).backward, elsewhere)
    with pytest.raises(ValueError, match="same shape, layout and grid"):
        d.grad = elsewhere


@pytest.mark.parallel(RANKS)
def test_a_graph_that_is_kept_can_be_gone_through_again() -> None:
    for _, grid, x, layout in cases(12, 4):
        d = dc.distribute_tensor(x, grid, layout).requires_grad_()
        loss = (d * d).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert close(d.grad.full_tensor(), 4 * x)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parallel(RANKS)
def test_backward_for_chosen_inputs_leaves_the_others_alone() -> None:
    for _, grid, x, layout in cases(13, 4):
        a = dc.distribute_tensor(x, grid, layout).requires_grad_()
        b = dc.distribute_tensor(x, grid, layout).requires_grad_()
        (a * b).sum().backward(inputs=[b])
        (a * b).sum().backward(inputs=b)
        assert a.grad is None
        assert close(b.grad.full_tensor(), 2 * x)


@pytest.mark.parallel(RANKS)
def test_a_gradient_can_be_set_and_cleared() -> None:
    for _, grid, x, layout in cases(14, 4):
        d = dc.distribute_tensor(x, grid, layout).requires_grad_()
        d.grad = dc.distribute_tensor(3 * x, grid, layout)
        d.sum().backward()
        assert close(d.grad.full_tensor(), 3 * x + 1)
        d.grad = None
        assert d.grad is None
        with pytest.raises(ValueError, match="cannot be set to"):
            d.grad = x
        with pytest.raises(ValueError, match="cannot be set to"):
            d.grad = dc.distribute_tensor(x[:2], grid, dc.Layout())


# Errors, on every rank


@pytest.mark.parallel([3, 4])
def test_a_block_of_the_wrong_shape_is_named_with_what_it_should_be() -> None:
    grid = dc.ProcessGrid(height=-1)
    shape = (2, 3, 3 * grid.size + 1, 5)
    local = torch.zeros(dc.local_box(shape, grid).shape)
    if grid.rank == 1:
        local = local[:, :, :-1]
    message = raised_everywhere(ValueError, dc.DistTensor.from_local, local, grid)
    assert "rank 1 holds (2, 3, 2, 5) and should hold (2, 3, 3, 5)" in message
    assert "rank 0" not in message
    assert f"do not form a tensor of shape {shape} in Layout(height='height')" in message
    assert "distconv.local_box" in message


@pytest.mark.parallel([3, 4])
def test_a_replica_that_differs_in_shape_is_named() -> None:
    grid = dc.ProcessGrid(height=-1)
    local = torch.zeros(4 if grid.rank == 2 else 5)
    message = raised_everywhere(ValueError, dc.DistTensor.from_local, local, grid, dc.Layout())
    assert "rank 2 holds (4,) and should hold (5,)" in message


@pytest.mark.parallel([3, 4])
@pytest.mark.parametrize(
    ("block", "message"),
    [
        (torch.zeros(5).double(), "and torch.float64 on rank 1; pass"),
        (torch.zeros(5).requires_grad_(), "and True on rank 1; pass the same"),
        (torch.zeros(5, 1), "differ in their number of dimensions"),
    ],
)
def test_blocks_of_different_kinds_are_refused_on_every_rank(block: Tensor, message: str) -> None:
    grid = dc.ProcessGrid(width=-1)
    x = block if grid.rank == 1 else torch.zeros(5)
    for make in (dc.DistTensor.from_local, dc.distribute_tensor):
        assert message in raised_everywhere(ValueError, make, x, grid, None)


@pytest.mark.parallel([3, 4])
def test_tensors_of_different_shapes_cannot_be_distributed() -> None:
    grid = dc.ProcessGrid(width=-1)
    x = torch.zeros(5 + (grid.rank == 1))
    message = raised_everywhere(ValueError, dc.distribute_tensor, x, grid)
    assert "distribute_tensor at " in message and "whole tensors" in message
    assert "rank 1 holds (6,) and should hold (5,)" in message


@pytest.mark.parallel([2, 4])
def test_layouts_have_to_be_the_same_on_every_rank() -> None:
    grid = dc.ProcessGrid(width=-1)
    layout = dc.Layout(channel="width") if grid.rank == 1 else dc.Layout(width="width")
    x = torch.zeros(12, 12, 12)
    for make in (dc.DistTensor.from_local, dc.distribute_tensor):
        assert "blocks differ: layout is" in raised_everywhere(ValueError, make, x, grid, layout)


@pytest.mark.parallel([1, 2])
def test_what_is_distributed_already_is_not_distributed_again() -> None:
    grid = dc.ProcessGrid(width=-1)
    d = dc.distribute_tensor(torch.zeros(4), grid)
    message = raised_everywhere(TypeError, dc.distribute_tensor, d, grid)
    assert "use x.redistribute(layout)" in message


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("as_strided", lambda x: x.as_strided((2,), (1,))),
        ("data_ptr", lambda x: x.data_ptr()),
        ("aten.add.Tensor", lambda x: torch.ops.aten.add.Tensor(x, x)),
    ],
)
def test_what_has_no_rule_is_refused_on_every_rank_with_the_way_out(name: str, function) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.zeros(1, 2, 8, 4)
    refused(function, [x], [], grid, random.Random(0), [None], dc.UnsupportedOperation)
    message = raised_everywhere(dc.UnsupportedOperation, function, dc.distribute_tensor(x, grid))
    assert name in message
    assert repr(dc.default_layout(grid, 4)) in message and repr(grid) in message
    assert "full_tensor()" in message


# What it says of itself


@pytest.mark.parallel([1, 2])
def test_a_node_is_as_torch_has_it_but_takes_no_hooks() -> None:
    grid = dc.ProcessGrid(height=-1)
    y = dc.distribute_tensor(torch.ones(2, 2, 4, 3), grid).requires_grad_().sin()
    node, kept = y.grad_fn, y.shard.grad_fn
    assert node == y.grad_fn == kept and hash(node) == hash(kept) and repr(node) == repr(kept)
    assert node.name() == kept.name() and node.next_functions == kept.next_functions
    for register in ("register_hook", "register_prehook"):
        with pytest.raises(dc.UnsupportedOperation, match="this rank's part of the gradients"):
            getattr(node, register)(lambda *_: None)


@pytest.mark.parallel(RANKS)
def test_metadata_is_that_of_the_whole_tensor() -> None:
    for _, grid, x, layout in cases(16, 6):
        d = dc.distribute_tensor(x, grid, layout)
        assert isinstance(d, torch.Tensor) and torch.is_tensor(d)
        assert d.shape == d.size() == x.shape and d.size(-1) == x.size(-1)
        assert d.ndim == d.dim() == d.ndimension() == x.dim()
        assert d.numel() == d.nelement() == torch.numel(d) == x.numel()
        assert len(d) == len(x)
        assert (d.dtype, d.device, d.itemsize, d.nbytes) == (x.dtype, x.device, 8, x.nbytes)
        assert d.is_floating_point() and not d.is_complex() and torch.is_signed(d)
        assert torch.result_type(d, 1) == torch.result_type(torch.tensor(1), d) == x.dtype
        assert torch.result_type(d.long(), 2.5) == torch.float32 and torch.get_device(d) == -1
        assert d.is_leaf and d.grad_fn is None and d.grad is None and not d.requires_grad
        d.requires_grad_()
        assert d.is_leaf and not (2 * d).is_leaf and (2 * d).grad_fn is not None
        assert d.replicas == sum(box == d.box for box in WORLD.allgather(d.box))
        assert d in {d} and hash(d) != hash(d.clone())


@pytest.mark.parallel([1, 2])
def test_a_scalar_has_no_length() -> None:
    d = dc.distribute_tensor(torch.tensor(1.0), dc.ProcessGrid(width=-1))
    with pytest.raises(TypeError, match="len"):
        len(d)


@pytest.mark.parallel(RANKS)
def test_repr_takes_one_rank_and_one_line() -> None:
    grid = dc.ProcessGrid(height=-1)
    d = dc.distribute_tensor(torch.zeros(1, 2, 9, 4), grid).requires_grad_()
    scalar = d.sum()
    if grid.rank == 0:
        assert (
            repr(d)
            == str(d)
            == (
                f"DistTensor(shape=(1, 2, 9, 4), dtype=float32, grid_layout={d.grid_layout}, "
                f"local={tuple(d.shard.shape)} on rank 0 of {grid})"
            )
        )
        assert repr(scalar).startswith("DistTensor(0.0, shape=(), ") and "grad_fn=" in repr(scalar)
        assert "\n" not in repr(d) + repr(scalar)


@pytest.mark.parallel(RANKS)
def test_a_replicated_value_is_handed_to_python() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.arange(12.0).reshape(1, 1, 12, 1)
    total = dc.distribute_tensor(x, grid).sum()
    assert total.item() == float(total) == 66.0 and int(total) == 66
    assert bool(total) and not bool(total - 66)
    assert f"{total:.2f}" == "66.00"
    assert total.tolist() == 66.0 and total.numpy() == 66.0
    one = dc.distribute_tensor(x[:, :, :1], grid, dc.Layout())
    assert one.item() == 0.0 and not one


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("function", [Tensor.item, float, int, bool, Tensor.tolist, Tensor.numpy])
def test_a_cut_value_is_not_handed_to_python(function) -> None:
    grid = dc.ProcessGrid(height=-1)
    d = dc.distribute_tensor(torch.zeros(1, 1, 1, 1), grid)
    message = raised_everywhere(dc.UnsupportedOperation, function, d)
    assert "no rank holds the whole tensor" in message and "x.full_tensor()" in message


# What has been redistributed


@pytest.mark.parallel(RANKS)
def test_redistributions_are_counted_with_the_bytes_this_rank_has_received() -> None:
    grid = dc.ProcessGrid(sample=-1)
    x = torch.arange(12.0 * 12).reshape(12, 12)
    d = dc.distribute_tensor(x, grid)
    dc.redistributions(reset=True)
    for _ in range(3):
        d.redistribute(dc.Layout())
    d.full_tensor()
    d.redistribute(d.grid_layout)
    entries = dc.redistributions()
    if grid.size == 1:
        assert entries == []
        return
    missing = 4 * (x.numel() - d.to_local().numel())
    layouts = d.grid_layout, dc.Layout()
    assert entries == [
        dc.Redistribution("redistribute", *layouts, module="", times=3, bytes=3 * missing),
        dc.Redistribution("full_tensor", *layouts, module="", times=1, bytes=missing),
    ]
    d.full_tensor()
    assert entries[1].times == 1, "what has been read changes"
    assert dc.redistributions(reset=True)[1].times == 2
    assert dc.redistributions() == []


@pytest.mark.parallel([1, 2, 4])
def test_blocks_of_a_known_shape_are_taken_without_a_message(monkeypatch) -> None:
    grid = dc.ProcessGrid(height=-1)
    monkeypatch.setattr(grid.journal, "debug", False)
    whole = torch.arange(2 * 3 * 7 * 4.0).reshape(2, 3, 7, 4)
    mine = whole[dc.local_box(whole.shape, grid).slices]
    with monkeypatch.context() as patch:
        patch.setattr(dc.ProcessGrid, "all_gather_object", lambda *_: pytest.fail("a message"))
        d = dc.DistTensor.from_local(mine, grid, shape=whole.shape)
    assert torch.equal(d.full_tensor(), whole)
    with pytest.raises(
        ValueError, match=rf"rank {grid.rank} holds a block of shape \(1, 1, 1, 1\)"
    ):
        dc.DistTensor.from_local(torch.ones(1, 1, 1, 1), grid, shape=whole.shape)
    with pytest.raises(TypeError, match="is not a whole number"):
        dc.DistTensor.from_local(mine, grid, shape=(2, 3, 7.5, 4))


@pytest.mark.parallel(2)
def test_blocks_of_a_known_shape_are_compared_when_debugging(monkeypatch) -> None:
    grid = dc.ProcessGrid(height=-1)
    monkeypatch.setattr(grid.journal, "debug", True)
    mine = torch.ones(1, 1, 3, 2).to(torch.float32 if grid.rank else torch.float64)
    with pytest.raises(ValueError, match="differ: type is torch.float64"):
        dc.DistTensor.from_local(mine, grid, shape=(1, 1, 6, 2))


class _Listed(torch.nn.Module):
    """A network whose layers are not its own children."""

    def __init__(self) -> None:
        super().__init__()
        block = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Flatten())
        self.blocks = torch.nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks[0](x)
        return y


@pytest.mark.parallel(2)
def test_redistributions_name_the_module_that_was_called() -> None:
    d = dc.distribute_tensor(torch.ones(4, 2, 4), dc.ProcessGrid(width=-1))
    dc.redistributions(reset=True)
    model = dc.parallelize(_Listed(), d.grid)
    d.full_tensor()
    model(d)
    torch.nn.Sequential(model)(d)
    found = [(moved.module, moved.operator) for moved in dc.redistributions(reset=True)]
    assert found == [("", "full_tensor"), ("blocks.0.1", "flatten"), ("0.blocks.0.1", "flatten")]


@pytest.mark.parallel([1, 2, 3])
def test_torch_compares_distributed_tensors_and_says_where_they_differ() -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 3, 7, 5)
    d = dc.distribute_tensor(x, dc.ProcessGrid(height=-1))
    torch.testing.assert_close(d, d.clone())
    torch.testing.assert_close(d, x)
    torch.testing.assert_close(x, d)
    wrong = x.clone()
    wrong[1, 2, 6, 4] += 1
    with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 210(.|\n)*\(1, 2, 6, 4\)"):
        torch.testing.assert_close(d, wrong)


@pytest.mark.parallel([1, 2])
def test_a_distributed_tensor_is_dense_for_torch() -> None:
    d = dc.distribute_tensor(torch.ones(2, 3, 7, 5), dc.ProcessGrid(height=-1))
    assert d.layout is torch.strided
    assert d.grid_layout == dc.default_layout(d.grid, 4) != dc.Layout(width="width")


@pytest.mark.parallel([1, 2, 4])
def test_results_of_one_value_are_saved_as_plain_ones() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.arange(30, dtype=torch.float64).view(1, 2, 3, 5)
    d = dc.distribute_tensor(x, grid).requires_grad_()
    log = {"val": d.mean(), "all": [d.max()]}
    file = io.BytesIO()
    torch.save(log, file)
    file.seek(0)
    for saved in (pickle.loads(pickle.dumps(log)), torch.load(file, weights_only=True)):
        for value, expected in ((saved["val"], x.mean()), (saved["all"][0], x.max())):
            assert type(value) is torch.Tensor and not value.requires_grad
            assert torch.equal(value, expected)
    twin = copy.deepcopy({name: y.detach() for name, y in log.items() if name == "val"})
    assert twin["val"].item() == x.mean()
    if grid.size > 1:
        with pytest.raises(dc.UnsupportedOperation, match=r"Save x\.full_tensor"):
            pickle.dumps(d)


@pytest.mark.parallel([1, 2])
def test_strides_are_those_of_the_whole_tensor() -> None:
    x = torch.ones(2, 1, 3, 5)
    d = dc.distribute_tensor(x, dc.ProcessGrid(height=-1))
    assert d.stride() == x.stride() and d.stride(-2) == d.stride(dim=2) == 5


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    "name", ["zeros", "ones", "empty", "rand", "randn", "full", "zeros_like", "rand_like"]
)
def test_factories_take_the_layout_of_a_distributed_tensor(name: str) -> None:
    x = dc.distribute_tensor(torch.ones(4, 6), dc.ProcessGrid(channel=-1))
    first: Any = x if name.endswith("_like") else (4, 6)
    value = (1.0,) if name == "full" else ()
    made = getattr(torch, name)(first, *value, dtype=x.dtype, layout=x.layout, device=x.device)
    assert made.shape == x.shape and x.new_zeros(2, layout=x.layout).shape == (2,)
