"""Settings or data that differ on one rank of a mesh-tangling run are an error on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import distconv as dc
from examples.mesh_tangling.data import MeshTanglingData
from tests.support.everywhere import fails_everywhere
from tests.support.mesh_runs import write_file

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1
several = pytest.mark.parallel([2, 3])
pytestmark = pytest.mark.filterwarnings("ignore:.*is stored in chunks")
OTHERS = {2: "rank 0", 3: "ranks 0-1"}.get(WORLD.size, "")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "samples": (
        lambda path: write_file(path, samples=4),
        "shape of 'state' of data.h5, field 'state' is (5, 18, 64, 64) on",
    ),
    "values": (
        lambda path: write_file(path, seed=1),
        "checksum of 'state' of data.h5, field 'state' is",
    ),
    "statistics": (
        lambda path: write_file(path, channel_mean=np.zeros(18, np.float32)),
        "checksum of the statistics of data.h5 is",
    ),
    "type": (
        lambda path: write_file(path, state=np.zeros((5, 18, 64, 64))),
        "type of 'state' of data.h5, field 'state' is float32 on",
    ),
    "attributes": (lambda path: with_attribute(path), "attributes of data.h5, field 'state' is"),
    "bytes": (lambda path: with_more_bytes(path), "size of data.h5, field 'state' is"),
}


def with_attribute(path: Path) -> None:
    write_file(path)
    with h5py.File(path, "a") as file:
        file.attrs["seed"] = 7


def with_more_bytes(path: Path) -> None:
    write_file(path)
    with open(path, "ab") as file:
        file.write(bytes(8))


@several
@pytest.mark.parametrize("kind", FILES)
def test_another_file_on_one_rank_is_an_error_on_all(tmp_path: Path, kind: str) -> None:
    write, message = FILES[kind]
    write(tmp_path / "data.h5") if WORLD.rank == LAST else write_file(tmp_path / "data.h5")
    grid = dc.ProcessGrid(sample=-1)
    fails_everywhere(
        lambda: MeshTanglingData(tmp_path / "data.h5", grid),
        f"{re.escape(message)}.* {OTHERS} and .* on rank {LAST}.*(same|the same data)",
    )
