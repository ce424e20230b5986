"""Calls that programs for LBANN's package make around a model, on its names here."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distconv.lbann import DCTensor, DistConvDDP, ParallelStrategy
from tests.support.serial import same_gradients

WORLD = MPI.COMM_WORLD
close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("in_double")


def strategy(shards: int = WORLD.size) -> ParallelStrategy:
    return ParallelStrategy(num_shards=shards, device_type="cpu")


@pytest.mark.parallel([1, 2, 4])
def test_one_strategy_cuts_tensors_of_any_rank_along_one_dimension_after_the_other() -> None:
    ps = strategy()
    for ndim in (1, 2, 3):
        for ps.shard_dim in range(2, 2 + ndim):
            conv = getattr(nn, f"Conv{ndim}d")(2, 3, 5, padding=2)
            plain = copy.deepcopy(conv)
            x = torch.randn(1, 2, *(9,) * ndim, requires_grad=True)
            plain(x).square().mean().backward()
            dcx = DCTensor.distribute(x, ps)
            DistConvDDP(conv, parallel_strategy=ps)(dcx).to_replicate().square().mean().backward()
            same_gradients(conv, plain)
            close(dcx.grad.to_replicate(), x.grad)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("form", [torch.channels_last, torch.channels_last_3d])
def test_distributed_tensors_and_convolutions_have_the_memory_formats_of_serial_torch(
    form: torch.memory_format,
) -> None:
    ps, ndim = strategy(), 2 if form == torch.channels_last else 3
    x = torch.randn(2, 4, *(8,) * ndim).to(memory_format=form)
    conv = getattr(nn, f"Conv{ndim}d")(4, 8, 3, padding=1, padding_mode="circular")
    conv = conv.to(memory_format=form)
    expected = conv(x)
    dcx = DCTensor.distribute(x, ps)
    dcy = DistConvDDP(conv, parallel_strategy=ps)(dcx)
    assert dcx.to_local().is_contiguous(memory_format=form)
    kept = [t.is_contiguous(memory_format=form) for t in (dcy.to_local(), expected)]
    assert kept[0] == kept[1]
    close(dcy.to_replicate(), expected)


@pytest.mark.parallel([1, 2, 4])
def test_a_transposed_convolution_of_a_circular_pad_is_the_serial_one() -> None:
    ps = strategy()
    for ndim, kernel, stride in ((1, 3, 1), (2, 3, 2), (3, 5, 4)):
        ends = kernel // 2
        padding = (kernel + 2 * ends * stride - 1) // 2
        conv = getattr(nn, f"ConvTranspose{ndim}d")(
            *(4, 2, kernel), padding=padding, stride=stride, output_padding=stride - 1
        )
        plain = copy.deepcopy(conv)
        x = torch.randn(1, 4, *(8,) * ndim, requires_grad=True)
        y = plain(F.pad(x, (ends,) * 2 * ndim, mode="circular"))
        y.square().mean().backward()
        model, dcx = DistConvDDP(conv, parallel_strategy=ps), DCTensor.distribute(x, ps)
        dcy = model(F.pad(input=dcx, pad=[ends] * 2 * ndim, mode="circular"))
        close(dcy.to_replicate(), y)
        dcy.to_ddp().square().mean().backward()  # NaN, without a gradient, where a rank has none
        same_gradients(conv, plain)
        close(dcx.grad.to_replicate(), x.grad)


@pytest.mark.parallel([2, 4])
def test_a_module_has_the_gradients_of_torchs_own_wrapper_that_it_has_beside() -> None:
    ps = strategy(2)
    whole = distribute_tensor(
        torch.randn(ps.ddp_ranks, 4, 8, 8), ps.device_mesh, [Shard(0), Replicate()]
    )
    x = whole.to_local().requires_grad_()
    conv = nn.Conv2d(4, 2, 3, padding=1)
    wrapper = DistributedDataParallel(conv)
    wrapper(x).square().mean().backward()
    expected = [p.grad for p in conv.parameters()]
    conv.zero_grad()
    dcx = DCTensor.distribute(x, ps)
    model = DistConvDDP(conv, None, None, parallel_strategy=ps)
    model(dcx).to_ddp().square().mean().backward()
    close([p.grad for p in conv.parameters()], expected)
    close(dcx.grad.to_replicate(), x.grad)


class Recomputed(nn.Module):
    """A U-Net of one level, whose blocks are computed anew in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.inc = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(True))
        self.down = nn.Sequential(nn.MaxPool3d(2), nn.Conv3d(4, 4, 3, padding=1), nn.ReLU(True))
        self.up = nn.ConvTranspose3d(4, 4, 2, 2)
        self.outc = nn.Conv3d(8, 3, 1)

    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.again else block(x)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.block(self.inc, x)
        merged = torch.cat([skip, self.up(self.block(self.down, skip))], dim=1)
        return self.block(self.outc, merged)


@pytest.mark.parallel([1, 2, 4])
def test_recomputed_blocks_and_a_switched_off_scaler_train_as_serial_torch() -> None:
    ps = ParallelStrategy([WORLD.size, 1, 1], [2, 3, 4], "cpu")
    net = Recomputed(again=True)
    plain = Recomputed(again=False)
    plain.load_state_dict(net.state_dict())
    model = DistConvDDP(net.to(memory_format=torch.channels_last_3d), parallel_strategy=ps)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x = torch.randn(1, 3, 8, 8, 8)
    for _ in range(2):
        scaler.scale(model(DCTensor.distribute(x, ps)).square().mean()).backward()
        plain(x).square().mean().backward()
        scaler.unscale_(optimizers[0])
        for m in (model, plain):
            nn.utils.clip_grad_norm_(m.parameters(), max_norm=0.1)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p, q)


@pytest.mark.parallel([1, 2, 4])
def test_the_first_rank_saves_and_prints_alone_and_all_ranks_resume() -> None:
    ps = strategy()
    x = DCTensor.distribute(torch.randn(1, 3, 8, 8), ps)

    def made() -> tuple[DistConvDDP, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2))
        model = DistConvDDP(net, parallel_strategy=ps)
        return model, torch.optim.Adam(model.parameters())

    def step(model: DistConvDDP, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = (model(x) ** 3).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, optimizer = made()
    loss = step(model, optimizer)
    saved: list[bytes] = [b""]
    if dist.get_rank() == 0:
        assert f"{loss.item():.3f}" in f"{loss:.3f} of {loss}, {x.shape}"
        file = io.BytesIO()
        torch.save([model.module.state_dict(), optimizer.state_dict()], file)
        saved = [file.getvalue()]
    dist.broadcast_object_list(saved, src=0)
    states = torch.load(io.BytesIO(saved[0]), weights_only=False)
    resumed, other = made()
    resumed.module.load_state_dict(states[0])
    other.load_state_dict(states[1])
    close(step(resumed, other), step(model, optimizer))
    close(resumed.state_dict(), model.state_dict())


@pytest.mark.parallel([2, 4])
def test_groups_of_a_strategy_may_be_destroyed_and_another_be_made() -> None:
    for _ in range(2):
        ps = strategy(2)
        model = DistConvDDP(nn.Conv2d(3, 2, 3, padding=1), parallel_strategy=ps)
        model(DCTensor.distribute(torch.randn(1, 3, 8, 8), ps)).sum().backward()
        for group in ps.device_mesh.get_all_groups():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


@pytest.mark.parallel([4])
def test_parts_have_their_ranks_and_those_beyond_an_end_are_the_others() -> None:
    ps = ParallelStrategy((2, 2), (2, 3), "cpu")
    assert ps.shard_to_rank(ps.shard_ind) == dist.get_rank()
    assert [ps.shard_to_rank(part) for part in ((1, 0), (-1, 2))] == [2, 2]
    with pytest.raises(ValueError, match="argument"):
        ps.shard_to_rank(1)
    assert strategy(2).shard_to_rank(2) == dist.get_rank() // 2 * 2
