"""Two commits are compared by launches that take turns; nothing here looks at times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.commits import main
from tests.support.jobs import LIMIT, own_environment

ROOT = Path(__file__).resolve().parents[2]
SHORT = "--seconds", "0.1", "--warm-up", "1"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the root of the repository, as the Makefile does."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.commits", *arguments],
        cwd=ROOT,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_both_launches_take_steps_and_a_row_tells_the_ratio(tmp_path: Path) -> None:
    job = run(str(ROOT), "--cases", "tiny_32", "--ranks", "1", "--launches", "1", *SHORT)
    assert job.returncode == 0, job.stderr
    case, median, *rest = job.stdout.split()
    assert case == "tiny_32" and rest == ["launches:", median]
    assert float(median) > 0


def test_a_job_that_dies_at_its_start_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "distconv").mkdir()
    (tmp_path / "distconv" / "__init__.py").write_text("raise ImportError('no such library')")
    job = run(str(tmp_path), "--cases", "tiny_32", "--ranks", "1", "--launches", "1", *SHORT)
    assert job.returncode == 1
    assert f"the job of {tmp_path} has ended" in job.stderr
    assert "ImportError: no such library" in job.stderr


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("no-such-commit",), "no-such-commit"),
        ((str(ROOT), "--cases", "large"), "large"),
        ((str(ROOT), "--ranks", "0"), "ranks"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(
    arguments: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["commits", *arguments])
    monkeypatch.setattr("benchmarks.commits.tree_of", lambda *_: pytest.fail("has begun"))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
