"""`convert` copies any format to zarr in chunks for a grid, and continues after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distconv as dc
from distconv.__main__ import main
from distconv.data.sources.opening import open_sources
from distconv.data.writing import convert as module
from distconv.geometry.layout import Box
from tests.data.test_volumes import AFFINE, netcdf, nifti
from tests.support.everywhere import WORLD, ended_with_one_line, fails_everywhere, on_rank_zero

every_size = pytest.mark.parallel([1, 2, 4])
both = pytest.mark.parallel([1, 2])

X = np.random.default_rng(0).integers(0, 60_000, (3, 2, 12, 10, 9)).astype(np.uint16)


def content(path: Path, *fields: str) -> dict[Any, np.ndarray]:
    """Return all samples of each array of a file."""
    found = {}
    for name, own in open_sources(path, fields).items():
        found[name] = np.empty((own.samples, *own.shape), own.dtype)
        for i in range(own.samples):
            own.read_into(found[name][i, ...], i, Box((0,) * len(own.shape), own.shape))
    return found


@every_size
@pytest.mark.parametrize("memory", [1, 2000, 2**28])
@pytest.mark.parametrize("chunks", [None, (1, 2, 5, 4, 9), (2, 1, 12, 3, 20)])
def test_a_copy_has_the_values_the_type_and_the_chunks_asked_for(
    folder: Path, memory: int, chunks: Any
) -> None:
    on_rank_zero(lambda: np.save(folder / "x.npy", X))
    grid = dc.ProcessGrid(sample=-1)
    readers = {"depth": 4, "width": 2}
    path = folder / "x.zarr"
    assert path == dc.data.convert(
        folder / "x.npy", path, grid, chunks=chunks, readers=readers, memory=memory
    )
    (source,) = open_sources(path).values()
    expected = (1, 2, 3, 10, 5) if chunks is None else tuple(map(min, chunks, X.shape))
    assert (source.chunks, source.dtype) == (expected, np.uint16)
    assert np.array_equal(content(path)[None], X)
    WORLD.barrier()
    assert sorted(found.name for found in folder.iterdir()) == ["x.npy", "x.zarr"]


class Counted(dc.data.Source):
    """A source of planes, which counts the bytes that are fetched."""

    name, samples, shape, dtype = "counted", 3, X.shape[1:], X.dtype
    chunks = (1, 2, 1, 10, 9)

    def __init__(self) -> None:
        self.reads, self.boxes = 0, []

    def read_into(self, out: Any, sample: int, box: Box) -> None:
        self.boxes.append(box)
        self.reads += self.fetched(box)
        out[...] = X[(sample, *box.slices)]


@pytest.mark.parametrize("chunks", [(1, 1, 4, 4, 4), (1, 2, 12, 2, 2)])
def test_planes_are_read_once_where_memory_allows_and_never_more_than_memory(
    tmp_path: Path, chunks: tuple[int, ...]
) -> None:
    source, memory = Counted(), 2 * X[0].nbytes // 3 if chunks[2] == 4 else X[0].nbytes
    dc.data.convert(
        source, tmp_path / "x.zarr", dc.ProcessGrid(sample=1), chunks=chunks, memory=memory
    )
    assert source.reads == X.nbytes
    assert max(box.size * 2 for box in source.boxes) <= memory
    assert len(source.boxes) > 3 or memory == X[0].nbytes


@both
def test_a_copy_that_was_stopped_continues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_rank_zero(lambda: np.save(folder / "x.npy", X))
    written, count = module.write_chunks, []

    def write(*arguments: Any) -> None:
        count.append(arguments)
        if len(count) == 3:
            raise OSError("no space")
        written(*arguments)

    def run(**options: Any) -> Path:
        given = {"chunks": (1, 2, 6, 10, 9), "memory": 1} | options
        source, sink = folder / "x.npy", folder / "x.zarr"
        return dc.data.convert(source, sink, dc.ProcessGrid(sample=-1), **given)

    with monkeypatch.context() as context:
        context.setattr(module, "write_chunks", write)
        fails_everywhere(run, rf"no space.*x.zarr.partial keeps {2 * WORLD.size} finished steps")
    assert not (folder / "x.zarr").exists()
    WORLD.barrier()
    fails_everywhere(lambda: run(chunks=(1, 1, 6, 10, 9)), "belongs to another run, .*chunks")
    count.clear()
    with monkeypatch.context() as context:
        context.setattr(module, "write_chunks", lambda *given: count.append(0) or written(*given))
        run()
    assert sum(WORLD.allgather(len(count))) == 6 - 2 * WORLD.size
    assert np.array_equal(content(folder / "x.zarr")[None], X)
    WORLD.barrier()
    fails_everywhere(run, "x.zarr exists; choose another name")
    run(overwrite=True)


@both
def test_a_failure_before_the_first_piece_leaves_nothing_and_at_the_end_all_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank_zero(lambda: np.save(folder / "x.npy", X))

    def run() -> Path:
        return dc.data.convert(folder / "x.npy", folder / "x.zarr", dc.ProcessGrid(sample=-1))

    def create(path: Path, arrays: Any) -> None:
        path.mkdir()
        raise OSError("no space")

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as context:
        context.setattr(module, "create_zarr", create)
        fails_everywhere(run, "no space$")
    assert [found.name for found in folder.iterdir()] == ["x.npy"]
    WORLD.barrier()
    with monkeypatch.context() as context:
        context.setattr(module, "commit_file", fail)
        fails_everywhere(run, "no space. .*x.zarr.partial keeps 1 finished steps: the same call")
    with monkeypatch.context() as context:
        context.setattr(module, "write_chunks", fail)
        run()
    assert np.array_equal(content(folder / "x.zarr")[None], X)


@both
def test_a_copy_of_exchanged_arrays_does_not_continue(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank_zero(lambda: [np.save(folder / f"{name}.npy", X) for name in "xy"])

    def run(a: str, b: str, **options: Any) -> Path:
        source = {"a": folder / f"{a}.npy", "b": folder / f"{b}.npy"}
        return dc.data.convert(source, folder / "ab.zarr", dc.ProcessGrid(sample=-1), **options)

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as context:
        context.setattr(module, "commit_file", fail)
        fails_everywhere(lambda: run("x", "y"), "keeps 2 finished steps")
    fails_everywhere(lambda: run("y", "x"), "belongs to another run, with other .*arrays.*; finish")
    run("x", "y")


@both
def test_a_folder_that_is_no_copy_is_not_replaced(folder: Path) -> None:
    on_rank_zero(lambda: np.save(folder / "x.npy", X))
    on_rank_zero(lambda: (folder / "x.zarr").mkdir())
    on_rank_zero(lambda: (folder / "x.zarr" / "notes.txt").write_text("precious"))
    grid = dc.ProcessGrid(sample=-1)
    fails_everywhere(
        lambda: dc.data.convert(folder / "x.npy", folder / "x.zarr", grid, overwrite=True),
        "x.zarr is not a zarr folder; choose another name, or remove it",
    )
    assert (folder / "x.zarr" / "notes.txt").read_text() == "precious"


@both
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x.npy"}, "give it the suffix .zarr"),
        ({"readers": {"dept": 2}}, "readers= names .'dept'.; the axes are sample"),
        ({"chunks": (1, 2)}, "an extent from 1 for each dimension"),
        ({"source": "none.npy"}, "none.npy: no such file"),
    ],
)
def test_bad_input_is_one_error_on_all_ranks(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    on_rank_zero(lambda: np.save(folder / "x.npy", X))
    source, path = (
        folder / options.pop(n, d) for n, d in (("source", "x.npy"), ("path", "y.zarr"))
    )
    fails_everywhere(
        lambda: dc.data.convert(source, path, dc.ProcessGrid(sample=-1), **options), message
    )
    assert [found.name for found in folder.iterdir()] == ["x.npy"]


@both
def test_the_command_keeps_what_the_file_says_of_its_values(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nibabel"), pytest.importorskip("netCDF4")
    image = np.random.default_rng(1).integers(-9, 9, (1, 9, 8, 7)).astype(np.int16)
    on_rank_zero(lambda: nifti(folder / "x.nii.gz", image))
    on_rank_zero(lambda: netcdf(folder / "x.nc", image, 0.5))
    case = ["data", "convert", str(folder / "x.nii.gz"), "--output", str(folder / "x.zarr")]
    assert main([*case, "--grid", "depth=3"]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'x.zarr'}\n" * (WORLD.rank == 0)
    (source,) = open_sources(folder / "x.zarr").values()
    assert np.allclose(source.attributes["affine"], AFFINE) and source.chunks == (1, 1, 3, 8, 7)
    assert np.array_equal(content(folder / "x.zarr")[None][0], image)
    case[2], case[4] = str(folder / "x.nc"), str(folder / "t.zarr")
    assert main([*case, "--field", "t2m"]) == 0
    (source,) = open_sources(folder / "t.zarr").values()
    assert source.attributes == {"units": "K"}
    assert np.array_equal(content(folder / "t.zarr")[None], image * 0.5 + 270)
    ended_with_one_line(lambda: main(case[:3]), "data: error: --output is missing", capsys)


@both
def test_several_arrays_become_a_group(folder: Path) -> None:
    on_rank_zero(lambda: np.savez(folder / "xy.npz", x=X, y=X[:, 0, 0, 0, 0]))
    path = dc.data.convert(
        folder / "xy.npz", folder / "xy.zarr", dc.ProcessGrid(sample=-1), fields=["x", "y"]
    )
    found = content(path, "x", "y")
    assert np.array_equal(found["x"], X) and np.array_equal(found["y"], X[:, 0, 0, 0, 0])
