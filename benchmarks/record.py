"""Run benchmarks and write down their results, with the machine that they were measured on.

`make bench` calls it: `mpiexec -n 2 python -m benchmarks.record benchmarks/results/cpu.md`, with
names of benchmarks behind for some of them only. Why a target is missed stands in
benchmarks/README.md, which is written by hand.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch
from mpi4py import MPI

from benchmarks.__main__ import BENCHMARKS
from benchmarks.measuring.report import as_table
from benchmarks.measuring.settings import Settings
from distconv.planning.machine import allocator_here


def record(path: Path, settings: Settings, names: Iterable[str]) -> None:
    """Write the tables of benchmarks to `path`; all ranks call it."""
    torch.set_num_threads(settings.threads)
    start = time.perf_counter()
    sections = []
    for name in names:
        rows = list(BENCHMARKS[name](settings))
        sections.append(f"## {name}\n\n```\n{as_table(rows)}\n```\n")
        if MPI.COMM_WORLD.rank == 0:
            taken = f"{len(rows)} rows after {time.perf_counter() - start:.0f} s"
            print(f"{name}: {taken}", file=sys.stderr, flush=True)
    if MPI.COMM_WORLD.rank == 0:
        title = f"# Benchmarks on {MPI.COMM_WORLD.size} ranks, CPU\n"
        note = "Written by `make bench`; `benchmarks/README.md` explains the columns.\n"
        taken = f"{machine()}\ntime      {time.perf_counter() - start:.0f} s"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([title, note, f"```\n{taken}\n```\n", *sections]))


def machine() -> str:
    """Describe the machine and the software that the results were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    facts = {
        "distconv": f"{version('distconv')}, commit {described.stdout.strip() or 'unknown'}",
        "torch": torch.__version__,
        "MPI": MPI.Get_library_version().splitlines()[0].strip(),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU": models[0] if models else platform.processor(),
        "cores": str(os.cpu_count()),
        "malloc": " ".join(f"{k}={v}" for k, v in sorted(allocator_here().items()))
        or "as it comes",
        "date": datetime.date.today().isoformat(),
    }
    return "\n".join(f"{name:<9} {fact}" for name, fact in facts.items())


if __name__ == "__main__":
    record(Path(sys.argv[1]), Settings(seconds=3.0), sys.argv[2:] or BENCHMARKS)
