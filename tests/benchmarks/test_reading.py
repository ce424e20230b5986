"""The benchmark of reading tells what each way reads of the samples."""

from __future__ import annotations

import pytest

from benchmarks import reading
from tests.support.everywhere import WORLD


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
