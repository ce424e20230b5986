"""A file is either the old or the new one at any moment, and is read whole or refused.

They need no MPI; the process that is killed is one of their own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.data import DataError, durable
from distconv.data.durable import (
    DamagedFile,
    move_into_place,
    read_checksummed,
    remove_partial,
    write_atomically,
    write_checksummed,
)
from examples.mesh_tangling import store
from tests.support.mesh_runs import REPOSITORY, files_up_to, generate_alone


def write(path: Path, content: bytes) -> None:
    """Write a checksummed file."""
    write_checksummed(path, lambda file: file.write(content))


def test_a_checksummed_file_is_read_as_it_was_written_and_torch_does_not_mind(
    tmp_path: Path,
) -> None:
    path, state = tmp_path / "a.pt", {"weight": torch.arange(1000.0)}
    write_checksummed(path, lambda file: torch.save(state, file))
    assert torch.equal(torch.load(path, weights_only=True)["weight"], state["weight"])
    (tmp_path / "content.pt").write_bytes(read_checksummed(path))
    there = torch.load(tmp_path / "content.pt", weights_only=True)
    assert torch.equal(there["weight"], state["weight"])


def test_every_flipped_bit_and_every_missing_end_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_checksummed(path, lambda file: torch.save({"weight": torch.arange(500.0)}, file))
    whole, draw = path.read_bytes(), random.Random(0)
    places = [draw.randrange(8 * len(whole)) for _ in range(300)]
    for place in [*places, *range(8 * (len(whole) - 80), 8 * len(whole), 5)]:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(DamagedFile, match="a.pt"):
            read_checksummed(path)
    for size in [
        0,
        1,
        71,
        72,
        73,
        len(whole) - 1,
        *(draw.randrange(len(whole)) for _ in range(20)),
    ]:
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFile, match="a.pt"):
            read_checksummed(path)


def test_planted_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.pt.partial").symlink_to(victim)
    (tmp_path / "data.h5.partial").symlink_to(victim)
    write(tmp_path / "a.pt", b"content")
    generate_alone(tmp_path / "data.h5", 1, 8)
    assert victim.read_text() == "precious"
    # Nor when the fresh name is guessed.
    monkeypatch.setattr(durable.secrets, "token_hex", lambda length: "guessed")
    (tmp_path / "a.pt.guessed.partial").symlink_to(victim)
    with pytest.raises(OSError, match="a.pt cannot be written"):
        write(tmp_path / "a.pt", b"other")
    assert victim.read_text() == "precious"
    assert read_checksummed(tmp_path / "a.pt") == b"content"


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_atomically(path, lambda file: file.write(b"old"))

    def interrupted(file: BinaryIO) -> None:
        file.write(b"half of the n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_goes_while_it_is_written_is_laid_to_another_job(tmp_path: Path) -> None:
    with pytest.raises(
        OSError, match="a.pt cannot be written: .* no longer exists; another job may write"
    ):
        write_atomically(tmp_path / "a.pt", lambda file: remove_partial(tmp_path, "a.pt"))


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a-1.pt", b"1")
    left = [f"a-{n}.pt.{'0123456789abcdef'}.partial" for n in (1, 2)]
    others = ["a-1.pt.1a2b3c4d.partial", "a-best.pt.0123456789abcdef.partial", "a-1.pt.partial"]
    for name in (*left, *others):
        (tmp_path / name).touch()
    remove_partial(tmp_path, r"a-\d+\.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a-1.pt", *others])


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_whole(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, partial = tmp_path / "a.zarr", tmp_path / "a.zarr.new"
    for folder in (path, partial):
        folder.mkdir()
        (folder / folder.name).touch()
    renamed: list[Path] = []

    def replace(source: Path, target: Path) -> None:
        renamed.append(Path(target))
        if source == partial:
            raise OSError("this rename fails")
        os.rename(source, target)

    if exchanges:
        # In one step, so there is no moment at which nothing has the name.
        monkeypatch.setattr(durable.os, "replace", replace)
        move_into_place(partial, path)
        assert not renamed
    else:
        monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
        with monkeypatch.context() as failing:
            failing.setattr(durable.os, "replace", replace)
            with pytest.raises(OSError, match="this rename fails"):
                move_into_place(partial, path)
        assert (path / "a.zarr").exists() and (partial / "a.zarr.new").exists()
        move_into_place(partial, path)
    assert (path / "a.zarr.new").exists() and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("tensors", [1, 100])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, tensors: int) -> None:
    path = tmp_path / "a.pt"
    write(path, b"old")
    state = {str(place): torch.zeros(200_000 // tensors) for place in range(tensors)}
    with files_up_to(100_000), pytest.raises(OSError, match="a.pt cannot be written: .*free space"):
        write_checksummed(path, lambda file: torch.save(state, file))
    assert read_checksummed(path) == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("samples", "size"), [(1, 8), (1, 33), (3, 32), (2, 65)])
def test_the_room_for_samples_is_made_sure_of_before_the_first(
    tmp_path: Path, samples: int, size: int
) -> None:
    path = tmp_path / "data.h5"
    shape = size, size
    grid = dc.ProcessGrid(MPI.COMM_SELF, device="cpu")
    fields = {name: np.ones(shape) for name in store.CHANNELS}

    def write_all() -> None:
        with store.create(grid, path, samples, size, seed=0, horizon=1.0) as writer:
            nonlocal begun
            begun = True
            for index in range(samples):
                writer.write(index, fields, np.zeros(shape, bool))

    begun = False
    write_all()
    used = path.stat().st_size
    path.unlink()
    begun = False
    with files_up_to(used - 1), pytest.raises(DataError, match="data.h5 cannot be written"):
        write_all()
    assert not begun and not list(tmp_path.iterdir())


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from distconv.data.durable import read_checksummed, write_checksummed

torch.set_num_threads(1)
path, draw, seen = Path(sys.argv[1]), random.Random(0), set()
state = {"number": 0, "weight": torch.zeros(20_000)}

def write():
    state["number"] += 1
    write_checksummed(path, lambda file: torch.save(state, file))

write()
for turn in range(60):
    child = os.fork()
    if not child:
        while True:
            write()
    time.sleep(draw.uniform(0, 0.03))
    os.kill(child, draw.choice([signal.SIGINT, signal.SIGKILL]))
    # Python may lose an interrupt, as in a destructor.
    time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    read_checksummed(path)
    state = torch.load(path, weights_only=True)
    seen.add(state["number"])
print(len(seen))
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_whole_files(tmp_path: Path) -> None:
    end = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "a.pt")],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert end.returncode == 0, end.stderr[-2000:]
    assert int(end.stdout) > 5
