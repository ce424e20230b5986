"""Tensors that hold their global index arrive exactly; every movement has its true adjoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from weakref import ref

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from distconv.comm.collectives import all_reduce, all_reduce_with_grad, replicate, unreplicate
from distconv.comm.packing import places_in
from distconv.comm.transfer import gather
from distconv.device.kinds import HOST
from distconv.geometry.index_maps import Grouped, IndexMap, Pad, Same, Strided, Window, WrittenSlice
from distconv.geometry.layout import Cuts, rank_box
from distconv.geometry.plan import Plan, make_plan
from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from tests.support.geometry import OUTSIDE, needed
from tests.support.serial import examples, random_grid, random_layout
from tests.support.synchronized_kernels import ALWAYS

RANKS = [1, 2, 4, 6]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
WORLD = MPI.COMM_WORLD


def random_map(rng: random.Random, n: int) -> IndexMap:
    k, p = rng.randrange(1, 6), rng.randrange(4)
    maps: list[IndexMap] = [
        Same(),
        Window(min(k, n + 2 * p), rng.randrange(1, 4), 1, (p, p)),
        Strided(rng.randrange(n), k, 0),
        WrittenSlice(p, n + 2 * p),
        Grouped(1 + p),
        Pad(min(p, n - 1), min(k, n - 1), rng.choice(["constant", "reflect", "circular"])),
    ]
    chosen = rng.choice(maps)
    if isinstance(chosen, Strided):
        return Strided(chosen.first, k, len(range(chosen.first, n, k)))
    return chosen


class Case:
    """A random movement of a random tensor."""

    def __init__(self, rng: random.Random, needs: Callable[..., IndexMap] = random_map):
        self.grid = random_grid(rng)
        topology = self.grid.topology
        self.shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 5)))
        self.source = random_layout(rng, self.grid, self.shape).cuts(len(self.shape))
        self.target = random_layout(rng, self.grid, self.shape).cuts(len(self.shape))
        self.needs = tuple(needs(rng, n) for n in self.shape)
        self.box = rank_box(self.shape, self.source, topology, self.grid.rank)
        self.plan = make_plan(
            topology, self.grid.rank, self.shape, self.source, self.target, self.needs
        )
        index = np.arange(torch.Size(self.shape).numel()).reshape(self.shape)
        self.index = torch.from_numpy(index)
        self.wanted = torch.from_numpy(
            needed(index, topology, self.grid.rank, self.target, self.needs)
        )

    def __str__(self) -> str:
        return f"{self.shape} {self.source} -> {self.target} {self.needs} {self.grid}"


def same(rng: random.Random, n: int) -> IndexMap:
    return Same()


def values(index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a number for each global index that the type holds exactly."""
    if dtype.is_complex:
        return (index + 1j * (index % 7)).to(dtype)
    return (index % {torch.bool: 2}.get(dtype, 125)).to(dtype)


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw integers in float64, whose sums are exact; each rank draws others."""
    generator = torch.Generator().manual_seed(seed * 64 + WORLD.rank)
    return torch.randint(-9, 10, shape, generator=generator).double()


def inner(a: Tensor, b: Tensor) -> float:
    """Return the inner product over the elements of all ranks, replicas counted."""
    return WORLD.allreduce((a * b).sum().item())


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_movements_bring_every_buffer_its_elements(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    for _ in examples(15):
        case = Case(rng)
        local = values(case.index[case.box.slices], dtype)
        expected = values(case.wanted, dtype).masked_fill(case.wanted == OUTSIDE, 1)
        buffer = gather(local, case.plan, case.grid, fill=1)
        assert buffer.dtype == dtype
        assert torch.equal(buffer, expected), case


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2], ids=str)
def test_types_without_indexed_copies_are_moved(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    for _ in examples(10):
        case = Case(rng, same)
        local, wanted = ((x % 5).to(dtype) for x in (case.index[case.box.slices], case.wanted))
        buffer = gather(local, case.plan, case.grid)
        assert buffer.dtype == dtype and torch.equal(buffer.int(), wanted.int()), case


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("most", [0, 2**17])
def test_blocks_of_any_memory_layout_are_moved(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = HOST._replace(most_indices=most)
    monkeypatch.setattr("distconv.comm.packing.thresholds", lambda kind: limits)
    make_plan.cache_clear()
    rng = random.Random(1)
    for _ in examples(15):
        case = Case(rng)
        local = case.index[case.box.slices]
        backwards = tuple(reversed(range(local.dim())))
        transposed = local.permute(backwards).contiguous().permute(backwards)
        strided = torch.stack([local, local], -1)[..., 0]
        for block in (transposed, strided, local[:1].expand(local.shape) * 0 + local):
            assert torch.equal(gather(block, case.plan, case.grid, OUTSIDE), case.wanted), case


@pytest.mark.parallel(RANKS)
def test_values_with_a_conjugation_or_negation_pending_arrive_resolved() -> None:
    rng = random.Random(2)
    for _ in examples(15):
        case = Case(rng, same)
        z = values(case.index, torch.complex64)
        for lazy in (torch.conj, lambda x: torch.imag(torch.conj(x))):
            local = lazy(z[case.box.slices])
            assert local.is_conj() or local.is_neg()
            buffer = gather(local, case.plan, case.grid)
            expected = lazy(z).resolve_conj().resolve_neg().flatten()[case.wanted]
            assert torch.equal(buffer.resolve_conj().resolve_neg(), expected), case


@pytest.mark.parallel(RANKS)
def test_messages_lie_where_tensors_do_whatever_torch_makes_by_default() -> None:
    x = dc.distribute_tensor(torch.arange(60.0).view(1, 2, 5, 6), dc.ProcessGrid(height=-1))
    with torch.device("meta"):
        moved = x.redistribute(dc.Layout(width="height")).full_tensor()
    assert torch.equal(moved, torch.arange(60.0).view(1, 2, 5, 6))


@pytest.mark.parallel(RANKS)
def test_the_backward_of_a_gather_is_its_adjoint() -> None:
    rng = random.Random(4)
    for seed in examples(40):
        case = Case(rng, same if seed % 3 == 0 else random_map)
        x = integers(case.plan.block_shape, seed).requires_grad_()
        buffer = gather(x, case.plan, case.grid)
        y = integers(case.plan.buffer_shape, seed + 1)
        buffer.backward(y)
        assert inner(buffer.detach(), y) == inner(x.detach(), x.grad), case


@pytest.mark.parallel(RANKS)
def test_messages_with_channels_last_bring_what_others_bring_whatever_the_formats() -> None:
    rng = random.Random(8)
    for seed in examples(30):
        case = Case(rng)
        while len(case.shape) != 4:
            case = Case(rng)
        # Every rank has its own memory format.
        last = (seed + case.grid.rank) % 2 == 0
        form = torch.channels_last if last else torch.contiguous_format
        x = case.index[case.box.slices].double().contiguous(memory_format=form).requires_grad_()
        buffer = gather(x, case.plan.with_channels_last, case.grid, fill=OUTSIDE)
        assert torch.equal(buffer, case.wanted.double()), case
        y = integers(case.plan.buffer_shape, seed).contiguous(memory_format=form)
        buffer.backward(y)
        expected = x.detach().clone().requires_grad_()
        gather(expected, case.plan, case.grid).backward(y)
        assert torch.equal(x.grad, expected.grad), case


@pytest.mark.parallel(RANKS)
def test_no_kernel_adds_to_an_element_twice_where_the_order_of_sums_is_not_fixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Grid, "computes_on_gpu", ALWAYS, raising=False)
    make_plan.cache_clear()
    rng = random.Random(5)
    for seed in examples(40):
        case = Case(rng)
        x = integers(case.plan.block_shape, seed).requires_grad_()
        buffer = gather(x, case.plan, case.grid)
        y = integers(case.plan.buffer_shape, seed + 1)
        buffer.backward(y)
        assert inner(buffer.detach(), y) == inner(x.detach(), x.grad), case
        places = places_in(x.grad, case.plan, case.grid, of_block=True, sums=True)
        assert all(len(index.unique()) == len(index) for index in places.indices), case
    make_plan.cache_clear()


@pytest.mark.parallel(3)
def test_indices_that_a_captured_graph_reads_outlive_their_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph reads them in place at each replay, also when other plans have replaced theirs."""
    monkeypatch.setattr(Grid, "computes_on_gpu", ALWAYS, raising=False)
    monkeypatch.setattr("distconv.device.streams.is_accelerator", lambda device: True)
    captured = False
    monkeypatch.setattr("distconv.device.streams.is_capturing", lambda device: captured)
    grid = dc.ProcessGrid(width=-1)
    rows, columns = (("width",), ()), ((), ("width",))
    for captured in (False, True):
        make_plan.cache_clear()
        plan = make_plan(grid.topology, grid.rank, (6, 12), rows, columns, (Same(), Same()))
        block = torch.zeros(plan.block_shape)
        kept = [ref(index) for index in places_in(block, plan, grid, of_block=True).indices]
        del plan
        make_plan.cache_clear()
        assert kept and all((index() is not None) == captured for index in kept)


@pytest.mark.parallel(RANKS)
def test_the_backward_of_a_sum_over_ranks_is_its_adjoint() -> None:
    rng = random.Random(6)
    for seed in examples(10):
        grid = random_grid(rng)
        axes = tuple(rng.sample(AXES, rng.randrange(1, 4)))
        x = integers((3, 2), seed).requires_grad_()
        total = all_reduce_with_grad(x, grid, axes)
        peers = grid.topology.peers(grid.rank, axes)
        everyone = WORLD.allgather(x.detach())
        assert torch.equal(total, torch.stack([everyone[r] for r in peers]).sum(0))
        y = integers((3, 2), seed + 1)
        total.backward(y)
        assert inner(total.detach(), y) == inner(x.detach(), x.grad)


@pytest.mark.parallel(RANKS)
def test_replicate_and_share_are_adjoint_when_a_plain_value_counts_once() -> None:
    rng = random.Random(7)
    for seed in examples(10):
        grid = random_grid(rng)
        axes = tuple(rng.sample(AXES, rng.randrange(1, 4)))
        replicas = grid.topology.parts(axes)
        comm = grid.communicator(axes)
        plain = comm.bcast(integers((4,), seed)).requires_grad_()
        parts = integers((4,), seed + 1)
        replicated = replicate(plain, grid, axes)
        assert torch.equal(replicated, plain)
        replicated.backward(parts)
        assert inner(plain.detach(), parts) == inner(plain.detach(), plain.grad) / replicas
        x = integers((4,), seed).requires_grad_()
        unreplicate(x, grid, axes).backward(plain.detach() * replicas)
        assert torch.equal(x.grad, plain.detach())


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_ranks_of_every_type(dtype: torch.dtype) -> None:
    grid = dc.ProcessGrid(height=-1)
    local = torch.tensor([[0, 1], [grid.rank, 2]]).T.to(dtype)
    total = all_reduce(local, grid, ("height",))
    assert total.dtype == dtype
    exact = torch.complex128 if dtype.is_complex else torch.float64
    assert torch.equal(total, torch.stack(WORLD.allgather(local.to(exact))).sum(0).to(dtype))
    assert local[1, 0] == 1, "the operand was changed"
    assert all_reduce(local[:0], grid, ("height",)).shape == (0, 2)


@pytest.mark.parallel([1, 2])
def test_a_type_that_cannot_be_added_up_is_refused() -> None:
    grid = dc.ProcessGrid(height=-1)
    with pytest.raises(TypeError, match="cannot sum torch.float8_e5m2; convert the tensor"):
        all_reduce(torch.ones(2).to(torch.float8_e5m2), grid, ("height",))


@pytest.mark.parallel(RANKS)
def test_a_sum_is_bitwise_the_same_on_all_ranks() -> None:
    grid = dc.ProcessGrid(height=-1)
    for n in (1, 10, 1000, 100_000):
        generator = torch.Generator().manual_seed(WORLD.rank)
        total = all_reduce(torch.randn(n, generator=generator), grid, ("height",))
        assert len({total.numpy().tobytes() for total in WORLD.allgather(total)}) == 1


def ring(grid: dc.ProcessGrid, n: int) -> tuple[Plan, Cuts]:
    """Return a plan that gives every rank a halo of one from both neighbours."""
    cuts = (("height",),)
    shape = (n * grid.size,)
    needs = (Pad(1, 1, "circular"),)
    return make_plan(grid.topology, grid.rank, shape, cuts, cuts, needs), cuts


@pytest.mark.parallel([2, 4])
def test_messages_of_two_exchanges_do_not_mix_whatever_their_order() -> None:
    grid = dc.ProcessGrid(height=-1)
    transport = grid.transport.carrier
    after, before = (grid.rank + 1) % grid.size, (grid.rank - 1) % grid.size
    tags = [transport.next_tag() for _ in range(5)]
    assert len(set(tags)) == 5 and WORLD.allgather(tags) == [tags] * grid.size
    landed = [torch.zeros(3) for _ in tags]
    order = list(range(5))
    random.Random(grid.rank).shuffle(order)
    under_way = [
        transport.exchange(
            [(before, landed[i])], [(after, torch.full((3,), 10.0 * grid.rank + i))], tags[i]
        )
        for i in order
    ]
    random.Random(-grid.rank).shuffle(under_way)
    for messages in under_way:
        messages.wait()
    assert [x.tolist() for x in landed] == [[10.0 * before + i] * 3 for i in range(5)]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gradients_of_two_equal_exchanges_do_not_mix_in_either_order(
    order: tuple[int, int],
) -> None:
    grid = dc.ProcessGrid(height=-1)
    plan, _ = ring(grid, 4)
    x = [integers(plan.block_shape, seed).requires_grad_() for seed in range(2)]
    y = [integers(plan.buffer_shape, seed + 2) for seed in range(2)]
    buffers = [gather(a, plan, grid) for a in x]
    for i in order:
        buffers[i].backward(y[i])
    for a, b, c in zip(x, buffers, y, strict=True):
        assert inner(b.detach(), c) == inner(a.detach(), a.grad)


@pytest.mark.parallel([1, 2, 4])
def test_exchanges_of_several_grids_on_the_same_ranks_are_numbered_together() -> None:
    grids = [dc.ProcessGrid(height=-1), dc.ProcessGrid(width=-1)]
    x = torch.arange(2 * WORLD.size).reshape(1, 1, 2 * WORLD.size, 1)
    first = [dc.distribute_tensor(x, grids[0]), dc.distribute_tensor(x.mT, grids[1])]
    second = [t.redistribute(dc.Layout()) for t in first]
    assert torch.equal(second[0].shard, x) and torch.equal(second[1].shard, x.mT)
    assert len(set(WORLD.allgather([g.transport.next_tag() for g in grids])[0])) == 2


@pytest.mark.parallel([2, 4])
def test_backward_passes_agree_on_their_order_where_some_ranks_have_nothing_to_move() -> None:
    # The message is too large to be sent before the other side has asked for it.
    n = 2**17
    grid = dc.ProcessGrid(sample=-1)
    x = dc.distribute_tensor(torch.ones(1, n), grid, dc.Layout()).requires_grad_()
    z = dc.distribute_tensor(torch.ones(2 * grid.size + 1, n), grid).requires_grad_()
    torch.cat([x, z]).backward(torch.arange(2.0 * grid.size + 2)[:, None].expand(-1, n))
    assert torch.equal(x.grad.shard[:, 0], torch.zeros(1))
    whole = z.grad.full_tensor()
    assert torch.equal(whole[:, -1], torch.arange(1.0, 2 * grid.size + 2))
