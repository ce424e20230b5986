"""A grid fits its ranks or says on all of them why not; communicators are made once and kept."""

from __future__ import annotations

import copy
import pickle
import random
from math import prod

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.geometry.topology import AXES
from tests.support.serial import random_grid

RANKS = [1, 2, 4, 6, 8]
WORLD = MPI.COMM_WORLD


@pytest.mark.parallel(RANKS)
def test_a_grid_knows_its_extents_and_where_this_rank_is() -> None:
    rng = random.Random(0)
    for _ in range(20):
        grid = random_grid(rng)
        assert prod(grid.shape.values()) == grid.size == WORLD.size
        assert tuple(grid.shape) == tuple(grid.coords) == AXES
        assert grid.rank == grid.comm.rank == WORLD.rank and grid.comm.size == WORLD.size
        assert all(0 <= grid.coords[axis] < grid.shape[axis] for axis in AXES)
        assert len(set(WORLD.allgather(tuple(grid.coords.values())))) == WORLD.size


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", ["topology", "rank", "size", "device", "transport"])
def test_what_a_grid_is_cannot_be_changed(name: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    with pytest.raises(AttributeError, match=f"the {name} of a grid is fixed"):
        setattr(grid, name, getattr(grid, name))


@pytest.mark.parallel(RANKS)
def test_one_axis_takes_the_ranks_that_the_others_leave() -> None:
    assert dc.ProcessGrid(height=-1).shape["height"] == WORLD.size
    for n in (n for n in range(1, WORLD.size + 1) if WORLD.size % n == 0):
        grid = dc.ProcessGrid(sample=-1, width=n)
        assert grid.shape == dict.fromkeys(AXES, 1) | {"sample": WORLD.size // n, "width": n}
        assert grid == dc.ProcessGrid(sample=np.int64(-1), width=np.int64(n))


@pytest.mark.parallel([8])
@pytest.mark.parametrize(
    ("extents", "message"),
    [
        (
            {"height": 3},
            "height=3 does not divide 8 ranks; choose 1, 2, 4, 8, or -1. This grid needs 3 ranks, "
            "8 were started: mpiexec -n 3 ...",
        ),
        (
            {"sample": 4, "width": 4},
            "width=4 does not divide 8 ranks beside sample=4; choose 1, 2, or -1",
        ),
        ({"sample": 16}, "sample=16 does not divide 8 ranks; choose 1, 2, 4, 8, or -1"),
        (
            {"sample": 2, "height": 2},
            "sample=2, height=2 makes 4 of 8 ranks; set one axis to -1 to use all ranks. This grid "
            "needs 4 ranks, 8 were started: mpiexec -n 4 ...",
        ),
        (
            {},
            "all axes 1 makes 1 of 8 ranks; set one axis to -1 to use all ranks. This grid needs 1",
        ),
        ({"height": -1, "width": -1}, "only one axis can be -1, not height and width"),
        ({"depth": 0}, "depth=0 is not a number of ranks; choose an integer of 1 or more, or -1"),
        ({"depth": -2}, "depth=-2 is not a number of ranks"),
        ({"depth": 2.0}, "depth=2.0 is not a number of ranks"),
        ({"depth": "2"}, "depth='2' is not a number of ranks"),
        ({"depth": True}, "depth=True is not a number of ranks"),
        (
            {"height": -1, "transport": "tcp"},
            "transport='tcp' is unknown; choose 'torch' or 'mpi' or 'nccl'",
        ),
        ({"height": -1, "transport": "nccl"}, "it requires GPUs, but the ranks compute on CPUs"),
        ({"height": -1, "device": "cuda"}, "device='cuda', and rank 0 sees 0 GPUs"),
        ({"height": -1, "device": "mps"}, "device='mps' is not supported; choose 'cpu', 'cuda'"),
        ({"height": -1, "device": "cuda:-1"}, "device='cuda:-1' is not supported"),
    ],
)
def test_a_grid_that_does_not_fit_says_so_on_all_ranks(extents: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        dc.ProcessGrid(**extents)
    texts = WORLD.allgather(str(error.value))
    assert texts == [texts[0]] * WORLD.size
    assert texts[0].startswith("ProcessGrid: ") and message in texts[0]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"height": 5}, f"needs 5 ranks, {WORLD.size} were started: mpiexec -n 5 ... .on rank 1."),
        (
            {"width": -1},
            f"width={WORLD.size} on rank 1 and height={WORLD.size} on rank 0; pass the",
        ),
        ({"height": -1, "device": "tpu"}, "device='tpu' is not supported"),
        ({"height": -1, "transport": "tcp"}, "transport='tcp' is unknown"),
    ],
)
def test_what_one_rank_alone_asks_for_is_an_error_on_all(asked: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        dc.ProcessGrid(**(asked if WORLD.rank == 1 else {"height": -1}))
    assert "on rank 1" in str(error.value)
    assert len(set(WORLD.allgather(str(error.value)))) == 1


@pytest.mark.parallel([2, 4])
def test_variables_of_one_rank_alone_are_errors_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = dc.ProcessGrid(height=-1).journal
    monkeypatch.setattr(journal, "debug", WORLD.rank == 1)
    with pytest.raises(ValueError, match="DISTCONV_DEBUG is set on rank 1 but not on rank 0"):
        dc.ProcessGrid(sample=-1)
    monkeypatch.setattr(journal, "debug", False)
    monkeypatch.setenv("DISTCONV_TIMEOUT", "soon" if WORLD.rank == 1 else "300")
    with pytest.raises(ValueError, match="DISTCONV_TIMEOUT='soon' is not a time limit.*rank 1"):
        dc.ProcessGrid(sample=-1)


@pytest.mark.parallel([1])
def test_what_is_no_communicator_is_refused() -> None:
    with pytest.raises(TypeError, match="comm='world' is not an intracommunicator"):
        dc.ProcessGrid("world")  # type: ignore[arg-type]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("given", "extents", "said"),
    [
        ((), {"batch": 2}, "batch=2 is not an axis"),
        ((), {"widht": 2}, "widht=2 is not an axis"),
        ((2,), {}, "2 is a number without an axis; name the axis, as in ProcessGrid(sample=2)"),
    ],
)
def test_what_is_no_axis_names_the_six(given: tuple, extents: dict, said: str) -> None:
    with pytest.raises(TypeError) as error:
        dc.ProcessGrid(*given, **extents)
    assert said in str(error.value)
    assert "sample, channel, filter, depth, height, width" in str(error.value)


@pytest.mark.parallel([2])
def test_a_rank_outside_the_communicator_cannot_make_a_grid() -> None:
    part = WORLD.Split(0 if WORLD.rank == 0 else MPI.UNDEFINED)
    if WORLD.rank == 0:
        assert dc.ProcessGrid(part).size == 1
        part.Free()
    else:
        with pytest.raises(ValueError, match="this rank is not a member of comm"):
            dc.ProcessGrid(part)


@pytest.mark.parallel([4])
def test_a_grid_prints_the_axes_of_several_ranks() -> None:
    assert repr(dc.ProcessGrid(sample=2, width=2)) == "ProcessGrid(sample=2, width=2) on 4 ranks"
    assert repr(dc.ProcessGrid(MPI.COMM_SELF)) == "ProcessGrid() on 1 rank"


@pytest.mark.parallel([2, 4])
def test_grids_are_equal_by_their_ranks_and_extents() -> None:
    grid = dc.ProcessGrid(height=-1)
    turned = WORLD.Split(0, -WORLD.rank)
    assert grid == dc.ProcessGrid(height=WORLD.size) and grid == dc.ProcessGrid(WORLD, height=-1)
    assert hash(grid) == hash(dc.ProcessGrid(height=-1))
    assert grid != dc.ProcessGrid(width=-1)
    assert grid != dc.ProcessGrid(turned, height=-1)
    assert dc.ProcessGrid(turned, height=-1).rank == WORLD.size - 1 - WORLD.rank
    assert grid != "ProcessGrid"
    turned.Free()


@pytest.mark.parallel([1, 2])
def test_a_grid_is_copied_as_itself_and_cannot_be_pickled() -> None:
    grid = dc.ProcessGrid(height=-1)
    assert copy.deepcopy(grid) is grid and copy.copy(grid) is grid
    with pytest.raises(TypeError, match="belongs to its MPI job and cannot be pickled"):
        pickle.dumps(grid)


@pytest.mark.parallel(RANKS)
def test_subcommunicators_join_the_ranks_along_their_axes_in_grid_order() -> None:
    rng = random.Random(1)
    for _ in range(20):
        grid = random_grid(rng)
        axes = rng.sample(AXES, rng.randrange(len(AXES) + 1))
        comm = grid.communicator(axes)
        everyone = WORLD.allgather(tuple(grid.coords.values()))
        mine = everyone[WORLD.rank]
        fixed = [i for i, axis in enumerate(AXES) if axis not in axes]
        expected = [
            r for r, place in enumerate(everyone) if all(place[i] == mine[i] for i in fixed)
        ]
        assert comm.allgather(WORLD.rank) == expected
        assert comm.size == grid.topology.parts(axes)


@pytest.mark.parallel([2, 4])
def test_communicators_are_kept_for_every_grid_on_the_same_ranks() -> None:
    first, second = dc.ProcessGrid(height=-1), dc.ProcessGrid(width=-1)
    assert first.comm is second.comm
    assert first.transport is second.transport
    assert first.communicator(["height"]) is second.communicator(["width"])
    assert first.communicator(["height"]) is not first.communicator(["height"], "gradients")
    assert first.communicator(["height"]) is not first.comm


@pytest.mark.parallel([2])
def test_thousands_of_grids_do_not_exhaust_mpi() -> None:
    rng = random.Random(2)
    for i in range(2400):  # more than MPI has communicators
        if i % 3:
            grid = random_grid(rng)
        else:
            comm = WORLD.Split(WORLD.rank % 2, rng.choice([-1, 1]) * WORLD.rank)
            grid = dc.ProcessGrid(comm, **{rng.choice(AXES): -1})
            comm.Free()
        comm = grid.communicator(rng.sample(AXES, 2), rng.choice(["reductions", "gradients"]))
        assert comm.size <= grid.size
    assert grid.comm.allreduce(1) == grid.size


@pytest.mark.parallel([2, 4, 6, 8])
def test_two_halves_of_the_ranks_work_apart_from_each_other() -> None:
    half = WORLD.rank % 2
    comm = WORLD.Split(half, -WORLD.rank)
    grid = dc.ProcessGrid(comm, height=-1)
    comm.Free()
    assert grid.size == WORLD.size // 2
    ranks = grid.comm.allgather(WORLD.rank)
    assert ranks == sorted((r for r in range(WORLD.size) if r % 2 == half), reverse=True)
    x = torch.arange(2.0 * 3 * 7 * 5).reshape(2, 3, 7, 5) * (1 + half)
    # The halves do a different number of exchanges.
    for _ in range(1 + 3 * half):
        d = dc.distribute_tensor(x, grid).requires_grad_()
        y = torch.nn.functional.avg_pool2d(d, 3, 1, 1)
        assert torch.allclose(y.detach().full_tensor(), torch.nn.functional.avg_pool2d(x, 3, 1, 1))
        (y * y).sum().backward()
        serial = x.clone().requires_grad_()
        (torch.nn.functional.avg_pool2d(serial, 3, 1, 1) ** 2).sum().backward()
        assert torch.allclose(d.grad.full_tensor(), serial.grad)
        assert torch.equal(d.detach().redistribute(dc.Layout(width="height")).full_tensor(), x)
