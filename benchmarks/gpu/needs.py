"""Say which wheels `make gpu` misses, and fetch none: `python -m benchmarks.gpu.needs`."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping

WHEELS = {
    "torch": "torch",
    "numpy": "numpy",
    "mpi4py.MPI": "mpi4py, and mpich for its library",
    "cupy": "cupy-cuda13x (or -cuda12x, as torch.version.cuda says)",
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


if __name__ == "__main__":
    lines = missing()
    for line in lines:
        print(f"make gpu: {line}", file=sys.stderr)
    sys.exit(1 if lines else 0)
