"""What means something else than in LBANN's package is exact, or an error on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

from distconv import UnsupportedOperation
from distconv.lbann import DCTensor, DistConvDDP, ParallelStrategy
from tests.support.serial import same_gradients

WORLD = MPI.COMM_WORLD
close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("in_double")


def strategy(
    shards: int | tuple[int, ...] = 2, dims: int | tuple[int, ...] = 2
) -> ParallelStrategy:
    return ParallelStrategy(shards, dims, "cpu")


def samples(ps: ParallelStrategy, n: int = 2) -> list[Tensor]:
    """Return the samples of every replica."""
    g = torch.Generator().manual_seed(7)
    return [torch.randn(n, 3, 8, 6, generator=g) for _ in range(ps.ddp_ranks)]


def gradients_of(
    ps: ParallelStrategy, net: nn.Module, loss: Callable[[Tensor], Tensor]
) -> nn.Module:
    """Return a copy of `net` with the mean over replicas of the gradients of serial torch."""
    plain = copy.deepcopy(net)
    for x in samples(ps):
        (loss(plain(x)) / ps.ddp_ranks).backward()
    return plain


class Classifier(nn.Module):
    """A network that needs whole samples at its end, as programs write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv, self.linear, self.way = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(96, 2), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = getattr(y, self.way)() if isinstance(y, DCTensor) else y
        return self.linear(y.flatten(1))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("way", ["to_replicate", "to_ddp"])
def test_layers_on_whole_samples_within_a_model_count_their_gradients_once(way: str) -> None:
    ps = strategy()
    torch.manual_seed(3)
    net = Classifier(way)
    plain = gradients_of(ps, net, lambda y: y.square().mean())
    model = DistConvDDP(net, parallel_strategy=ps)
    y = model(DCTensor.distribute(samples(ps)[ps.ddp_ind], ps))
    assert isinstance(y, DCTensor)
    y.square().mean().backward()
    same_gradients(net, plain)
    assert type(y.to_replicate()) is Tensor


@pytest.mark.parallel([2, 4])
def test_batch_norm_is_exact_over_a_replica_and_keeps_the_statistics_of_the_first() -> None:
    ps = strategy()
    torch.manual_seed(4)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    first = copy.deepcopy(net)
    plain = gradients_of(ps, net, lambda y: y.square().sum() + y[:, 0].sum())
    model = DistConvDDP(net, parallel_strategy=ps)
    x = DCTensor.distribute(samples(ps)[ps.ddp_ind], ps)
    y = model(x)
    (y.square().sum() + y[:, 0].sum()).backward()
    same_gradients(net, plain)
    first(samples(ps)[0])
    model.eval()
    with torch.no_grad():
        result = model(x)
        close(result.to_replicate(), first.eval()(samples(ps)[ps.ddp_ind]))
    close(dict(net.named_buffers()), dict(first.named_buffers()))


@pytest.mark.parallel([2, 4])
def test_a_penalty_on_input_gradients_has_the_gradients_of_serial_replicas() -> None:
    ps = strategy()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh())
    plain = copy.deepcopy(net)
    for x in samples(ps):
        x.requires_grad_()
        y = plain(x)
        (slope,) = torch.autograd.grad([y.sum()], [x], create_graph=True)
        ((y.square().mean() + slope.square().mean()) / ps.ddp_ranks).backward()
    model = DistConvDDP(net, parallel_strategy=ps)
    dcx = DCTensor.distribute(samples(ps)[ps.ddp_ind].requires_grad_(), ps)
    whole = model(dcx).to_replicate()
    (slope,) = torch.autograd.grad([whole.sum()], [dcx], create_graph=True)
    assert isinstance(slope, DCTensor)
    (whole.square().mean() + slope.to_replicate().square().mean()).backward()
    same_gradients(net, plain)


@pytest.mark.parallel([2, 4])
def test_gradients_of_several_passes_add_up_with_and_without_sums_between_them() -> None:
    ps = strategy()
    torch.manual_seed(6)
    net = nn.Conv2d(3, 4, 3, padding=1)
    plain = gradients_of(ps, net, lambda y: 3 * y.square().mean())
    model = DistConvDDP(net, parallel_strategy=ps)
    x = DCTensor.distribute(samples(ps)[ps.ddp_ind], ps)
    model(x).square().mean().backward()
    with model.no_sync():
        model(x).square().mean().backward()
    model(x).square().mean().backward()
    same_gradients(net, plain)


@pytest.mark.parallel([2, 4])
def test_the_first_rank_of_a_replica_says_what_is_cut() -> None:
    ps = strategy()
    x = DCTensor.distribute(torch.full((1, 1, 4, 2), float(WORLD.rank)), ps)
    assert x.to_replicate().unique().tolist() == [2.0 * ps.ddp_ind]
    assert x.shape == (1, 1, 4, 2) and x.grad is None and x.is_leaf


@pytest.mark.parallel([2, 4])
def test_sums_are_those_of_the_sample_and_others_are_not_added_up() -> None:
    ps = strategy()
    whole = samples(ps)[ps.ddp_ind]
    x = DCTensor.distribute(whole, ps)
    space, replicas = (ps.device_mesh[name].get_group() for name in ("dc0", "ddp"))
    total = (3 * x.sum((2, 3)) + x.square().sum((2, 3))).clone()
    expected = 3 * whole.sum((2, 3)) + whole.square().sum((2, 3))
    dist.all_reduce(total, group=space)
    close(total.to_replicate(), expected)
    written = x.sum((2, 3))
    written[0] = 1.0
    refused = {
        "already the reduction": [
            x.mean(),
            x.sum() + 1,
            x.sum() * x.sum(),
            1 / x.sum(),
            x.amax(),
            x,
            total,
        ]
        + [x.sum().long(), torch.div(x.sum(), 2, rounding_mode="floor"), written]
        + [torch.stack([x.sum(), torch.ones(())]), x.var()],
        "ranks .* other samples": [x.sum()] if ps.ddp_ranks > 1 else [],
    }
    for message, tensors in refused.items():
        for t in tensors:
            with pytest.raises(UnsupportedOperation, match=message):
                dist.all_reduce(t, group=space if message == "already the reduction" else replicas)
    with pytest.raises(UnsupportedOperation, match="already the reduction"):
        dist.all_reduce(x.sum(), op=dist.ReduceOp.MAX, group=space)
    plain = torch.ones(())
    dist.all_reduce(plain, group=space)  # nobody waits
    assert plain == 2


@pytest.mark.parallel([2, 4])
def test_misuse_raises_on_every_rank_and_the_program_goes_on() -> None:
    ps, x, conv = strategy(), torch.randn(1, 3, 8, 6), nn.Conv2d(3, 1, 1)
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "does not divide", lambda: strategy(3)),
        (ValueError, "1 to 3", lambda: strategy((1, 1, 1, 1), (2, 3, 4, 5))),
        (ValueError, "each 1 or more", lambda: strategy(-1)),
        (ValueError, "does not fit", lambda: strategy((2, 1), 2)),
        (ValueError, "does not fit", lambda: strategy((2, 1), (2, 2))),
        (ValueError, "does not fit", lambda: strategy(2, 1)),
        (TypeError, "whole number", lambda: strategy("2")),  # type: ignore[arg-type]
        (TypeError, "not a ParallelStrategy", lambda: DCTensor.distribute(x, ps.grid)),  # type: ignore[arg-type]
        (TypeError, "as_tensor", lambda: DCTensor.from_shard([1.0], ps)),  # type: ignore[arg-type]
        (TypeError, "already", lambda: DCTensor.from_shard(DCTensor.distribute(x, ps), ps)),
        (ValueError, "unsqueeze", lambda: DCTensor.from_shard(torch.ones(4, 4), ps)),
        (ValueError, "expected one shape", lambda: DCTensor.distribute(x[..., WORLD.rank :], ps)),
        (ValueError, "blocks|block", lambda: DCTensor.from_shard(x[..., WORLD.rank % 2 :], ps)),
        (ValueError, "factor", lambda: DistConvDDP(conv)),
        (ValueError, "factor", lambda: DistConvDDP(conv, grad_reduction_factor=0)),
        (ValueError, "on the ranks", lambda: DistConvDDP(conv, grad_reduction_factor=float("nan"))),
        (ValueError, "on the ranks", lambda: DistConvDDP(conv, grad_reduction_factor="2")),  # type: ignore[arg-type]
        (ValueError, "same", lambda: DistConvDDP(conv, grad_reduction_factor=1 + WORLD.rank)),
        (TypeError, "int is not a Par", lambda: DistConvDDP(conv, parallel_strategy=2)),  # type: ignore[arg-type]
        (TypeError, "not a ParallelStrategy", lambda: DCTensor(x, ps.grid)),
        (TypeError, "process_group", lambda: DistConvDDP(conv, process_group=None)),
    ]
    if WORLD.size == 4:
        uneven = DCTensor.distribute(torch.ones(5, 1, 4, 4), strategy(4))
        wrong.append((ValueError, "to_replicate", uneven.to_ddp))
    for kind, message, action in wrong:
        with pytest.raises(kind, match=message):
            action()
    model = DistConvDDP(nn.Conv2d(3, 1, 1), parallel_strategy=ps)
    with pytest.raises(TypeError, match="plain tensors"):
        model(x)
    assert model(DCTensor.distribute(x, ps)).to_replicate().shape == (1, 1, 8, 6)
