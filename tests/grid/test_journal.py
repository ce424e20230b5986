"""Ranks that run different operators learn it before a message goes astray, all with one error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.grid.journal import DivergenceError
from tests.grid.test_abort import job

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1
pytestmark = pytest.mark.usefixtures("first_calls")


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[dc.ProcessGrid]:
    """Make a grid over all ranks whose every step is compared."""
    made = dc.ProcessGrid(height=-1)
    monkeypatch.setattr(made.journal, "debug", True)
    yield made


def differing(usual: Callable[[], Any], other: Callable[[], Any]) -> str:
    """Return the error that all ranks get where the last one runs something else."""
    with pytest.raises(DivergenceError) as caught:
        (other if WORLD.rank == LAST else usual)()
    texts = WORLD.allgather(str(caught.value))
    assert len(set(texts)) == 1, "all ranks get one error"
    return texts[0]


def planes(grid: dc.ProcessGrid, layout: dc.Layout | None = None) -> dc.DistTensor:
    x = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    return dc.distribute_tensor(x, grid, layout)


def in_half(x: dc.DistTensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(x)


LOCAL: dict[str, tuple[Callable[[dc.DistTensor], Any], Callable[[dc.DistTensor], Any]]] = {
    "another number": (lambda x: x * 2.0, lambda x: x * 3.0),
    "another function": (torch.relu, torch.tanh),
    "a flip by chance": (lambda x: x, lambda x: x.flip(3)),
    "another slice": (lambda x: x[..., 1:], lambda x: x[..., :-1]),
    "another value beside": (lambda x: F.pad(x, (1, 1)), lambda x: F.pad(x, (1, 1), value=1.0)),
    "another autocast": (torch.tanh, in_half),
}


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[dc.ProcessGrid]:
    """Make a grid over all ranks as at the start of a program, whatever tests have run before."""
    made = dc.ProcessGrid(height=-1)
    monkeypatch.setattr(made.journal, "debug", False)
    yield made


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("case", LOCAL)
def test_first_calls_of_functions_that_send_nothing_are_compared_by_default(
    unknown: dc.ProcessGrid, case: str
) -> None:
    x = planes(unknown)
    usual, other = LOCAL[case]

    def train(call: Callable[[dc.DistTensor], Any]) -> None:
        for step in range(80):
            (call if step == 7 else usual)(x)
            x.sum()

    error = differing(lambda: train(usual), lambda: train(other))
    assert "call" in error and "test_journal.py" in error


@pytest.mark.parallel([2, 3])
def test_a_late_call_of_a_function_that_sends_nothing_is_found(unknown: dc.ProcessGrid) -> None:
    x = planes(unknown)

    def train(odd: bool) -> None:
        for step in range(150):
            x.tanh()
            if odd and step == 40:
                x.tanh()
            x.sum()

    assert "tanh" in differing(lambda: train(False), lambda: train(True))


@pytest.mark.parallel([2, 3])
def test_what_a_rank_keeps_or_prints_is_its_own_affair(unknown: dc.ProcessGrid) -> None:
    x = planes(unknown)
    mean = x.mean()
    for step in range(100):
        if unknown.rank == 0 and step < 5:
            kept = [x.detach(), x.clone(), x.detach().cpu(), x.contiguous()]
            assert all(y.shape == x.shape for y in kept) and f"{float(mean * 2):.3f}" and str(x)
        x.sum()
    torch.testing.assert_close(x.sum().full_tensor(), x.full_tensor().sum())


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("case", LOCAL)
def test_functions_that_send_nothing_are_compared_with_the_next_step(
    grid: dc.ProcessGrid, case: str
) -> None:
    x = planes(grid)
    usual, other = LOCAL[case]
    error = differing(lambda: usual(x).sum(), lambda: other(x).sum())
    assert "call" in error and "test_journal.py" in error
    # What one rank does with a whole value, or keeps of a cut one, is its own affair.
    mean = x.mean()
    if grid.rank == 0:
        assert f"{float(mean * 2):.3f}" and x.detach().shape == x.shape
    torch.testing.assert_close(usual(x).sum().full_tensor(), usual(x).full_tensor().sum())


def averaged(x: dc.DistTensor) -> Any:
    return F.avg_pool2d(x, 3, 1, 1)


def convolved(x: dc.DistTensor) -> Any:
    return F.conv2d(x, torch.ones(3, 3, 3, 3), padding=1)


def on_another_grid(x: dc.DistTensor) -> Any:
    return averaged(planes(dc.ProcessGrid(width=-1)))


Call = Callable[[dc.DistTensor], Any]
SENDING: dict[str, tuple[Call, Call, str]] = {
    "a stride of equal output": (
        lambda x: F.max_pool2d(x, 2, stride=16),
        lambda x: F.max_pool2d(x, 2, stride=17),
        "max_pool2d stride=16 stride=17",
    ),
    "two calls of equal size": (
        lambda x: (convolved(x), averaged(x)),
        lambda x: (averaged(x), convolved(x)),
        "conv2d avg_pool2d",
    ),
    "a layout": (
        lambda x: x.redistribute(dc.Layout(width="height")),
        lambda x: x.redistribute(dc.Layout(channel="height")),
        "width='height' channel='height'",
    ),
    "a grid over the same ranks": (
        lambda x: (planes(dc.ProcessGrid(width=-1)), averaged(x)),
        on_another_grid,
        "Layout(height='height') Layout(width='width')",
    ),
    "a reduction in place of an exchange": (averaged, lambda x: x.sum(), "avg_pool2d sum"),
    "a mode of a module": (
        lambda x: averaged(nn.BatchNorm2d(3)(x)),
        lambda x: averaged(nn.BatchNorm2d(3).eval()(x)),
        "batch_norm True False",
    ),
}
"""Calls that differ: what most ranks run, what one does, and the words of the error."""


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("case", SENDING)
def test_what_differs_in_functions_that_send_is_named(grid: dc.ProcessGrid, case: str) -> None:
    usual, other, words = SENDING[case]
    x = planes(grid)
    error = differing(lambda: usual(x), lambda: other(x))
    assert all(word in error for word in words.split())
    assert f"rank {LAST}" in error and "test_journal.py" in error


@pytest.mark.parallel([2, 3])
def test_equal_calls_on_two_tensors_in_another_order_are_named(grid: dc.ProcessGrid) -> None:
    x, y = planes(grid), planes(grid)
    error = differing(lambda: [t.sum() for t in (x, y)], lambda: [t.sum() for t in (y, x)])
    assert "sum(made after step" in error and "test_journal.py" in error


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("function", [torch.sum, torch.relu], ids=lambda f: f.__name__)
def test_first_calls_on_two_tensors_in_another_order_are_named(
    function: Callable[[dc.DistTensor], Any], unknown: dc.ProcessGrid
) -> None:
    x, y = planes(unknown), planes(unknown)

    def call(*tensors: dc.DistTensor) -> None:
        for t in tensors:
            function(t)
        unknown.journal.compare()

    error = differing(lambda: call(x, y), lambda: call(y, x))
    assert f"{function.__name__}(made after step" in error
    assert x.sum().item() == y.sum().item()


@pytest.mark.parallel([2, 3])
def test_a_copy_that_one_rank_makes_alone_is_as_good(unknown: dc.ProcessGrid) -> None:
    x = planes(unknown)
    expected = x.sum().item()
    if WORLD.rank == 0:
        x = x.clone()
    assert x.sum().item() == expected


@pytest.mark.parallel([2, 3])
def test_a_change_of_format_that_a_rank_without_rows_need_not_make_is_no_difference(
    grid: dc.ProcessGrid,
) -> None:
    x = dc.distribute_tensor(torch.ones(2, 3, 1, 8), grid)
    y = x.to(memory_format=torch.channels_last)
    y = y.to(memory_format=torch.channels_last)
    assert y.sum().item() == 48


@pytest.mark.parallel([2, 3])
def test_ranks_that_have_caught_the_error_go_on_right(grid: dc.ProcessGrid) -> None:
    """Check hundreds of calls in random order, of which many differ on one rank."""
    whole = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    x = dc.distribute_tensor(whole, grid)
    calls: list[Callable[[Any], Any]] = [
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool2d(x, 5, 1, 2),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.conv2d(x, torch.ones(3, 3, 3, 3), padding=1),
        lambda x: F.conv2d(x, torch.ones(3, 3, 3, 3), padding=2, dilation=2),
        lambda x: x.sum(),
        lambda x: x.sum(dim=2),
        lambda x: x.amax(dim=(2, 3)),
        lambda x: x.flip(2),
        lambda x: x.roll(3, 2),
        lambda x: torch.cumsum(x, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    ]
    expected = [call(whole) for call in calls]
    rng, found = random.Random(5), 0
    for _ in range(200):
        mine = usual = rng.randrange(len(calls))
        odd, who = rng.randrange(len(calls)), rng.randrange(WORLD.size)
        if rng.random() < 0.5:
            mine = odd if WORLD.rank == who else usual
        try:
            result = calls[mine](x)
            raised = False
        except DivergenceError:
            raised = True
        everywhere = WORLD.allgather((raised, mine))
        assert len({raised for raised, _ in everywhere}) == 1, everywhere
        if raised:
            found += 1
            assert len({mine for _, mine in everywhere}) > 1, "an error without a reason"
        else:
            torch.testing.assert_close(result.full_tensor(), expected[mine], rtol=1e-5, atol=1e-5)
    assert found > 30


@pytest.mark.parallel([2, 3])
def test_tensors_made_while_ranks_differ_are_as_good_as_others(unknown: dc.ProcessGrid) -> None:
    x = planes(unknown)

    def diverge(odd: bool) -> dc.DistTensor:
        y = (x.tanh() if odd else x) * 2
        with pytest.raises(DivergenceError):
            y.sum()
        return y

    assert diverge(WORLD.rank == LAST).amax().item() > 0


@pytest.mark.parallel([2, 3])
def test_blocks_among_the_arguments_of_a_backward_pass_may_differ(grid: dc.ProcessGrid) -> None:
    block = torch.ones(1, 1, 5 * WORLD.size - 1, 2).tensor_split(WORLD.size, 2)[WORLD.rank]
    block.requires_grad_()
    loss = dc.DistTensor.from_local(block, grid).sum()
    assert torch.equal(torch.autograd.grad(loss, block)[0], torch.ones_like(block))


@pytest.mark.parallel([2, 3])
def test_equal_numbers_of_other_types_are_other_arguments(grid: dc.ProcessGrid) -> None:
    x = planes(grid)
    (x * 2).sum()
    assert "2.0" in differing(lambda: (x * 2).sum(), lambda: (x * 2.0).sum())
    differing(lambda: (x * 1.0).sum(), lambda: (x * 3.0).sum())
    (x * 3).sum()  # one rank has met 3.0 before, the others have not
    (x * np.longdouble(2)).sum()  # of which numpy makes no number of Python's


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axis", ["height", "sample"])
@pytest.mark.parametrize("size", [16, 5])
def test_arguments_that_only_some_ranks_have_met_before_are_compared_before_any_message(
    unknown: dc.ProcessGrid, axis: str, size: int
) -> None:
    grid = dc.ProcessGrid(**{axis: WORLD.size})
    shape = (1, 1, size, 4) if axis == "height" else (size, 1, 1, 4)
    y = dc.distribute_tensor(torch.arange(4.0 * size).reshape(shape), grid)
    for step in range(3):
        i = WORLD.rank % 2 if step == 1 else 0
        part = (slice(None),) * (2 if axis == "height" else 0) + (slice(i, i + 4),)
        if step == 1:
            with pytest.raises(DivergenceError, match="getitem.*slice, 0, 4.*slice, 1, 5"):
                y[part].sum()
        else:
            torch.testing.assert_close(y[part].sum().item(), y.full_tensor()[part].sum().item())


@pytest.mark.parallel([2, 3])
def test_calls_in_another_order_are_found_later_where_their_messages_are_alike() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = planes(grid)
    calls = [lambda: F.avg_pool2d(x, 3, 1, 1), lambda: F.max_pool2d(x, 3, 1, 1)]
    with dc.method("assembled"):
        for i in range(40):
            calls[i % 2]()
        with pytest.raises(DivergenceError, match="avg_pool2d"):
            for i in range(300):
                calls[i == 20 and WORLD.rank == LAST]()


@pytest.mark.parallel([2, 3])
def test_other_weights_in_the_same_function_are_found_later(unknown: dc.ProcessGrid) -> None:
    x = planes(unknown)
    convolutions = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)]
    dc.parallelize(nn.Sequential(*convolutions), unknown)
    with dc.method("assembled"), torch.no_grad():
        for conv in convolutions:
            conv(x)
        with pytest.raises(DivergenceError, match="parameter [02].*parameter [02]"):
            for i in range(300):
                odd = i > 40 and WORLD.rank == LAST
                for conv in convolutions[:: -1 if odd else 1]:
                    conv(x)


@pytest.mark.parallel([2, 3])
def test_calls_on_two_grids_in_another_order_are_found_later(unknown: dc.ProcessGrid) -> None:
    x, y = planes(unknown), planes(dc.ProcessGrid(width=-1)).redistribute(dc.Layout(height="width"))
    with dc.method("assembled"):
        F.avg_pool2d(x, 3, 1, 1), F.avg_pool2d(y, 3, 1, 1)
        with pytest.raises(DivergenceError, match=r"avg_pool2d.* on .*avg_pool2d"):
            for i in range(300):
                odd = i == 45 and WORLD.rank == LAST
                for z in (y, x) if odd else (x, y):
                    F.avg_pool2d(z, 3, 1, 1)


def test_two_threads_on_one_grid_are_an_error(tmp_path: Path) -> None:
    body = """
import threading
failed = []
def work():
    try:
        for _ in range(200): torch.nn.functional.avg_pool2d(x, 3, 1, 1)
    except RuntimeError as error:
        failed.append(error)
threads = [threading.Thread(target=work) for _ in range(2)]
for t in threads: t.start()
for t in threads: t.join()
raise failed[0]
"""
    end = job(tmp_path, body)
    assert end.returncode != 0
    assert "two threads use one grid" in end.stderr and "script.py" in end.stderr


def test_a_thread_may_go_on_where_another_has_stopped(tmp_path: Path) -> None:
    body = """
import threading
def work(): torch.nn.functional.avg_pool2d(x, 3, 1, 1)
for _ in range(3):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
"""
    end = job(tmp_path, body)
    assert (end.returncode, end.stderr) == (0, "")


@pytest.mark.parallel([2, 4])
def test_the_others_are_told_of_an_error_that_one_rank_has_caught(grid: dc.ProcessGrid) -> None:
    x = planes(grid)

    def caught() -> None:
        with pytest.raises((RuntimeError, ValueError)):
            x.reshape(7)
        x.sum()

    told = differing(lambda: F.avg_pool2d(x, 3, 1, 1), caught)
    assert "Errors differ. " in told
    assert f"rank {LAST}: " in told and "in torch.Tensor.reshape at " in told
