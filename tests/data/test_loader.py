"""Mini-batches are the serial ones on any grid, in any epoch, and after an interruption."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data import Dataset, Function, Loader, Sampler
from distconv.data.loader import prefetched
from tests.support.everywhere import WORLD, fails_everywhere
from tests.support.jobs import end_of, start
from tests.support.sample_files import SAMPLES, X

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])

GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}, {}],
    2: [{"sample": 2}, {"width": 2}],
    4: [{"sample": 4}, {"sample": 2, "height": 2}],
}


def loaders(**options: Any) -> list[Loader]:
    """Return a loader on each grid."""
    return [
        Loader(Dataset(X, dc.ProcessGrid(**extents)), **options) for extents in GRIDS[WORLD.size]
    ]


def course(loader: Loader, batches: int) -> list[Any]:
    """Return the next `batches` of a loader, whole, over as many epochs as needed."""
    found: list[Any] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.full_tensor())
            if len(found) == batches:
                break
    return found


def equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


# Which samples


@pytest.mark.parametrize(("samples", "size"), [(7, 3), (6, 3), (1, 4), (5, 5)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_is_in_one_mini_batch_of_an_epoch(
    samples: int, size: int, shuffle: bool
) -> None:
    sampler = Sampler(samples, size, shuffle=shuffle)
    for epoch in range(3):
        batches = sampler.batches(epoch)
        assert sorted(sum(batches, [])) == list(range(samples))
        assert len(batches) == len(sampler) and {len(b) for b in batches[:-1]} <= {size}


def test_incomplete_mini_batches_are_dropped_where_that_is_asked_for() -> None:
    sampler = Sampler(10, 3, shuffle=True, drop_last=True, seed=7)
    epochs = [sampler.batches(epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] and epochs[1] == sampler.batches(1)
    for batches in epochs:
        assert [len(batch) for batch in batches] == [3, 3, 3] and len(sampler) == 3
        assert len(set(sum(batches, []))) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "is not a mini-batch"),
        ({"batch_size": 6, "drop_last": True}, "larger than the 5 samples.* at most 5"),
        ({"seed": -1}, "seed=-1 is negative"),
        ({"ahead": 0}, "ahead=0 is not a number"),
    ],
)
@pytest.mark.parallel([1, 2])
def test_arguments_that_make_no_mini_batch_are_an_error_on_all_ranks(
    arguments: dict[str, Any], message: str
) -> None:
    data = Dataset(X, dc.ProcessGrid(width=-1))
    fails_everywhere(lambda: Loader(data, **arguments), message)


@every_size
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}, {"drop_last": True}])
def test_an_epoch_has_the_serial_mini_batches_on_every_grid(options: dict[str, Any]) -> None:
    sampler = Sampler(SAMPLES, 2, **options)
    for loader in loaders(batch_size=2, **options):
        assert len(loader) == len(sampler)
        for epoch in range(2):
            assert loader.epoch == epoch
            found = [batch.full_tensor() for batch in loader]
            assert equal(found, [torch.from_numpy(X[b]) for b in sampler.batches(epoch)])


@every_size
def test_mini_batches_may_be_named_one_by_one() -> None:
    named = [[3, 0], [1], [4, 4, 2]]
    for loader in loaders(batch_sampler=tuple(named)):
        for _ in range(2):
            assert equal([b.full_tensor() for b in loader], [torch.from_numpy(X[b]) for b in named])


# Going on


@every_size
@pytest.mark.parametrize("done", [0, 1, 2, 3, 4, 6])
def test_a_loop_goes_on_in_the_middle_of_an_epoch_on_another_grid(done: int) -> None:
    options = {"batch_size": 2, "shuffle": True, "seed": 5}
    straight, interrupted = loaders(**options)[0], loaders(**options)[0]
    expected = course(straight, 9)
    first = course(interrupted, done)
    state = interrupted.state_dict()
    resumed = loaders(**options)[1]
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.state_dict()) == (done // 3, state)
    assert equal(first + course(resumed, 9 - done), expected)


@every_size
def test_the_state_in_a_loop_counts_what_the_loop_has_been_given() -> None:
    for loader in loaders(batch_size=2):
        places = [loader.state_dict()]
        places += [loader.state_dict() for _ in loader]
        assert [(p["epoch"], p["batch"]) for p in places] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_loop_that_was_left_is_followed_by_the_next_epoch() -> None:
    loader = loaders(batch_size=2, shuffle=True)[0]
    for _ in loader:
        break
    assert equal(
        [batch.full_tensor() for batch in loader],
        [torch.from_numpy(X[b]) for b in Sampler(SAMPLES, 2, shuffle=True).batches(1)],
    )


def test_the_state_of_a_loader_with_other_mini_batches_is_refused() -> None:
    data = Dataset(X, dc.ProcessGrid())
    state = Loader(data, 2, True, seed=1).state_dict()
    for other, message in (
        (Loader(data, 2, True, seed=2), "loader with seed=1, this one has seed=2"),
        (Loader(data, 3, True, seed=1), "loader with batch_size=2, this one has batch_size=3"),
        (Loader(data, batch_sampler=[[0]]), "loader with batches=None, this one has"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)


# What goes wrong


@several
def test_other_mini_batches_on_one_rank_are_an_error_on_all() -> None:
    last = WORLD.rank == WORLD.size - 1
    data = Dataset(X, dc.ProcessGrid(width=-1))
    others = "rank 0" if WORLD.size == 2 else "ranks 0-2"
    fails_everywhere(
        lambda: Loader(data, 2, seed=int(last)), f"seed is 0 on {others} and 1 on rank"
    )
    fails_everywhere(
        lambda: Loader(data, batch_sampler=[[0], [1]][: 2 - last]), "batches is .* on rank"
    )


@every_size
def test_a_sample_that_one_rank_cannot_read_is_an_error_on_all_in_its_turn() -> None:
    def failing(sample: int, box: dc.Box) -> Any:
        if sample == 2 and WORLD.rank == WORLD.size - 1:
            raise OSError("disk on fire")
        return X[sample][box.slices]

    source = Function(failing, SAMPLES, X.shape[1:])
    loader = Loader(Dataset(source, dc.ProcessGrid(width=-1)))
    seen: list[int] = []

    def loop() -> None:
        seen.extend(len(batch) for batch in loader)

    fails_everywhere(loop, "^disk on fire$")
    assert len(seen) == 2
    # The ranks are still in step.
    assert [len(batch) for batch in Loader(loader.dataset, batch_sampler=[[0], [4]])] == [1, 1]


# Reading ahead


def test_mini_batches_are_read_while_the_program_computes() -> None:
    asked = threading.Event()

    def told(sample: int, box: dc.Box) -> Any:
        if sample == 2:
            asked.set()
        return X[sample][box.slices]

    loader = Loader(Dataset(Function(told, SAMPLES, X.shape[1:]), dc.ProcessGrid()))
    for place, _ in enumerate(loader):
        assert place or asked.wait(60)
    assert loader.traffic.bytes_read == X.nbytes and loader.traffic.seconds_waited > 0
    assert re.search("MB read .* s waited", str(loader.traffic))


def test_items_are_read_ahead_in_order() -> None:
    read: list[int] = []
    items = prefetched(lambda n: read.append(n) or n, range(10), ahead=2)  # type: ignore[func-returns-value]
    assert next(items) == 0
    assert list(items) == list(range(1, 10)) == read[1:]


def test_an_abandoned_loop_ends_its_thread_and_reads_no_further() -> None:
    read: list[int] = []

    def counted(sample: int, box: dc.Box) -> Any:
        read.append(sample)
        return X[sample % SAMPLES][box.slices]

    loader = iter(Loader(Dataset(Function(counted, 1000, X.shape[1:]), dc.ProcessGrid())))
    next(loader)
    loader.close()  # type: ignore[attr-defined]
    assert len(read) <= 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_an_error_in_the_background_is_raised_where_its_item_would_be() -> None:
    items = prefetched(lambda n: 1 // n, [1, 1, 0, 1])
    assert [next(items), next(items)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(items)


def test_importing_needs_neither_h5py_nor_zarr(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    program = f"""
import sys
sys.modules["h5py"] = sys.modules["zarr"] = None
import distconv as dc
grid = dc.ProcessGrid()
print(dc.data.Dataset({str(tmp_path / "x.npy")!r}, grid).batch([1]).shape)
for name in ("a.h5", "a.zarr"):
    try:
        dc.data.Dataset(name, grid)
    except dc.data.DataError as error:
        print(error)
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    # With DISTCONV_DEBUG set, a fork imports distconv anew.
    end = end_of(start(script, fresh=False, DISTCONV_DEBUG="0"))
    lines = end.stdout.splitlines()
    assert lines[0] == "torch.Size([1, 3, 6, 7])", end.stderr
    assert "needs the package h5py" in lines[1] and "needs the package zarr" in lines[2]


# Ranks that read other samples


def a_source(kind: str, folder: Path, values: np.ndarray) -> Any:
    """Return a source of samples in a torch dataset, by a function, or in files of this rank."""
    if kind == "dataset":
        return torch.utils.data.TensorDataset(torch.as_tensor(values))
    if kind == "function":
        return Function(lambda sample, box: values[(sample, *box.slices)], len(values), (1, 4))
    for i, sample in enumerate(values):
        np.save(folder / f"{i:02d}.npy", sample)
    return dc.data.open_files(folder / "*.npy", None)


@several
@pytest.mark.parametrize("kind", ["dataset", "function", "folder"])
@pytest.mark.parametrize("axis", ["sample", "width"])
def test_samples_that_differ_are_found_where_no_ranks_hold_the_same_block(
    axis: str, kind: str, tmp_path: Path
) -> None:
    values = np.arange(60 * 4, dtype=np.float32).reshape(60, 1, 4)
    compared_when_opened = sorted({i * 59 // 7 for i in range(8)})
    if WORLD.rank == WORLD.size - 1:
        kept = values[compared_when_opened]
        values = values[::-1].copy()
        values[compared_when_opened] = kept
    grid = dc.ProcessGrid(**{axis: -1})
    data = Dataset(a_source(kind, tmp_path, values), grid)
    fails_everywhere(
        lambda: list(Loader(data, batch_size=4)),
        f"of sample .* is not the same on all ranks: rank {WORLD.size - 1} differs from rank 0",
    )


@several
def test_samples_that_change_at_random_may_differ_and_few_are_read_to_compare_them() -> None:
    loaded: list[int] = []

    class Noise(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, sample: int) -> np.ndarray:
            loaded.append(sample)
            return np.random.default_rng().random(8) if random else np.full(8, float(sample))

    for random in (False, True):
        data = Dataset(Noise(), dc.ProcessGrid(sample=-1))
        loaded.clear()
        assert len(list(Loader(data, batch_size=4))) == 8
        # One sample of mini-batches 1, 2, 4 and 8 is read to be compared, again if it differs.
        assert len(loaded) <= 32 // WORLD.size + 4 * (18 if random else 1)


class Pairs(torch.utils.data.Dataset[Any]):
    """Pairs of the same random numbers, which differ between loads and between ranks."""

    fails = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fails and threading.current_thread() is threading.main_thread():
            raise OSError("the disk is gone")
        time.sleep(1e-3)
        both = torch.full((1, 8), float(np.random.default_rng().random()))
        return both, both


@several
def test_all_fields_of_a_sample_are_of_one_load_beside_a_comparison() -> None:
    data = Dataset(Pairs(), dc.ProcessGrid(sample=-1))
    for _ in range(4):
        for x, y in Loader(data, batch_size=4):
            assert torch.equal(x.to_local(), y.to_local())


@several
def test_an_error_of_a_load_to_compare_raises_on_all_ranks() -> None:
    pairs = Pairs()
    data = Dataset(pairs, dc.ProcessGrid(sample=-1))
    pairs.fails = WORLD.rank == 1
    fails_everywhere(lambda: list(Loader(data, batch_size=4)), "the disk is gone")


@several
def test_files_of_cached_samples_may_be_removed(tmp_path: Path) -> None:
    folder = Path(WORLD.bcast(str(tmp_path)))
    if WORLD.rank == 0:
        for sample in range(8):
            np.save(folder / f"{sample}.npy", np.full((1, 8), sample, "float32"))
    WORLD.barrier()
    data = Dataset(folder / "*.npy", dc.ProcessGrid(sample=-1), cache="memory")
    loader = Loader(data, batch_size=4)
    assert len(list(loader)) == 2
    WORLD.barrier()
    if WORLD.rank == 0:
        for path in folder.glob("*.npy"):
            path.unlink()
    WORLD.barrier()
    for _ in range(4):
        assert len(list(loader)) == 2
