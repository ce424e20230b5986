"""Training on GPUs gives the numbers of serial torch, and by NCCL lets no host wait."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.gpu.steps import RANKS, batch, net, only_with_cuda, step
from tests.support.serial import deviation

pytestmark = pytest.mark.gpu


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
def test_steps_are_those_of_serial_torch_on_the_cpu(grid: dc.ProcessGrid, method: str) -> None:
    serial = net().double()
    model = dc.parallelize(copy.deepcopy(serial), grid, bucket_bytes=1024)
    assert all(p.device == grid.device for p in model.parameters())
    twins = [(m, torch.optim.SGD(m.parameters(), 0.1, 0.9)) for m in (serial, model)]
    x, y = batch()
    with dc.method(method):
        cut = [dc.distribute_tensor(t, grid) for t in (x, y)]
        for _ in range(3):
            expected, loss = step(*twins[0], x, y), step(*twins[1], *cut)
            assert abs(loss.item() - expected.item()) < 1e-10 * expected.item()
    for (name, mine), theirs in zip(
        model.state_dict().items(), serial.state_dict().values(), strict=True
    ):
        assert deviation(mine, theirs) < 1e-9, name


@pytest.mark.parallel(RANKS)
def test_kept_gradients_keep_their_values(grid: dc.ProcessGrid) -> None:
    model = dc.parallelize(net().double(), grid)
    x, y = (dc.distribute_tensor(t, grid) for t in batch())
    kept: list[tuple[Tensor, Tensor]] = []
    for i in range(3):
        model.zero_grad()
        F.mse_loss(model(x * (i + 1)), y).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(gradients) == len(list(model.parameters()))
        kept += [(g[..., :1], g[..., :1].clone()) for g in gradients]
    assert all(torch.equal(view, values) for view, values in kept)


@pytest.mark.parallel([2, 4])
def test_gradients_share_memory_that_zero_grad_frees(grid: dc.ProcessGrid) -> None:
    model = dc.parallelize(nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3)), grid)
    x = dc.distribute_tensor(torch.randn(1, 64, 16, 16), grid)
    model(x).sum().backward()
    addresses = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert max(addresses) - min(addresses) < size
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    assert addresses == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    memory = torch.get_device_module(grid.device)
    before = memory.memory_allocated()
    model.zero_grad()
    assert before - memory.memory_allocated() >= size


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_channels_last_train(grid: dc.ProcessGrid, dtype: torch.dtype) -> None:
    serial = net().to(grid.device)
    model = dc.parallelize(copy.deepcopy(serial).to(memory_format=torch.channels_last), grid)
    x, y = batch(torch.float32)
    cut = [
        dc.distribute_tensor(t.contiguous(memory_format=torch.channels_last), grid) for t in (x, y)
    ]
    with torch.autocast(grid.device.type, dtype):
        expected = F.mse_loss(serial(x.to(grid.device)), y.to(grid.device))
        loss = F.mse_loss(model(cut[0]), cut[1])
    expected.backward()
    loss.backward()
    tolerance = 32 * torch.finfo(dtype).eps
    assert abs(loss.item() - expected.item()) < tolerance * expected.item()
    for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert mine.grad.dtype == theirs.grad.dtype and mine.grad.isfinite().all()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise within the block where torch lets the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@only_with_cuda
@pytest.mark.parallel(RANKS)
def test_no_step_lets_the_host_wait(grid: dc.ProcessGrid) -> None:
    if grid.transport.name == "mpi":
        pytest.skip("MPI makes the host wait")
    model = dc.parallelize(net(), grid)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = (dc.distribute_tensor(t, grid) for t in batch(torch.float32))
    for _ in range(17):  # what is made once may be waited for
        step(model, optimizer, x, y)
    with waiting_is_an_error():
        step(model, optimizer, x, y)


@only_with_cuda
@pytest.mark.parallel([1])
def test_a_wait_would_be_noticed() -> None:
    # Under torch 2.11 with Python 3.12 the error of a wait loses its text on the way.
    with waiting_is_an_error(), pytest.raises((RuntimeError, SystemError)):
        torch.ones(1, device="cuda").item()


@pytest.mark.parallel(RANKS)
def test_random_numbers_do_not_depend_on_the_grid(grid: dc.ProcessGrid) -> None:
    def drawn() -> Tensor:
        torch.manual_seed(3)
        x = dc.distribute_tensor(torch.ones(1, 2, 8, 8), grid)
        return F.dropout(x).full_tensor()

    first = drawn()
    assert torch.equal(first, drawn()) and 0 < first.eq(0).sum() < first.numel()
    everywhere = grid.comm.allgather(first.cpu())
    assert all(torch.equal(one, everywhere[0]) for one in everywhere)


MOVES: dict[str, Callable[[Tensor, dc.ProcessGrid], dc.DistTensor]] = {
    "distribute_tensor": dc.distribute_tensor,
    "from_local": lambda x, grid: dc.DistTensor.from_local(x, grid, dc.Layout()),
}


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", MOVES)
def test_tensors_of_the_cpu_move_and_get_their_gradients_there(
    grid: dc.ProcessGrid, name: str
) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).requires_grad_()
    grid.comm.Bcast(x.detach().numpy())
    d = MOVES[name](x, grid)
    assert d.device == grid.device
    (d * d).sum().backward()
    assert x.grad is not None and x.grad.device.type == "cpu"
    assert deviation(x.grad, 2 * x.detach()) < 1e-12
    for move in (lambda: d.to("cpu"), lambda: d.type("torch.DoubleTensor"), d.cpu):
        with pytest.raises(dc.UnsupportedOperation, match="are on its devices"):
            move()
