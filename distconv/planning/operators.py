"""How long local operators take: timed once on the machine at hand, or by roofline.

They are timed as they run in a step: under the machine's allocator settings, on memory that the
process already has, and by as many processes at the same time as a node has ranks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from distconv.planning.machine import Machine
from distconv.planning.recording import LocalOperator
from distconv.planning.roofline import roofline_seconds

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "134217728",
}
"""Settings of glibc with which memory that is freed stays with the process."""

_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "MPI_", "HYDRA_", "RANK", "WORLD_SIZE")


class OperatorTimes:
    """Seconds of local operators on a machine, of which many ranks compute at the same time.

    Parameters
    ----------
    at_once: how many ranks of a node compute at the same time.
    measure: whether to time operators that the machine has no times for; else that is an error.
    progress: is called with the operators timed so far, and all that are to be.
    """

    def __init__(
        self,
        machine: Machine,
        at_once: int,
        *,
        measure: bool = True,
        progress: Callable[[int, int], object] = lambda done, of: None,
    ):
        self._machine, self._measure, self._progress = machine, measure, progress
        self._at_once = at_once
        self._known = machine.operators.setdefault(str(at_once), {})

    def __getitem__(self, operator: LocalOperator) -> float:
        """Return the seconds of an operator that has been prepared."""
        if self._machine.roofline is not None:
            return roofline_seconds(operator, self._machine.roofline)
        return self._known[operator.key]

    def prepare(self, operators: Iterable[LocalOperator]) -> None:
        """Time those operators whose times are not known.

        Raises
        ------
        ValueError
            Where they are not to be timed.
        """
        if self._machine.roofline is not None:
            return
        missing = {o.key: o for o in operators if o.key not in self._known}
        if not missing:
            return
        if not self._measure:
            raise ValueError(
                f"{self._machine.name} has no times of {len(missing)} local operators, such as "
                f"{next(iter(missing))}, for {self._at_once} ranks at once, and may not measure "
                "them; predict once on the machine itself"
            )
        times = time_together(
            list(missing.values()),
            self._at_once,
            self._machine.threads,
            self._machine.environment,
            self._progress,
        )
        self._known.update(zip(missing, times, strict=True))


def time_together(
    operators: list[LocalOperator],
    processes: int,
    threads: int,
    environment: dict[str, str],
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> list[float]:
    """Return the seconds of each operator, timed by some processes at the same time.

    Every process is new, and has the variables of `environment`; it sends no messages.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    kept |= environment | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "operators").write_bytes(pickle.dumps(operators))
        (folder / "counters").write_bytes(bytes(8 * processes))
        command = [sys.executable, "-m", "distconv.planning.operator_worker", name]
        workers = [
            subprocess.Popen(
                [*command, str(i), str(processes), str(threads)], env=kept, stderr=subprocess.PIPE
            )
            for i in range(processes)
        ]
        try:
            for worker in workers:
                _, said = worker.communicate()
                if worker.returncode:
                    raise RuntimeError(
                        "a process that times local operators has ended with status "
                        f"{worker.returncode}: {said.decode()[-2000:]}"
                    )
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        every = [pickle.loads((folder / f"times {i}").read_bytes()) for i in range(processes)]
    progress(len(operators), len(operators))
    return [sum(times) / processes for times in zip(*every, strict=True)]
