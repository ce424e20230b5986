"""Try networks, losses and metrics of other packages: `make networks`.

It writes docs/reference/networks.md.

The cases run in jobs on 2 and on 4 ranks, or on those that `--ranks` names. A case that ends its
job, or that takes too long, is noted, and a new job goes on with the next one. The exit code says
whether a case was wrong, hung or raised an error, or a network moved more than its input but for
operators that mix all positions.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.networks.losses import LOSSES
from tests.networks.networks import NETWORKS
from tests.networks.page import write
from tests.support.jobs import mpiexec, own_environment

LIMIT = 150
"""Seconds that a case may take, its imports included."""

STALL = 60
"""Seconds after which ranks that wait say where."""

FAILURES = ("wrong", "error", "hang")


def run(keys: list[str], ranks: int) -> dict[str, dict[str, Any]]:
    """Return the result of each case on a number of ranks, starting as many jobs as needed."""
    results: dict[str, dict[str, Any]] = {}
    while left := [key for key in keys if key not in results]:
        begun = None
        with tempfile.TemporaryDirectory() as folder:
            job = _Job(left, ranks, Path(folder))
            for record in job.records():
                begun = record.pop("case")
                if "result" in record:
                    results[begun] = record
                    _show(begun, ranks, record)
                    begun = None
            if begun is not None:
                results[begun] = job.end()
                _show(begun, ranks, results[begun])
            elif left[0] not in results:
                raise SystemExit(f"no case has begun: {job.end()['why']}")
    return results


class _Job:
    """A job whose ranks run cases one after the other, until all are done or the job ends."""

    def __init__(self, keys: list[str], ranks: int, folder: Path):
        self._notes, self._errors = folder / "notes", folder / "errors"
        self._notes.touch()
        self._late = False
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "tests.networks.worker"]
        with self._errors.open("w") as sink:
            self._process = subprocess.Popen(
                [*command, str(self._notes), *keys],
                stdout=subprocess.DEVNULL,
                stderr=sink,
                env=own_environment(DISTCONV_TIMEOUT=str(STALL), KINETO_LOG_LEVEL="99"),
                start_new_session=True,
            )

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the ranks' records as they come, and end the job where a case takes too long."""
        with self._notes.open() as notes:
            while True:
                ended = self._process.poll() is not None
                for line in notes:
                    yield json.loads(line)
                if ended:
                    return
                if time.time() - self._notes.stat().st_mtime > LIMIT:
                    self._late = True
                    self._process.terminate()
                    self._process.wait()
                time.sleep(0.2)

    def end(self) -> dict[str, Any]:
        """Return the result of the case during which the job has ended."""
        said = " ".join(self._errors.read_text().split())[-600:]
        if self._late:
            return {"result": "hang", "why": f"takes more than {LIMIT} seconds: {said}"}
        hangs = "ranks wait for more than" in said
        return {"result": "hang" if hangs else "error", "why": f"ends the job: {said}"}


def _show(key: str, ranks: int, result: dict[str, Any]) -> None:
    print(f"{ranks} ranks  {result['result']:8} {key}  {result.get('why', '')[:400]}", flush=True)


def main() -> None:
    """Run the cases, write the page if all cases ran, and exit with status 1 if any failed or moved
    too much.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.networks")
    parser.add_argument("--only", default="", help="a pattern of names of cases; writes no page")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    keys = [case.key for case in (*NETWORKS, *LOSSES) if re.search(options.only, case.key)]
    results = {ranks: run(keys, ranks) for ranks in options.ranks}
    if not options.only:
        write(results)
    count = Counter(each["result"] for found in results.values() for each in found.values())
    print(", ".join(f"{number} {name}" for name, number in sorted(count.items())))
    wasteful = [
        f"{case.key} on {ranks} ranks"
        for ranks, found in results.items()
        for case in NETWORKS
        if case.key in found and not case.loops and _moves_too_much(found[case.key])
    ]
    for each in wasteful:
        print(f"{each}: moves more than its input, not for attention and its like")
    raise SystemExit(bool(wasteful) or any(count[name] for name in FAILURES))


def _moves_too_much(result: dict[str, Any]) -> bool:
    """Return whether operators that mix no positions move more bytes than the input has."""
    return bool(result.get("otherwise", 0) > result.get("input", 0))


if __name__ == "__main__":
    main()
