"""Horovod's operations give what its documentation says, and ranks that differ raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
import distconv.horovod as hvd
from tests.support.serial import raised_everywhere

WORLD = MPI.COMM_WORLD
RANKS = [1, 2, 4]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def mine(rank: int = WORLD.rank) -> Tensor:
    return torch.arange(1.0, 7.0).view(2, 3) * (rank + 1) - 4


def everyones() -> Tensor:
    return torch.stack([mine(rank) for rank in range(WORLD.size)])


@pytest.mark.parallel(RANKS)
def test_ranks_have_their_numbers() -> None:
    assert (hvd.rank(), hvd.size()) == (WORLD.rank, WORLD.size)
    assert (hvd.local_rank(), hvd.local_size()) == (WORLD.rank, WORLD.size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized() and hvd.mpi_enabled() and not hvd.gloo_enabled()
    assert hvd.mpi_built() and not hvd.ddl_built() and not hvd.ccl_built()
    assert hvd.gloo_built() == torch.distributed.is_gloo_available()
    assert hvd.rocm_built() == bool(torch.version.hip)


OPS: dict[Any, Callable[[Tensor], Tensor]] = {
    hvd.Average: lambda x: x.mean(0),
    hvd.Sum: lambda x: x.sum(0),
    hvd.Min: lambda x: x.amin(0),
    hvd.Max: lambda x: x.amax(0),
    hvd.Product: lambda x: x.prod(0),
}


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("op", OPS)
def test_all_ranks_get_the_reduction(op: Any) -> None:
    expected = OPS[op](everyones())
    torch.testing.assert_close(hvd.allreduce(mine(), op=op, name="x"), expected)
    scaled = hvd.allreduce(mine(), op=op, prescale_factor=2.0, postscale_factor=0.5)
    torch.testing.assert_close(scaled, OPS[op](everyones() * 2) / 2)
    first, second = hvd.grouped_allreduce([mine(), mine().double()[0, 0]], op=op)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected.double()[0, 0])
    x = mine()
    assert hvd.allreduce_(x, op=op) is x
    torch.testing.assert_close(x, expected)
    a, b = mine(), mine()
    handles = [hvd.allreduce_async(a, op=op), hvd.allreduce_async_(b, op=op)]
    assert hvd.poll(handles[0]) and hvd.poll(handles[0])
    torch.testing.assert_close(hvd.synchronize(handles[0]), expected)
    assert torch.equal(a, mine()) and hvd.synchronize(handles[1]) is b
    torch.testing.assert_close(b, expected)
    several = [mine(), mine().double()[0, 0]]
    handle = hvd.grouped_allreduce_async(several, op=op)
    for result, whole in zip(hvd.synchronize(handle), (first, second), strict=True):
        assert torch.equal(result, whole)
    assert torch.equal(several[0], mine())
    found = hvd.grouped_allreduce_(several, op=op)
    for x, result, whole in zip(several, found, (first, second), strict=True):
        assert result is x and torch.equal(x, whole)


@pytest.mark.parallel(RANKS)
def test_halves_are_added_up_in_single_precision() -> None:
    x = (mine() / 3).half()
    expected = (everyones() / 3).half().float().sum(0).half()
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum), expected)
    compressed = hvd.allreduce(mine() / 3, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert torch.equal(compressed, expected.float())
    assert hvd.allreduce(torch.tensor([True]), average=False).item()


@pytest.mark.parallel(RANKS)
def test_any_true_value_of_the_older_argument_asks_for_an_average() -> None:
    for average in (1, "a name in the place of average"):
        torch.testing.assert_close(hvd.allreduce(mine(), average), everyones().mean(0))
    torch.testing.assert_close(hvd.allreduce(mine(), 0), everyones().sum(0))


def test_compressions_are_called_on_tensors() -> None:
    x = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    smaller, ctx = hvd.Compression.fp16.compress(x)
    assert smaller.dtype == torch.float16 and ctx == torch.float64
    again = hvd.Compression.fp16.decompress(smaller, ctx)
    assert torch.equal(again, x.half().double()) and again.dtype == torch.float64
    whole = torch.tensor([3])
    assert hvd.Compression.fp16.compress(whole) == (whole, torch.int64)
    assert hvd.Compression.fp16.decompress(whole, torch.int64) is whole
    assert hvd.Compression.none.compress(x) == (x, None)
    assert hvd.Compression.none.decompress(x, None) is x


class Doubled:
    """A compression of the program's own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, float]:
        return tensor * 2, 0.5

    @staticmethod
    def decompress(tensor: Tensor, ctx: float) -> Tensor:
        return tensor * ctx


@pytest.mark.parallel(RANKS)
def test_reductions_use_a_compression_and_pass_gradients_through_it() -> None:
    for compression in (hvd.Compression.fp16, Doubled):
        x = torch.tensor([1.0, -2.0]).requires_grad_()
        for y in (
            hvd.allreduce(x * (WORLD.rank + 1), compression=compression, op=hvd.Sum),
            hvd.grouped_allreduce([x * (WORLD.rank + 1)], None, None, compression, hvd.Sum)[0],
        ):
            total = sum(range(1, WORLD.size + 1))
            assert y.dtype == torch.float32 and y.tolist() == [total, -2 * total]
            (found,) = torch.autograd.grad(y.sum(), x)
            assert found.tolist() == [WORLD.size * (WORLD.rank + 1)] * 2
    with pytest.raises(ValueError, match=r"compression=None is unknown; choose Comp"):
        hvd.allreduce(torch.ones(1), compression=None)
    plain = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="not supported; choose Compression.none or"):
        hvd.DistributedOptimizer(plain, compression=Doubled)


def sparse(rank: int, dtype: torch.dtype) -> Tensor:
    """Return 2 `rank` rows of an (8, 3) tensor, 0 of the last rank's: some rows twice."""
    n = 2 * rank * (rank < WORLD.size - 1)
    rows = [[(3 * i + rank) % 4 for i in range(n)]]
    values = (torch.arange(3.0 * n).view(n, 3) + rank).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor(rows), values, (8, 3), check_invariants=True)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_sparse_tensors_are_reduced(dtype: torch.dtype) -> None:
    total = sum(sparse(r, torch.float64).to_dense() for r in range(WORLD.size))
    mean = total / WORLD.size if dtype.is_floating_point else (total / WORLD.size).trunc()
    own = sparse(WORLD.rank, dtype)
    for op, expected in ((hvd.Sum, total), (hvd.Average, mean)):
        handles = [hvd.sparse_allreduce_async(own, name, op) for name in ("a", "b")]
        results = [hvd.synchronize(handles[1]), handles[0]()]
        for result in results:
            assert result.is_coalesced() and result.dtype == dtype and result.shape == (8, 3)
            torch.testing.assert_close(result.to_dense(), expected.to(dtype))
    nothing = torch.zeros(4, 5).to_sparse()
    assert hvd.sparse_allreduce_async(nothing, "nothing", hvd.Sum)()._nnz() == 0
    assert torch.equal(own.to_dense(), sparse(WORLD.rank, dtype).to_dense())


@pytest.mark.parallel([2])
def test_sparse_reductions_that_differ_or_are_not_supported_raise() -> None:
    def different_shapes() -> None:
        hvd.sparse_allreduce_async(torch.ones(2 + WORLD.rank, 2).to_sparse(1), "x", hvd.Sum)()

    raised_everywhere(hvd.HorovodInternalError, different_shapes)
    with pytest.raises(ValueError, match="choose Average or Sum"):
        hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "x", hvd.Max)
    with pytest.raises(TypeError, match=r"torch.strided; pass a torch.sparse_coo tensor"):
        hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum)


@pytest.mark.parallel(RANKS)
def test_tensors_of_all_ranks_come_one_after_the_other() -> None:
    rows = [torch.full((r, 2), float(r)) for r in range(WORLD.size)]
    assert torch.equal(hvd.allgather(rows[WORLD.rank]), torch.cat(rows))
    assert hvd.allgather(torch.tensor(WORLD.rank)).tolist() == list(range(WORLD.size))
    assert hvd.allgather(torch.ones(0, 3)).shape == (0, 3)
    assert hvd.allgather_object({"r": hvd.rank()}) == [{"r": r} for r in range(WORLD.size)]
    assert torch.equal(hvd.synchronize(hvd.allgather_async(rows[WORLD.rank])), torch.cat(rows))
    hvd.barrier()


@pytest.mark.parallel(RANKS)
def test_all_ranks_get_what_one_has() -> None:
    root = WORLD.size - 1
    x = mine().t()
    assert torch.equal(hvd.broadcast(x, root), mine(root).t())
    assert hvd.broadcast_(x, root) is x and torch.equal(x, mine(root).t())
    assert hvd.synchronize(hvd.broadcast_async_(x, 0)) is x
    sent = hvd.broadcast_object({"x": mine(), "rank": hvd.rank()}, root)
    assert torch.equal(sent["x"], mine(root)) and sent["rank"] == root
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    for tensor in model.state_dict().values():
        tensor.fill_(WORLD.rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert all((tensor == root).all() for tensor in model.state_dict().values())
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + WORLD.rank)
    if WORLD.rank == root:
        model(torch.ones(2, 1, 4, 4)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert optimizer.param_groups[0]["lr"] == 0.1 + root
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert WORLD.allgather(steps) == [[1.0] * 4] * WORLD.size


@pytest.mark.parallel(RANKS)
def test_gradients_are_horovods() -> None:
    """Let each rank have a loss, and compare with the gradients of all losses together.

    Horovod averages the gradients of what it gathers and broadcasts over the ranks.
    """
    n = WORLD.size
    weights = torch.arange(1.0, 1 + 2 * n)

    def losses(results: list[Tensor]) -> Any:
        return sum((weights[: len(y)] * y * (r + 1)).sum() for r, y in enumerate(results))

    inputs = [torch.arange(1.0 + r, 1.0 + r + n).requires_grad_() for r in range(n)]
    own = inputs[WORLD.rank].detach().clone().requires_grad_()
    chunks = [torch.cat([x[r : r + 1] for x in inputs]) for r in range(n)]
    total: Any = sum(inputs)
    for function, expected, factor in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum), [total] * n, 1),
        (lambda x: hvd.allgather(x), [torch.cat(inputs)] * n, 1 / n),
        (lambda x: hvd.grouped_allgather([x])[0], [torch.cat(inputs)] * n, 1 / n),
        (lambda x: hvd.broadcast(x, 0), [inputs[0]] * n, 1 / n),
        (lambda x: hvd.alltoall(x), chunks, 1),
        (lambda x: hvd.reducescatter(x, op=hvd.Average), list((total / n).split(1)), n),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), list(total.split(1)), n),
    ):
        weights = torch.arange(1.0, 1 + n * n)
        y = function(own)
        torch.testing.assert_close(y, expected[WORLD.rank].detach())
        (found,) = torch.autograd.grad((weights[: len(y)] * y * (WORLD.rank + 1)).sum(), own)
        serial = torch.autograd.grad(losses(expected), inputs, allow_unused=True, retain_graph=True)
        want = serial[WORLD.rank]
        want = torch.zeros(n) if want is None else want * factor
        torch.testing.assert_close(found, want)


@pytest.mark.parallel(RANKS)
def test_rows_are_exchanged_and_scattered() -> None:
    n, r = WORLD.size, WORLD.rank
    splits = [(r + peer) % 3 for peer in range(n)]
    rows = [torch.full((sum((s + p) % 3 for p in range(n)), 2), float(s)) for s in range(n)]
    received, counts = hvd.alltoall(rows[r], splits=torch.tensor(splits))
    assert counts.tolist() == [(s + r) % 3 for s in range(n)]
    assert torch.equal(
        received, torch.cat([torch.full((c, 2), float(s)) for s, c in enumerate(counts)])
    )
    x = torch.arange(2.0 * n + 1)
    part = hvd.reducescatter(x, op=hvd.Sum)
    assert torch.equal(part, (x * n).tensor_split(n)[r])
    handle = hvd.grouped_reducescatter_async([x, x.double()])
    assert all(torch.equal(y, x.tensor_split(n)[r].to(y.dtype)) for y in hvd.synchronize(handle))
    equal, counts = hvd.synchronize(hvd.alltoall_async(torch.full((n,), float(r))))
    assert equal.tolist() == list(range(n)) and counts.tolist() == [1] * n
    with pytest.raises(ValueError, match="do not divide 1 rows among"):
        hvd.alltoall(torch.ones(1), splits=[7] * n)


@pytest.mark.parallel(RANKS)
def test_averages_of_whole_numbers_are_truncated() -> None:
    total = sum(range(1, WORLD.size + 1)) + WORLD.size
    found = hvd.allreduce(torch.tensor([WORLD.rank + 2, -WORLD.rank - 2]))
    assert found.tolist() == [total // WORLD.size, -(total // WORLD.size)]


@pytest.mark.parallel([2, 4])
def test_ranks_find_each_other_by_names() -> None:
    names = ["a", "b", "c"]
    order = names if WORLD.rank % 2 else names[::-1]
    handles = {
        n: hvd.allreduce_async(mine() * (1 + names.index(n)), name=n, op=hvd.Sum) for n in order
    }
    for name in sorted(order, reverse=bool(WORLD.rank % 2)):
        expected = everyones().sum(0) * (1 + names.index(name))
        torch.testing.assert_close(hvd.synchronize(handles[name]), expected)
    assert hvd.synchronize(handles["a"]) is None
    unnamed = [hvd.allreduce_async(mine() * n, name="") for n in (1, 2)]
    for n, handle in enumerate(unnamed, 1):
        torch.testing.assert_close(hvd.synchronize(handle), everyones().mean(0) * n)

    def different_names() -> None:
        hvd.allreduce(torch.ones(1), name=str(WORLD.rank))

    assert "calls allreduce(1" in raised_everywhere(hvd.HorovodInternalError, different_names)
    hvd.barrier()


COLLECTIVES: dict[str, Callable[[Tensor, str], int]] = {
    "allgather": hvd.allgather_async,
    "alltoall": lambda x, name: hvd.alltoall_async(x, None, name),
    "broadcast": lambda x, name: hvd.broadcast_async(x, 0, name),
    "grouped_allgather": lambda x, name: hvd.grouped_allgather_async([x, x], name),
    "reducescatter": hvd.reducescatter_async,
    "sparse": lambda x, name: hvd.sparse_allreduce_async(x.to_sparse(), name, hvd.Sum),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_of_any_kind_find_each_other_by_names(kind: str) -> None:
    start, x = COLLECTIVES[kind], mine()[:1].repeat(WORLD.size, 1)

    def started(n: int) -> int:
        return start(x * n, f"{kind} {n}")

    expected = {n: hvd.synchronize(started(n)) for n in (1, 2, 3)}
    if WORLD.rank % 2:
        handles = {n: started(n) for n in (3, 2, 1)}
        found = {n: hvd.synchronize(handles[n]) for n in (2, 3, 1)}
    else:  # waits for one while the others start another
        found = {n: hvd.synchronize(started(n)) for n in (1, 2, 3)}
    for n in (1, 2, 3):
        torch.testing.assert_close(found[n], expected[n])


@pytest.mark.parallel(4)
def test_process_sets_compute_apart() -> None:
    even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([3, 1]))
    own, other = (odd, even) if WORLD.rank % 2 else (even, odd)
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3]}
    assert own.included() and not other.included() and other.size() == 2
    assert own.rank() == WORLD.rank // 2
    x = torch.tensor([float(WORLD.rank)])
    assert hvd.allreduce(x, process_set=own).item() == (2 if WORLD.rank % 2 else 1)
    assert hvd.broadcast(x, own.ranks[1], process_set=own).item() == own.ranks[1]
    assert hvd.allgather(x, process_set=own).tolist() == own.ranks
    assert hvd.broadcast_object(WORLD.rank, own.ranks[1], process_set=own) == own.ranks[1]
    with pytest.raises(ValueError, match="not in ProcessSet"):
        hvd.allreduce(x, process_set=other)
    with pytest.raises(ValueError, match="not in the process set; choose one of"):
        hvd.broadcast(x, other.ranks[0], process_set=own)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, process_set=even)
    model(x[None]).sum().backward()
    optimizer.step()
    assert model.weight.grad.item() == (WORLD.rank if WORLD.rank % 2 else 1)
    raised_everywhere(ValueError, lambda: hvd.add_process_set([0, 2]))
    assert hvd.remove_process_set(even) and not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_gradients_that_change_while_they_travel_are_an_error(
    compression: Any, predivide: float
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, compression=compression, gradient_predivide_factor=predivide, bucket_bytes=1
    )

    def step(synchronizes: bool) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if synchronizes:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if synchronizes:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()

    if WORLD.size > 1:
        raised_everywhere(hvd.HorovodInternalError, lambda: step(False))
    step(True)
    step(True)


@pytest.mark.parallel([2, 4])
def test_ranks_without_samples_add_zeros_until_all_have_joined() -> None:
    """Let rank r take r + 1 steps; averages divide by all ranks."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
        for step in range(WORLD.rank + 1):
            optimizer.zero_grad()
            model(torch.tensor([[1.0, 2.0]])).sum().backward()
            active = WORLD.size - step
            # Between the backward pass and the step.
            assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == active
            optimizer.step()
            assert model.weight.grad.tolist() == [[active / WORLD.size, 2 * active / WORLD.size]]
        assert hvd.join() == WORLD.size - 1
        last = hvd.broadcast(model.weight.detach(), WORLD.size - 1)
        share = sum(range(1, WORLD.size + 1)) / WORLD.size
        assert last.tolist() == [[-share, -2 * share]]


@pytest.mark.parallel([2])
def test_a_step_of_several_buckets_is_met_by_ranks_that_have_joined() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, bucket_bytes=1)
    if WORLD.rank:
        for part in (model, model[1], model):
            optimizer.zero_grad()
            part(torch.ones(1, 3 if part is model else 4)).sum().backward()
            hvd.allreduce(torch.tensor(1.0))
            optimizer.step()
            assert (model[0].weight.grad is None) == (part is not model)
            assert torch.equal(model[1].bias.grad, torch.full((2,), 0.5))
    assert hvd.join() == 1


@pytest.mark.parallel([2])
def test_what_ranks_do_differently_raises_on_all_of_them() -> None:
    def different_shapes() -> None:
        hvd.allreduce(torch.ones(2 + WORLD.rank))

    def different_functions() -> None:
        if WORLD.rank:
            hvd.barrier()
        else:
            hvd.allgather(torch.ones(1))

    def gather_after_join() -> None:
        hvd.join() if WORLD.rank else hvd.allgather(torch.ones(1))

    assert "rank 1 calls allreduce(Average" in raised_everywhere(RuntimeError, different_shapes)
    assert "rank 1 calls barrier()" in raised_everywhere(RuntimeError, different_functions)
    message = raised_everywhere(RuntimeError, gather_after_join)
    assert "rank 0 called allgather while rank 1 had called join()" in message
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == 2
    assert hvd.join() == 1


@pytest.mark.parallel([1, 2])
def test_what_has_no_counterpart_raises_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("elastic", "run", "start_timeline", "SyncBatchNorm"):
        with pytest.raises(NotImplementedError, match=f"has no {name}; .{{10}}"):
            getattr(hvd, name)
    with pytest.raises(AttributeError):
        hvd.nothing  # noqa: B018
    x = torch.ones(2)
    with pytest.raises(NotImplementedError, match="op=Adasum is not supported"):
        hvd.allreduce(x, op=hvd.Adasum)
    with pytest.raises(ValueError, match="choose one of"):
        hvd.broadcast(x, 7)
    with pytest.raises(TypeError, match="full_tensor"):
        hvd.allreduce(dc.distribute_tensor(torch.ones(4), dc.ProcessGrid(sample=-1)))
    hvd.shutdown()
    with pytest.raises(ValueError, match="call init"):
        hvd.rank()
    monkeypatch.setenv("HOROVOD_TIMELINE", "trace.json")
    with pytest.raises(NotImplementedError, match="HOROVOD_TIMELINE=trace.json is not supported"):
        hvd.init()
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    with warnings.catch_warnings(action="error"):
        hvd.init()
    assert hvd.is_initialized()
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    with pytest.raises(NotImplementedError, match="HOROVOD_AUTOTUNE=1 is not supported"):
        hvd.init()


@pytest.mark.parallel([1, 2])
def test_the_number_of_accumulated_backward_passes_changes_between_steps() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for passes in (2, 1, 3):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for _ in range(passes):
            (weight * (WORLD.rank + 1)).backward()
        if WORLD.size > 1:
            with pytest.raises(AssertionError, match=r"call it before backward\(\), or after"):
                optimizer.set_backward_passes_per_step(1)
        optimizer.step()
        assert weight.grad is not None
        assert weight.grad.item() == passes * (1 + WORLD.size) / 2
    with pytest.raises(ValueError, match="passes"):
        optimizer.set_backward_passes_per_step(0)


@pytest.mark.parallel([1, 2])
def test_misuse_of_the_optimizer_is_an_error() -> None:
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    make = hvd.DistributedOptimizer
    with pytest.raises(ValueError, match="1 of the optimizer's parameters are not in"):
        make(plain, [("weight", model.weight)])
    with pytest.raises(ValueError, match="weight twice"):
        make(plain, [("weight", model.weight), ("weight", model.bias)])
    with pytest.raises(ValueError, match="choose Average or Sum"):
        make(plain, op=hvd.Max)
    with pytest.raises(TypeError, match="uses one gradient a step"):
        make(torch.optim.LBFGS(model.parameters()))
    optimizer = make(plain, model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    if WORLD.size > 1:
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1"):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        # What the second backward pass has added came too late for some gradients.
        raised_everywhere(hvd.HorovodInternalError, optimizer.synchronize)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    if WORLD.size > 1:
        parallel = dc.parallelize(nn.Linear(2, 2), dc.ProcessGrid(sample=-1))
        with pytest.raises(ValueError, match="use torch's own optimizer"):
            make(torch.optim.SGD(parallel.parameters(), lr=0.1))


@pytest.mark.parallel([1, 2])
def test_schedulers_closures_groups_and_sparse_gradients_work() -> None:
    table, layer = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)
    for p in (*table.parameters(), *layer.parameters()):
        nn.init.ones_(p)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, sparse_as_dense=True)
    optimizer.add_param_group({"params": layer.parameters()})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(table(torch.tensor([WORLD.rank]))).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    schedule.step()
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert layer.bias.item() == 1 - WORLD.size
    assert (table.weight[: WORLD.size] == 0).all() and (table.weight[WORLD.size :] == 1).all()
    kept = optimizer.state_dict()
    optimizer.load_state_dict(kept)
    closure()
    optimizer.step()
    assert layer.bias.item() == 1 - 1.5 * WORLD.size
