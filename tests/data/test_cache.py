"""Samples that are kept give the mini-batches that reading gives, and are read once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distconv as dc
from distconv.data import Crop, Dataset, Flip, Function, Loader, Noise, Rotate90, Translate
from distconv.data.cache import BoxesInFolder, Homes
from tests.support.everywhere import WORLD, fails_everywhere
from tests.support.geometry import cuts_of, topologies
from tests.support.sample_files import FIELDS, SAMPLES, X, Y
from tests.support.strategies import Case, on_any_grid

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])

GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"sample": 2}, {"width": 2}],
    4: [{"sample": 4}, {"sample": 2, "height": 2}, {"sample": 2, "channel": 2}],
}

SQUARES = np.arange(7 * 2 * 6 * 6, dtype=np.float64).reshape(7, 2, 6, 6)


def tensors(batch: Any) -> list[torch.Tensor]:
    """What this rank has of a mini-batch."""
    fields = batch if isinstance(batch, tuple) else (batch,)
    return [x.local if isinstance(x, dc.data.HaloBlock) else x.to_local() for x in fields]


def equal(some: Any, others: Any) -> bool:
    pairs = zip(tensors(some), tensors(others), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@every_size
@pytest.mark.parametrize("transport", ["mpi", "torch"])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_mini_batches_are_the_same_and_files_are_read_in_the_first_epoch_only(
    folder: Path, transport: str, where: str
) -> None:
    cache = "memory" if where == "memory" else folder / "kept"
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents, transport=transport)
        plain = Loader(Dataset(FIELDS, grid), 2, shuffle=True)
        kept = Loader(Dataset(FIELDS, grid, cache=cache), 2, shuffle=True)
        for epoch in range(4):
            for found, expected in zip(kept, plain, strict=True):
                assert equal(found, expected)
            if not epoch:
                first = kept.traffic.bytes_read
                assert first == plain.traffic.bytes_read
        assert kept.traffic.bytes_read == first and plain.traffic.bytes_read == 4 * first
        received = WORLD.allreduce(kept.traffic.bytes_received)
        # Nothing travels where all ranks have a part of each sample.
        assert (received > 0) == ("sample" in extents)
    assert where == "memory" or os.listdir(folder / "kept") == []


@on_any_grid(12)
def test_samples_that_are_moved_are_made_of_kept_boxes_of_any_rank(case: Case) -> None:
    chosen = case.some(
        [Flip(), Rotate90(), Crop((5, 5)), Translate(3, "periodic"), Translate(2), Noise(1.0)]
    )
    extents = (4, 2, 5, 5) if Crop((5, 5)) in chosen else (4, 2, 6, 6)
    options: dict[str, Any] = {
        "augment": chosen,
        "layout": case.layout(extents),
        "halo": case.one_of(0, 1),
        "halo_border": case.one_of("clip", "zeros", "periodic"),
    }
    fields = {"x": SQUARES, "label": SQUARES[:, 0].astype(int), "number": np.arange(7)}
    size = case.draw(st.integers(1, 7))
    plain = Loader(Dataset(fields, case.grid, **options), size, shuffle=True)
    kept = Loader(Dataset(fields, case.grid, cache="memory", **options), size, shuffle=True)
    for epoch in range(2):
        for found, expected in zip(kept, plain, strict=True):
            assert equal(found, expected)
        if not epoch:
            first = kept.traffic.bytes_read
    assert kept.traffic.bytes_read == first


@every_size
@pytest.mark.parametrize("done", [1, 2, 4])
def test_a_loop_goes_on_in_the_middle_of_an_epoch_on_another_grid(done: int) -> None:
    def loader(extents: dict[str, int], cache: str | None) -> Loader:
        data = Dataset(X, dc.ProcessGrid(**extents), augment=[Noise(1.0)], cache=cache)
        return Loader(data, 2, shuffle=True)

    def course(loader: Loader, batches: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        while True:
            for batch in loader:
                found.append(batch.full_tensor())
                if len(found) == batches:
                    return found

    grids = GRIDS[WORLD.size]
    expected = course(loader(grids[0], None), 9)
    interrupted = loader(grids[0], "memory")
    first = course(interrupted, done)
    resumed = loader(grids[-1], "memory")
    resumed.load_state_dict(interrupted.state_dict())
    for a, b in zip(first + course(resumed, 9 - done), expected, strict=True):
        assert torch.equal(a, b)
    assert WORLD.allreduce(resumed.traffic.bytes_read) % X.nbytes == 0


@every_size
def test_samples_that_sit_out_the_first_epoch_are_read_in_it_too() -> None:
    data = Dataset(X, dc.ProcessGrid(sample=-1), cache="memory")
    loader = Loader(data, 4, shuffle=True, drop_last=True)
    list(loader)
    assert WORLD.allreduce(data.bytes_read) == X.nbytes
    for _ in range(5):
        list(loader)
    assert WORLD.allreduce(data.bytes_read) == X.nbytes


@every_size
def test_loops_that_are_left_and_loops_side_by_side_keep_one_copy() -> None:
    grid = dc.ProcessGrid(**GRIDS[WORLD.size][0])
    plain, kept = Dataset(X, grid), Dataset(X, grid, cache="memory")
    left = Loader(kept, 1, shuffle=True, seed=3)
    for place, _ in enumerate(left):
        if place == 1:
            break
    pairs = zip(Loader(kept, 2, True), Loader(kept, 3, True, seed=1), strict=False)
    expected = zip(Loader(plain, 2, True), Loader(plain, 3, True, seed=1), strict=False)
    for (a, b), (c, d) in zip(pairs, expected, strict=True):
        assert equal(a, c) and equal(b, d)
    assert equal(kept.batch([4, 0, 1]), plain.batch([4, 0, 1]))
    for a, b in zip(left, Loader(plain, batch_sampler=left.batch_sampler), strict=True):
        assert a.shape == b.shape
    before = kept.bytes_read
    for batch in (range(SAMPLES), [0, 0, 3]):
        assert equal(kept.batch(batch), plain.batch(batch))
    assert kept.bytes_read == before


@every_size
def test_a_sample_that_one_rank_cannot_read_is_an_error_on_all_and_the_ranks_go_on() -> None:
    broken = [True]

    def failing(sample: int, box: dc.Box) -> Any:
        if sample == 2 and broken and WORLD.rank == WORLD.size - 1:
            raise OSError("disk on fire")
        return X[sample][box.slices]

    source = Function(failing, SAMPLES, X.shape[1:])
    data = Dataset(source, dc.ProcessGrid(width=-1), cache="memory")
    loader = Loader(data)
    fails_everywhere(lambda: list(loader), "^disk on fire$")
    fails_everywhere(lambda: data.batch([1, 2]), "^disk on fire$")
    broken.clear()
    for found, sample in zip(loader, range(SAMPLES), strict=True):
        assert np.array_equal(found.full_tensor(), X[[sample]])


@every_size
def test_a_block_that_one_rank_cannot_convert_is_an_error_on_all() -> None:
    def failing(block: torch.Tensor, box: dc.Box) -> torch.Tensor:
        if WORLD.rank == WORLD.size - 1 and 2 * X[0].size in block.unique():
            raise ValueError("no such number")
        return block

    data = Dataset({"x": X}, dc.ProcessGrid(sample=-1), transform={"x": failing}, cache="memory")
    last = [2] * WORLD.size
    loader = Loader(data, batch_sampler=[[0, 1], last, [3], [4]])
    seen: list[Any] = []
    fails_everywhere(lambda: seen.extend(loader), "^no such number$")
    assert len(seen) == 1 and len(list(Loader(data, batch_sampler=[[3], [4], [1]]))) == 3


@every_size
def test_a_limit_is_told_before_anything_is_read() -> None:
    grid = dc.ProcessGrid(sample=-1)
    share = -(-SAMPLES // WORLD.size)
    one = X[0].nbytes
    data = Dataset(X, grid, cache="memory", cache_limit=share * one - 1)
    loader = Loader(data, SAMPLES, shuffle=True)
    fails_everywhere(
        lambda: list(loader),
        f"rank 0 would keep {share * one:,} bytes of samples, more than "
        f"cache_limit={share * one - 1:,}; use more ranks, "
        "or raise the limit, or choose cache='/folder'",
    )
    assert data.bytes_read == 0
    enough = Dataset(X, grid, cache="memory", cache_limit=share * one)
    assert len(list(Loader(enough, SAMPLES, shuffle=True))) == 1


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "/dev/null/kept"}, "/dev/null/kept cannot be written"),
        ({"cache": "memory", "cache_limit": 0}, "cache_limit=0 is not a number of bytes"),
    ],
)
def test_what_cannot_keep_samples_is_one_error_on_all_ranks(
    options: dict[str, Any], message: str
) -> None:
    grid = dc.ProcessGrid(width=-1)
    fails_everywhere(lambda: Dataset(X, grid, **options), message)


@several
def test_a_cache_on_one_rank_only_is_an_error_on_all() -> None:
    grid = dc.ProcessGrid(width=-1)
    cache = "memory" if WORLD.rank else None
    fails_everywhere(lambda: Dataset(X, grid, cache=cache), "cache is not kept on rank 0")
    data = Dataset(Y, grid, cache="memory")
    fails_everywhere(lambda: data.batch([0, 9]), r"no samples \[9\]")
    fails_everywhere(lambda: list(Loader(data, batch_sampler=[[0], [9]])), r"no samples \[9\]")


# Who keeps what


@given(st.data())
def test_every_sample_has_one_home_from_its_first_mini_batch_on(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    axes = data.draw(cuts_of(topology, 1))[0]
    homes = Homes(topology, [axes])
    numbers = st.lists(st.integers(0, 9), max_size=6)
    kept: set[int] = set()
    for _ in range(3):
        batches = data.draw(st.lists(numbers, max_size=4))
        others = range(data.draw(st.integers(0, 10)))
        arrivals = homes.plan(batches, others)
        assert len(arrivals) == len(batches)
        parts = range(topology.parts(axes))
        after = [homes.after(axes, part, arrivals) for part in parts]
        for batch, new in zip(batches, arrivals, strict=True):
            came = homes.keep(new)
            assert {sample for _, sample in came} == {s for s, _ in new[axes]} and not (
                kept & {s for s, _ in new[axes]}
            )
            kept |= {s for s, _ in new[axes]}
            assert kept.issuperset(batch)
            assert all(homes.part(axes, sample) in parts for sample in batch)
        assert not batches or kept.issuperset(others)
        assert [homes.kept(axes, part) for part in parts] == after and sum(after) == len(kept)


def test_places_of_dropped_boxes_are_used_again(tmp_path: Path) -> None:
    boxes = BoxesInFolder(tmp_path)
    first, second = (boxes.add(X[i]) for i in range(2))
    assert np.array_equal(boxes.get(second), X[1])
    boxes.drop(first)
    third, number = boxes.add(X[2]), boxes.add(np.asarray(7.0))
    assert third.offset == first.offset and number.offset == 2 * X[0].nbytes
    assert np.array_equal(boxes.get(third), X[2]) and boxes.get(number) == 7
