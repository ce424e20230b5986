"""What is read of every source is what there is, plus the chunks that are told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import distconv as dc
from benchmarks import reading
from distconv.data import Dataset, Loader, Sampler
from distconv.geometry.layout import cutting_axes
from tests.support.everywhere import WORLD
from tests.support.sample_files import FIELDS, SAMPLES, SOURCES

every_size = pytest.mark.parallel([1, 2, 4])

GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"sample": 2}, {"width": 2}],
    4: [{"sample": 2, "height": 2}, {"channel": 2, "width": 2}],
}

pytestmark = pytest.mark.filterwarnings("ignore:.*is fetched in pieces")


@every_size
@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_reads_all_data_once_plus_the_chunks_that_are_told(
    folder: Path, kind: str
) -> None:
    source = SOURCES[kind](folder)
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        inputs = list(FIELDS) if kind != "torch dataset" else None
        data = Dataset(source, grid, inputs)
        loader = Loader(data, 2, shuffle=True)
        batches = Sampler(SAMPLES, 2, shuffle=True).batches(0)
        for batch, samples in zip(loader, batches, strict=True):
            for x, values in zip(batch, FIELDS.values(), strict=True):
                assert np.array_equal(x.full_tensor().double(), values[samples])
        needed, fetched = 0.0, 0.0
        for name, x in zip(data.fields, batch, strict=True):
            # A field that an axis does not cut is read by each of its ranks.
            replicas = grid.size // grid.topology.parts(cutting_axes(x.cuts))
            own = data.fields[name]
            size = SAMPLES * int(np.prod(own.shape)) * own.dtype.itemsize * replicas
            needed += size
            fetched += size * data.amplification[name]
        assert WORLD.allreduce(loader.traffic.bytes_read) == needed
        assert WORLD.allreduce(loader.traffic.bytes_fetched) == pytest.approx(fetched)


@pytest.mark.parallel([2])
def test_the_benchmark_sees_what_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    rows = reading.main(["--samples", "2", "--extent", "8", "--seconds", "0.1"])
    found = {
        (row.configuration.split("=")[0], row.measure.split(", ")[-1]): row.value
        for row in rows
        if row.in_bytes
    }
    for axis, share in (("depth", 0.5), ("sample", 1.0)):
        assert found[axis, "boxes over whole samples"] == share
        assert found[axis, "whole samples over whole samples"] == 1
        assert found[axis, "kept in memory over whole samples"] == 0
        assert found[axis, "kept in a folder over whole samples"] == 0
    assert len(rows) == 14 and ("quartiles" in capsys.readouterr().out) == (WORLD.rank == 0)
