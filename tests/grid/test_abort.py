"""A rank that fails ends the whole job, with one traceback, instead of leaving the others waiting.

These tests launch jobs of their own.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest

from tests.support.jobs import end_of, start

SCRIPT = """
import os, signal, sys
import torch, distconv as dc

grid = dc.ProcessGrid(height=-1)
x = dc.distribute_tensor(torch.arange(2.0 ** 20).reshape(1, 1, -1, 2 ** 10), grid)

def exchange():
    print("waiting", flush=True)
    while True:
        torch.nn.functional.avg_pool2d(x, 3, 1, 1).sum().item()

{body}
"""


def job(
    tmp_path: Path, body: str, ranks: int = 2, fresh: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a job of several ranks, and return how it ended; a job that does not end is an error.

    `variables` are set in its environment; for `fresh` see `start`.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body=body))
    return end_of(start(script, ranks, fresh=fresh, **variables))


def test_one_rank_that_raises_ends_the_job_while_others_wait(tmp_path: Path) -> None:
    body = "if grid.rank == 2: raise ValueError('lost my data')\nexchange()"
    end = job(tmp_path, body, ranks=3)
    assert end.returncode != 0
    assert end.stdout.count("waiting") == 2
    assert end.stderr.count("Traceback (most recent call last)") == 1
    assert end.stderr.count("ValueError: lost my data") == 1
    assert "distconv: rank 2 of 3 raised" in end.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("dc.ProcessGrid(height=3)", "ValueError: ProcessGrid: height=3 does not divide 4 ranks"),
        (
            "dc.DistTensor.from_local(torch.zeros(1, 1, 3 - (grid.rank == 1), 1), grid)",
            "rank 1 holds (1, 1, 2, 1) and should hold (1, 1, 3, 1)",
        ),
    ],
)
def test_an_error_that_all_ranks_share_is_printed_once(
    tmp_path: Path, body: str, message: str
) -> None:
    end = job(tmp_path, body, ranks=4)
    assert end.returncode != 0
    assert end.stderr.count("Traceback (most recent call last)") == 1
    assert end.stderr.count(message) == 1
    assert "distconv: rank 0 of 4 raised" in end.stderr


def test_an_error_is_printed_where_torch_has_a_hook_of_its_own(tmp_path: Path) -> None:
    body = """
if grid.rank == 1:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    raise ValueError("lost my data")
exchange()
"""
    end = job(tmp_path, body)
    assert end.returncode != 0 and "rank 1 of 2 raised" in end.stderr
    assert end.stderr.count("ValueError: lost my data") == 1


SAVING = """
import atexit, gzip
log = open(f"{folder}/log", "w")
packed = gzip.open(f"{folder}/packed.gz", "wt")
@atexit.register
def last():
    print("last words", file=log)
    if {waits}: x.sum(); __import__("time").sleep(1000)
if grid.rank == 1:
    print("all losses", file=log), print("all losses", file=packed)
    {end}
exchange()
"""


@pytest.mark.parametrize(
    ("end", "waits", "ranks"), [("raise ValueError", True, 4), ("time.sleep(1000)", False, 2)]
)
def test_a_rank_that_ends_the_job_saves_its_files_and_calls_what_is_registered(
    tmp_path: Path, ranks: int, waits: bool, end: str
) -> None:
    body = SAVING.replace("{folder}", f"{tmp_path}/{{grid.rank}}").replace("{waits}", str(waits))
    for rank in range(ranks):
        (tmp_path / str(rank)).mkdir()
    body = "import time\n" + body.replace("{end}", end)
    ended = job(tmp_path, body, ranks, DISTCONV_TIMEOUT="4")
    assert ended.returncode == 1, ended.stderr
    if end.startswith("raise"):
        assert (tmp_path / "1" / "log").read_text() == "all losses\nlast words\n"
        packed = zlib.decompressobj(wbits=31).decompress((tmp_path / "1/packed.gz").read_bytes())
        assert packed == b"all losses\n"
    else:
        texts = [(tmp_path / str(rank) / "log").read_text() for rank in range(ranks)]
        assert any("last words" in text for text in texts)


def test_one_rank_alone_fails_as_any_python_program(tmp_path: Path) -> None:
    end = job(tmp_path, "raise ValueError('alone')", ranks=1)
    assert end.returncode == 1
    assert end.stderr.count("ValueError: alone") == 1 and "distconv: rank" not in end.stderr
