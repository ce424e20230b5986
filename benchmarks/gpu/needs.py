"""Say what `make gpu` finds, misses, and cannot do here: `python -m benchmarks.gpu.needs`.

Nothing is fetched. The exit status tells whether it can run at all.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

WHEELS = {
    "torch": "torch",
    "numpy": "numpy",
    "mpi4py.MPI": "mpi4py, and mpich for its library",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "pytest_mpi": "mpi-pytest",
    "hypothesis": "hypothesis",
}
"""Modules, and the wheels that hold them."""


def missing(wheels: Mapping[str, str] = WHEELS) -> list[str]:
    """Return a line for each module or program that is not there, or cannot be loaded."""
    lines = [] if shutil.which("mpiexec") else ["mpiexec is not on the PATH: bring the wheel mpich"]
    for module, wheel in wheels.items():
        try:
            importlib.import_module(module)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            lines.append(f"{module} ({reason}): bring the wheel {wheel}")
    return lines


def name_of(device: Any) -> str:
    """Return the name of an accelerator, as its vendor calls it."""
    import torch

    if device.type == "cpu":
        return "CPU"
    name: str = torch.get_device_module(device).get_device_name(device)
    return name


def found() -> tuple[str | None, int]:
    """Return the kind of accelerator that torch finds, None without any, and how many there are."""
    import torch

    from distconv.device.kinds import accelerator

    kind = accelerator()
    return kind, torch.accelerator.device_count() if kind else 0


def left_out(kind: str, count: int) -> Iterator[str]:
    """Yield what cannot be done on so many accelerators of a kind, and why."""
    from distconv.device import kinds
    from distconv.device.kinds import library_of

    library = library_of(kind)
    if why := kinds.why_no_backend(kind):
        yield f"transport torch: {why}"
    elif count < 4 and not _may_be_shared(kind):
        seen = "one GPU" if count == 1 else f"{count} GPUs"
        yield (
            f"{library} on more than {seen}: it takes one rank on each; the other ranks share, and "
            "send by MPI. NCCL 2.30 or newer lets ranks share; GPU_NCCL is the path of one to load"
        )
    if why := kinds.why_no_cupy(kind):
        yield f"transport nccl: {why}"
    if kind != "cuda":
        yield "streams that sleep, and errors where the host waits: torch has both for CUDA and HIP"
        yield "where the host waits: torch's profiler names no such calls"


def _may_be_shared(kind: str) -> bool:
    """Return whether several ranks may use one accelerator by the library of its kind."""
    from distconv.device.kinds import library_of, version_of_library

    if library_of(kind) != "NCCL":
        return False
    numbers = map(int, version_of_library(kind).split("."))
    return "GPU_NCCL" in os.environ or tuple(numbers) >= (2, 30)


def main() -> int:
    """Print the accelerators and the checks that they cannot do, and return the exit status."""
    lines = missing()
    for line in lines:
        print(f"make gpu: {line}", file=sys.stderr)
    if lines:
        return 1
    import torch

    from distconv.device.kinds import library_of, version_of_library

    kind, count = found()
    if kind is None:
        print("make gpu: torch sees no GPU", file=sys.stderr)
        return 1
    library = f"{library_of(kind)} {version_of_library(kind)}"
    name = name_of(torch.device(kind, 0))
    print(f"make gpu: {count} x {name} ({kind}), torch {torch.__version__}, {library}")
    for line in left_out(kind, count):
        print(f"make gpu: not done here: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
