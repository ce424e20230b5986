"""Tensors saved from any grid are read back, whole; a save that fails changes nothing."""

from __future__ import annotations

import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import distconv as dc
from distconv.data import Dataset, save
from distconv.data.writing import formats
from distconv.geometry.layout import Box, rank_box
from tests.support.everywhere import WORLD, fails_everywhere, on_rank_zero
from tests.support.geometry import cuts_of, topologies
from tests.support.mesh_runs import files_up_to
from tests.support.strategies import Case, on_any_grid

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])

TYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64)
SUFFIXES = (".h5", ".npy", ".zarr")


def numbered(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose values are their global indices."""
    return torch.arange(np.prod(shape)).reshape(*shape).to(dtype)


def content(path: Path, name: str | None = None) -> np.ndarray:
    """Return the content of a file, as other programs find it."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".zarr":
        found: Any = zarr.open(str(path), mode="r")
        return np.asarray(found[name] if name else found)[...]
    with h5py.File(path, "r") as file:
        return file[name or "data"][...]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all examples, and all ranks."""
    return WORLD.bcast(tmp_path_factory.mktemp("saved"))


@on_any_grid(24)
def test_a_tensor_is_written_from_any_grid_and_layout(case: Case, shared: Path) -> None:
    shape = case.plane(case.one_of(1, 2, 3))
    x = numbered(shape, case.one_of(*TYPES))
    path = shared / f"x{case.one_of(*SUFFIXES)}"
    chunks = None
    if path.suffix == ".zarr" and case.flag():
        chunks = [case.draw(st.integers(1, n)) for n in shape]
    assert save(path, dc.distribute_tensor(x, case.grid, case.layout(shape)), chunks=chunks) == path
    found = content(path)
    assert found.dtype == x.numpy().dtype and np.array_equal(found, x)
    again = Dataset(path, case.grid, dtype=x.dtype if x.is_floating_point() else None)
    assert torch.equal(again.batch(range(shape[0])).full_tensor(), x)
    WORLD.barrier()
    assert [found.name for found in shared.iterdir() if found.suffix == ".partial"] == []


@every_size
@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_several_tensors_are_fields_of_one_file(folder: Path, suffix: str) -> None:
    grid = dc.ProcessGrid(width=-1)
    fields = {"volume": numbered((2, 1, 3, 4, 5)), "label": numbered((2, 3, 4, 5), torch.int64)}
    made = {name: dc.distribute_tensor(x, grid) for name, x in fields.items()}
    path = save(folder / "new" / f"all{suffix}", made)
    for name, x in fields.items():
        assert np.array_equal(content(path, name), x)
    read = Dataset(path, grid, inputs="volume", targets="label").batch([1, 0])
    assert torch.equal(read[1].full_tensor(), fields["label"][[1, 0]])


@several
def test_what_requires_gradients_and_replicas_are_written_as_they_are(folder: Path) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(numbered((2, 3)).requires_grad_(), grid, dc.Layout())
    assert np.array_equal(content(save(folder / "x.npy", x * 2)), 2 * numbered((2, 3)))


@several
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_the_old_file(
    folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(width=-1)
    x = dc.distribute_tensor(numbered((1, 2, 3, 8)), grid)
    path = save(folder / f"x{suffix}", x)
    if WORLD.rank == WORLD.size - 1:

        def full(*arguments: Any) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(formats, "write_box", full)
        monkeypatch.setattr(formats, "write_chunks", full)
    fails_everywhere(lambda: save(path, x + 1), "^disk full$")
    WORLD.barrier()
    assert os.listdir(folder) == [path.name] and np.array_equal(content(path), x.full_tensor())
    monkeypatch.undo()
    assert np.array_equal(content(save(path, x + 1)), x.full_tensor() + 1)
    WORLD.barrier()
    assert os.listdir(folder) == [path.name]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_is_one_error_on_all_ranks_and_leaves_nothing(
    folder: Path, suffix: str
) -> None:
    torch.manual_seed(0)
    x = dc.distribute_tensor(torch.randn(4, 1, 256, 128), dc.ProcessGrid(height=-1))
    chunks = (1, 1, 32, 32) if suffix == ".zarr" else None
    for _ in range(3):
        with files_up_to(3000):
            fails_everywhere(
                lambda: save(folder / f"x{suffix}", x, chunks=chunks),
                f"x{suffix} cannot be written: .*File too large.*; free space",
            )
        WORLD.barrier()
        assert not list(folder.iterdir())
        WORLD.barrier()


@several
def test_a_folder_that_other_ranks_do_not_see_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(width=-1)
    x = dc.distribute_tensor(numbered((1, 2, 3, 8)), grid)
    for name in ("write_box", "write_chunks"):
        if WORLD.rank:
            real = getattr(formats, name)
            elsewhere = folder / "elsewhere"
            monkeypatch.setattr(formats, name, lambda _, *a, real=real, p=elsewhere: real(p, *a))
    for suffix in SUFFIXES:
        fails_everywhere(
            lambda suffix=suffix: save(folder / f"x{suffix}", x), "system that all ranks share"
        )


WRONG: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "suffix": ("x.txt", torch.ones(2, 3), {}, "'.txt' is not supported"),
    "names": ("x.npy", {"x": torch.ones(2, 3)}, {}, "one array without a name; save .'x'."),
    "slash": ("x.h5", {"a/b": torch.ones(2, 3)}, {}, "'a/b' is not a valid name"),
    "nothing": ("x.h5", torch.ones(2, 0), {}, "shape .2, 0. holds no samples"),
    "type": ("x.h5", torch.ones(2, 3, dtype=torch.bfloat16), {}, "bfloat16.*save x.float"),
    "chunks of HDF5": ("x.h5", torch.ones(2, 3), {"chunks": (1, 3)}, "apply to .zarr"),
    "chunks": ("x.zarr", torch.ones(2, 3), {"chunks": (1, 0)}, "expected an extent of 1 or more"),
    "a folder": ("folder.h5", torch.ones(2, 3), {}, "is a folder, which would be replaced"),
    "others' folder": ("folder.zarr", torch.ones(2, 3), {}, "is not a zarr folder"),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_saved_is_one_error_on_all_ranks(folder: Path, kind: str) -> None:
    name, values, options, message = WRONG[kind]
    for other in ("folder.h5", "folder.zarr"):
        (folder / other / "others").mkdir(parents=True, exist_ok=True)
    grid = dc.ProcessGrid(height=-1)
    several = isinstance(values, dict)
    named = values if several else {None: values}
    made = {key: dc.distribute_tensor(x, grid) for key, x in named.items()}
    WORLD.barrier()
    fails_everywhere(
        lambda: save(folder / name, made if several else made[None], **options), message
    )
    WORLD.barrier()
    assert sorted(os.listdir(folder)) == ["folder.h5", "folder.zarr"]


def test_plain_tensors_are_refused() -> None:
    for wrong in (torch.ones(2), {"x": torch.ones(2)}):
        with pytest.raises(TypeError, match="expected a DistTensor"):
            save("x.h5", wrong)  # type: ignore[arg-type]


@every_size
def test_what_killed_writers_have_left_is_removed_and_nothing_else(folder: Path) -> None:
    left = [folder / f"x.zarr.{n * 16}.partial" for n in "12"]
    others = ["x.zarr.1234.partial", f"xyzarr.{'1' * 16}.partial"]

    def leave() -> None:
        left[0].mkdir()
        (left[0] / "zarr.json").write_text("{}")
        for path in (left[1], *map(folder.joinpath, others)):
            path.write_text("")

    on_rank_zero(leave)
    save(folder / "x.zarr", dc.distribute_tensor(torch.ones(2, 3), dc.ProcessGrid(sample=-1)))
    WORLD.barrier()
    assert sorted(os.listdir(folder)) == sorted(["x.zarr", *others])


@pytest.mark.parallel([1, 2])
def test_a_writer_killed_between_two_renames_loses_nothing_to_a_save_that_fails(
    folder: Path,
) -> None:
    x = dc.distribute_tensor(torch.ones(2, 3), dc.ProcessGrid(sample=-1))
    path = save(folder / "x.zarr", x)
    halves = [f"x.zarr.{n * 16}.partial" for n in "12"]

    def killed() -> None:
        shutil.copytree(path, folder / halves[0])
        path.rename(folder / halves[1])

    on_rank_zero(killed)
    with files_up_to(0):
        fails_everywhere(lambda: save(path, x), "cannot be written")
    WORLD.barrier()
    assert sorted(os.listdir(folder)) == halves
    WORLD.barrier()
    save(path, x + 1)
    WORLD.barrier()
    assert os.listdir(folder) == ["x.zarr"] and np.array_equal(content(path), np.full((2, 3), 2))


# Index arithmetic


@given(st.data())
def test_ranks_that_write_in_one_turn_share_no_chunk(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cuts = data.draw(cuts_of(topology, len(shape)))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    start = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    counts = formats.turns(shape, cuts, topology, chunks, start)
    written: dict[tuple[int, ...], Box] = {}
    for rank in range(topology.size):
        box = rank_box(shape, cuts, topology, rank)
        turn = formats.turn_of(rank, cuts, topology, counts)
        assert 0 <= turn < np.prod(counts)
        touched = [
            range((first + a) // c, -(-(first + b) // c))
            for first, a, b, c in zip(start, box.start, box.stop, chunks, strict=True)
        ]
        if box.size:
            for place in product(*touched):
                assert written.setdefault((turn, *place), box) == box


@given(st.data())
def test_chunks_by_default_need_few_turns_and_none_where_the_cut_is_even(
    data: st.DataObject,
) -> None:
    topology = data.draw(topologies())
    shape = tuple(data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=5)))
    cuts = data.draw(cuts_of(topology, len(shape)))
    chunks = formats.default_chunks(shape, cuts, topology, 4)
    assert chunks[0] == 1 and 4 * np.prod(chunks) <= 2**24
    counts = formats.turns(shape, cuts, topology, chunks, (0,) * len(shape))
    for count, n, axes, chunk in zip(counts, shape, cuts, chunks, strict=True):
        parts = topology.parts(axes)
        assert count <= 2 + (n < 2 * parts)
        if n % parts == 0 and n // parts % chunk == 0:
            assert count == 1


@given(st.data())
def test_boxes_are_written_where_they_belong(data: st.DataObject) -> None:
    path = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"boxes-{os.getpid()}"
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    box, whole = Box(start, stop), numbered(shape, torch.int32).numpy()
    path.write_bytes(bytes(7 + whole.nbytes))
    try:
        formats.write_box(path, 7, shape, box, np.ascontiguousarray(whole[box.slices]))
        expected = np.zeros_like(whole)
        expected[box.slices] = whole[box.slices]
        assert path.read_bytes() == bytes(7) + expected.tobytes()
    finally:
        path.unlink()


@several
@pytest.mark.parametrize("kind", ["path", "tensors", "chunks"])
def test_arguments_that_differ_between_ranks_are_refused_on_every_rank(
    folder: Path, kind: str
) -> None:
    last = WORLD.rank == WORLD.size - 1
    x = dc.distribute_tensor(numbered((4, 6)), dc.ProcessGrid(sample=-1))
    path = folder / ("b.zarr" if last and kind == "path" else "a.zarr")
    named = {"b" if last and kind == "tensors" else "a": x}
    chunks = (1, 2 if last and kind == "chunks" else 3)
    fails_everywhere(lambda: save(path, named, chunks={"a": chunks}), f"the ranks differ: .*{kind}")
    assert not list(folder.iterdir())
