"""Tensors that have to be equal on all ranks, but are not, are found and named."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.comm.checksums import checksum
from distconv.grid.journal import DivergenceError
from tests.grid.test_abort import job
from tests.support.serial import raised_everywhere, told_on_one_rank

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.usefixtures("first_calls")
ONE = int(WORLD.rank == 1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The checksum


@pytest.mark.parametrize("size", [2**4, 2**8])
def test_a_checksum_sees_that_samples_changed_places(size: int) -> None:
    x = numbers(8, 3, size, size)
    assert checksum(x) == checksum(x.clone()) != checksum(x[torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])])
    assert checksum(x) == checksum(x.contiguous(memory_format=torch.channels_last))
    assert checksum(x) != checksum(x + 1)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.uint8],
)
def test_a_checksum_exists_for_every_type_and_shape(dtype: torch.dtype) -> None:
    x = numbers(5, 7).mul(100).relu().to(dtype)
    for part in (x, x.T, x[1], x[:0], x[2, 3], x[::2, 1:], x.conj()):
        assert checksum(part) == checksum(part.clone())
    assert checksum(x) != checksum(x.flip(0))


def test_a_checksum_does_not_depend_on_strides() -> None:
    for x in (torch.ones(3)[:0], torch.ones(3)[:1], torch.arange(8.0)[::2]):
        plain, n = x.clone(memory_format=torch.contiguous_format), x.numel()
        assert checksum(x) == checksum(plain) == checksum(x.as_strided((n,), (2 * (n > 1),)))


def test_a_checksum_of_samples_that_begin_alike_sees_their_order() -> None:
    x = torch.zeros(128, 3, 64, 64)
    x[:, :, 16:] = numbers(128, 3, 48, 64)
    assert checksum(x) != checksum(x.roll(1, 0))


def test_a_checksum_takes_equal_nans_for_equal() -> None:
    x = numbers(4)
    x[1] = torch.nan
    assert checksum(x) == checksum(x.clone())


# Inputs


@pytest.mark.parallel([2, 4])
def test_inputs_that_differ_are_named_with_the_line_of_the_program() -> None:
    grid = dc.ProcessGrid(sample=-1)
    x = numbers(8, 3, 4, 4)
    shuffled = x.flip(0) if WORLD.rank == 1 else x
    message = raised_everywhere(ValueError, lambda: dc.distribute_tensor(shuffled, grid))
    assert message.startswith("distribute_tensor at ") and "test_checksums.py:" in message
    assert "rank 1 differs from rank 0" in message
    assert "manual_seed" in message and "bcast" in message and "from_local" in message


@pytest.mark.parallel([4])
def test_all_ranks_that_differ_from_most_are_named() -> None:
    grid = dc.ProcessGrid(sample=2, height=2)
    x = numbers(8, 3, 4, 4, seed=WORLD.rank % 3)
    message = raised_everywhere(ValueError, lambda: dc.distribute_tensor(x, grid))
    assert "rank 1 differs from rank 0" in message or "ranks 1-2 differ from rank 0" in message
    x = numbers(8, 3, 4, 4, seed=int(WORLD.rank == 0))
    message = raised_everywhere(ValueError, lambda: dc.distribute_tensor(x, grid))
    assert "rank 0 differs from rank 1" in message


@pytest.mark.parallel([2, 4])
def test_the_blocks_of_ranks_that_hold_the_same_box_are_compared() -> None:
    grid = dc.ProcessGrid(height=2, sample=-1)
    cut = dc.Layout(height="height")
    row = grid.coords["height"]
    dc.DistTensor.from_local(numbers(4, 3, 2, 4, seed=row), grid, cut)
    if grid.size == 2:
        return
    mine = numbers(4, 3, 2, 4, seed=row + 5 * (grid.rank == 3))
    message = raised_everywhere(ValueError, lambda: dc.DistTensor.from_local(mine, grid, cut))
    assert message.startswith("from_local at ") and "hold the same box are not" in message
    assert "rank 3 differs from rank 1" in message


@pytest.mark.parallel([2, 3])
def test_inputs_are_looked_at_in_the_first_calls_of_a_place_and_in_one_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = dc.ProcessGrid(sample=-1)
    monkeypatch.setattr(grid.journal, "debug", False)  # as where nobody asks for more
    found = []
    for call in range(1, 130):
        x = numbers(4, 2, seed=ONE if call > 16 else 0)
        try:
            dc.distribute_tensor(x, grid)
        except ValueError:
            found.append(call)
    assert found == [64, 128]


@pytest.mark.parallel([2, 3])
def test_what_differs_as_rounding_does_is_accepted_and_a_single_element_is_not() -> None:
    grid = dc.ProcessGrid(sample=-1)
    x = numbers(4, 2000)
    dc.distribute_tensor(x * (1 + ONE * 1e-7), grid)
    changed = x.clone()
    changed[3, 1001] += ONE
    raised_everywhere(ValueError, lambda: dc.distribute_tensor(changed, grid))
    raised_everywhere(ValueError, lambda: dc.distribute_tensor(x * (1 + ONE * 1e-4), grid))


def test_with_debug_everything_is_compared_each_time(tmp_path: Path) -> None:
    body = """
for call in range(6):
    big = torch.zeros(2 ** 20)
    big[12345] = grid.rank if call == 4 else 0
    try:
        dc.distribute_tensor(big.reshape(1, 1, -1, 4), grid)
    except ValueError:
        if grid.rank == 0: print("found in call", call)
"""
    assert job(tmp_path, body).stdout == ""
    assert job(tmp_path, body, DISTCONV_DEBUG="1").stdout == "found in call 4\n"


# Operands


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", ["add", "conv2d"])
def test_plain_operands_that_differ_are_named(name: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(numbers(2, 3, 8, 8), grid)
    plain = numbers(3, 3, 3, 3, seed=ONE) if name == "conv2d" else numbers(3, 1, 1, seed=ONE)
    function = F.conv2d if name == "conv2d" else torch.add
    message = raised_everywhere(ValueError, lambda: function(x, plain))
    assert name in message and f"{tuple(plain.shape)} of float32" in message
    assert "test_checksums.py:" in message and "rank 1 differs from rank 0" in message


@pytest.mark.parallel([2, 3])
def test_plain_operands_of_different_shapes_are_named() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(numbers(2, 3, 8, 8), grid)
    plain = torch.ones(3, 1, 1) if ONE else torch.ones(1, 1)
    message = raised_everywhere(DivergenceError, lambda: x * plain)
    assert "(3, 1, 1)" in message and "(1, 1)" in message and "rank 1" in message


@pytest.mark.parallel([2, 3])
def test_one_rank_alone_computes_with_what_it_has_in_full() -> None:
    grid = dc.ProcessGrid(height=-1)
    loss = dc.distribute_tensor(numbers(2, 3, 8, 8), grid).sum()
    if WORLD.rank == 0:
        assert (loss / torch.tensor(2.0)).item() == loss.item() / 2
    WORLD.Barrier()


# Models


def trained(grid: dc.ProcessGrid, fault: str, **options: bool) -> None:
    """Train for five steps, one of which differs on the last rank by the given fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1))
    dc.parallelize(model, grid, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = dc.distribute_tensor(numbers(4, 4, 6, 6), grid)
    for step in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        odd = step == 2 and WORLD.rank == WORLD.size - 1
        if fault == "buffer" and odd:
            model[1].running_mean += 1
        if fault != "skip" or not odd:
            optimizer.step()


def found_by_calls(message: str) -> bool:
    """Return whether a message is of calls that differ, as those on sharded parameters do."""
    return message.startswith("the ranks differ in") and "add_" in message


def forget(grid: dc.ProcessGrid) -> None:
    """Let the ranks find what else differs between their calls, before the next test does."""
    with suppress(DivergenceError):
        grid.journal.compare()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", [False, True])
def test_a_step_that_one_rank_skips_is_found_in_the_next_calls(shard: bool) -> None:
    grid = dc.ProcessGrid(channel=-1)
    message = raised_everywhere(RuntimeError, lambda: trained(grid, "skip", shard_parameters=shard))
    # Of what is sharded every block is the only one, and a bias before a norm differs by rounding.
    name = "1.weight" if shard else "0.weight"
    last = WORLD.size - 1
    if not (shard and found_by_calls(message)):
        assert message.startswith(f"{name} of the parallelized module is not the same on all ranks")
        assert f"rank {last} differs from rank 0" in message and "same optimizer steps" in message
    forget(grid)


@pytest.mark.parallel([4])
def test_sharded_parameters_are_compared_among_the_ranks_that_hold_a_block() -> None:
    grid = dc.ProcessGrid(sample=2, channel=2)
    message = raised_everywhere(RuntimeError, lambda: trained(grid, "skip", shard_parameters=True))
    if not found_by_calls(message):
        assert message.startswith("0.weight of the") and "rank 3 differs from rank 1" in message
    forget(grid)


@pytest.mark.parallel([2, 3])
def test_buffers_are_compared_too() -> None:
    grid = dc.ProcessGrid(sample=-1)
    message = raised_everywhere(RuntimeError, lambda: trained(grid, "buffer"))
    assert message.startswith("1.running_mean of the parallelized module")


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_ranks_have_loaded_otherwise_are_found_without_gradients(mode: Any) -> None:
    grid = dc.ProcessGrid(height=-1)
    torch.manual_seed(0)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid).eval()
    model.load_state_dict({name: (1 + ONE) * p for name, p in model.state_dict().items()})
    x = dc.distribute_tensor(numbers(2, 3, 8, 8), grid)

    def infer() -> None:
        with mode():
            for _ in range(2):
                model(x)

    message = raised_everywhere(RuntimeError, infer)
    assert message.startswith("weight of the parallelized module is not the same on all ranks")
    if WORLD.rank == 0:
        with mode():
            model(torch.ones(1, 3, 8, 8))  # alone, with what it has in full


class Choice(nn.Module):
    """One of two layers that send nothing, by the rank where it is `torn`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)])
        self.torn = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[ONE if self.torn else 0](x)
        return result


@pytest.mark.parallel([2, 3])
def test_ranks_that_choose_another_layer_late_in_training_are_warned() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(Choice(), grid)
    x = dc.distribute_tensor(numbers(2, 3, 8, 8), grid)
    for step in range(70):
        model.torn = step == 69
        if model.torn and not grid.journal.debug:
            told = rf"layers\.1\.bias .* on 1 of {WORLD.size} ranks"
            with told_on_one_rank(told):
                model(x).sum().backward()
        elif not model.torn:
            model(x).sum().backward()
    forget(grid)


@pytest.mark.parallel([1, 2, 4])
def test_ranks_that_keep_step_train_in_peace() -> None:
    for shard in (False, True):
        trained(dc.ProcessGrid(channel=-1), "none", shard_parameters=shard)
