"""Run tests or benchmarks on a machine with a GPU, each step within a limit: `make gpu`.

    python -m tests.gpu tests [SECONDS]
    python -m tests.gpu bench [SECONDS]

Steps that use no NCCL between ranks run side by side. Where GPUs are fewer than ranks, ranks share
them by MPI, and by NCCL from 2.30 on; GPU_NCCL is the path of such a library. Of each step the
end of its output is printed. All output, and every failure at once, is in build/gpu, and the page
of benchmarks in benchmarks/results; both are in $OUT if that is set.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support.rank_numbers import rank_numbers

ROOT = Path(__file__).parents[2]
OUT = os.environ.get("OUT")
PYTHON = sys.executable
PYTEST = (
    *(PYTHON, "-X", "faulthandler", "-m", "pytest", "-q", "--gpu", "--hypothesis-profile=gpu"),
    *("--tb=short", "--timeout=60", "--timeout-method=thread", "-m", "parallel[match] and gpu"),
)
FEATURES = "tests/gpu/test_gpu_features.py"
BY_NCCL = "torch- or nccl-"
"""Chooses tests by the names of the transports in theirs."""

RANKS_YIELD = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "OMP_NUM_THREADS": "1"}
SHARED = {
    "DISTCONV_SHARE_GPUS": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}
"""What lets ranks share a GPU by NCCL 2.30 and later. Four ranks have one CTA each, as kernels that
wait for each other have to fit on the GPU together."""


class Step(NamedTuple):
    """A command, or several of which some run at a time, and the most seconds that it takes."""

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]
    at_a_time: int = 1
    more: dict[str, str] = {}
    """Environment variables."""
    lines: int = 12
    """The number of lines of output that are shown."""


def ranks(n: int, *command: str) -> tuple[str, ...]:
    return "mpiexec", "-n", str(n), *command


def by_nccl(n: int) -> dict[str, str]:
    """Return the variables by which `n` ranks use NCCL, on GPUs of their own or on shared ones."""
    import torch

    library = os.environ.get("GPU_NCCL")
    more = {"LD_PRELOAD": library} if library else {}
    if torch.accelerator.device_count() < n:
        more |= SHARED | ({"NCCL_MAX_CTAS": "1"} if n > 2 else {})
    return more


def functions(n: int) -> list[tuple[str, ...]]:
    """Return a command for each file of functions, as a fault on the device ends its process."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests/ops").rglob("test_*.py"))}
    return [
        ranks(n, *PYTEST, str(path.relative_to(ROOT)))
        for path, text in texts.items()
        if "mark.gpu" in text and n in (rank_numbers(text) or (n,))
    ]


def tests(session: Session) -> None:
    """Run the tests by MPI on 1, 2 and 4 ranks, and by NCCL on 2 and 4 if ranks can have it."""
    folder = ("tests/gpu", "tests/transport", f"--ignore={FEATURES}")
    session.run(
        Step("1 rank", 90, [ranks(1, *PYTEST, *folder, "tests/device", "--durations=8")]),
        Step("1 rank, features", 80, [ranks(1, *PYTEST, FEATURES)]),
        Step("2 ranks, MPI", 100, [ranks(2, *PYTEST, *folder, "-k", f"not ({BY_NCCL})")]),
        Step("2 ranks, MPI, features", 80, [ranks(2, *PYTEST, FEATURES)]),
        Step("1 rank, functions", 100, functions(1), at_a_time=6),
    )
    first = [ranks(2, *PYTEST, "tests/gpu/test_gpu_transport.py", "-k", "torch-")]
    nccl = session.run(Step("2 ranks, NCCL, messages", 50, first, more=by_nccl(2)))
    if nccl:
        chosen = [ranks(2, *PYTEST, *folder, "-k", BY_NCCL, "--durations=8")]
        session.run(Step("2 ranks, NCCL", 80, chosen, more=by_nccl(2)))
        features = [ranks(2, *PYTEST, FEATURES)]
        session.run(Step("2 ranks, NCCL, features", 75, features, more=by_nccl(2)))
    session.run(
        Step("2 ranks, functions", 110, functions(2), at_a_time=4),
        Step("4 ranks, MPI, features", 90, [ranks(4, *PYTEST, FEATURES)]),
    )
    watched = ["tests/gpu/test_gpu_steps.py", "tests/gpu/test_gpu_transport.py", "-k", "mpi-"]
    session.run(
        Step(
            *("2 ranks, torch's sanitizer of streams", 60, [ranks(2, *PYTEST, *watched)]),
            more={"TORCH_CUDA_SANITIZER": "1"},
        ),
        Step("4 ranks, MPI", 70, [ranks(4, *PYTEST, *folder, "-k", f"not ({BY_NCCL})")]),
    )
    if nccl:
        chosen = [ranks(4, *PYTEST, *folder, "-k", BY_NCCL, "--durations=5")]
        session.run(Step("4 ranks, NCCL", 70, chosen, more=by_nccl(4)))


def bench(session: Session) -> None:
    """Measure on 1 rank and on 2, one process after the other, into a page of results."""
    results = str(session.folder / "results" if OUT else ROOT / "benchmarks" / "results")
    command = (PYTHON, "-m", "benchmarks.gpu", results)
    session.run(Step("1 rank", 150, [ranks(1, *command)]))
    session.run(Step("1 rank, graphs", 90, [ranks(1, *command, "graphs")]))
    session.run(Step("2 ranks, MPI", 45, [ranks(2, *command)]))
    more = by_nccl(2) | {"DISTCONV_TRANSPORT": "torch"}
    session.run(Step("2 ranks, NCCL", 40, [ranks(2, *command, "waits")], more=more))


class Session:
    """Runs steps until `seconds` have passed, and keeps their output in `folder`."""

    def __init__(self, folder: Path, seconds: float):
        self.folder, self._begun, self._seconds = folder, time.monotonic(), seconds
        self.failed = False
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, *steps: Step) -> bool:
        """Run steps side by side, and return whether all commands of all steps succeeded."""
        with ThreadPoolExecutor(len(steps)) as pool:
            fine = all(list(pool.map(self._run, steps)))
        self.failed |= not fine
        return fine

    def _run(self, step: Step) -> bool:
        begun = time.monotonic()
        end = min(begun + step.seconds, self._begun + self._seconds)
        name = re.sub("[^a-z0-9]+", "-", step.name.lower())
        paths = [self.folder / f"{name}-{i}.txt" for i in range(len(step.commands))]

        def run(command: Sequence[str], path: Path) -> int:
            return self._status(command, path, step.more, end)

        with ThreadPoolExecutor(step.at_a_time) as pool:
            statuses = list(pool.map(run, step.commands, paths))
        took = f"{time.monotonic() - begun:.0f} s, begun at {begun - self._begun:.0f} s"
        lines = _shown(paths, step.lines)
        print(f"\n##### {step.name}: status {statuses}, {took}", *lines, sep="\n", flush=True)
        return not any(statuses)

    def _status(self, command: Sequence[str], path: Path, more: dict[str, str], end: float) -> int:
        """Run a command until `end` at most, its output in a file, and return its status."""
        environment = {**os.environ, **RANKS_YIELD, "TEST_FAILURES": str(self.folder), **more}
        with path.open("w") as output:
            left = end - time.monotonic()
            if left < 5:
                output.write(f"the time is up; left out: {' '.join(command[-3:])}\n")
                return 124
            return subprocess.run(
                ["timeout", "-k", "5", f"{left:.0f}", *command],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode


def _shown(paths: Sequence[Path], lines: int) -> Iterator[str]:
    """Yield the last line of each of several files, or the last lines of the only one."""
    for path in paths:
        text = path.read_text(errors="replace").splitlines()
        yield from (line[:300] for line in text[-lines if len(paths) == 1 else -1 :])


def main() -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("what", choices=["tests", "bench"])
    parser.add_argument("seconds", type=float, nargs="?", default=400)
    given = parser.parse_args()
    folder = Path(OUT or ROOT / "build" / "gpu")
    session = Session(folder, given.seconds)
    {"tests": tests, "bench": bench}[given.what](session)
    for path in sorted(folder.glob("failures-*.txt")):
        found = [line for line in path.read_text().splitlines() if line.startswith("===")]
        print(f"\n{path.name}", *found, sep="\n")
    print(f"\n{time.monotonic() - session._begun:.0f} s in all; see {folder}")
    return int(session.failed)


if __name__ == "__main__":
    sys.exit(main())
