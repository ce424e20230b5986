"""Starting MPI: when a program first needs it, and only in a process that is a rank of its own."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

ALLOW_SINGLE = "DISTCONV_ALLOW_SINGLE"

_SIZES = {
    "PMI_SIZE": "the mpiexec of MPICH or Intel MPI, or srun with PMI, whose library is not the one "
    "that mpi4py uses",
    "OMPI_COMM_WORLD_SIZE": "the mpiexec of Open MPI, whose library is not the one that mpi4py "
    "uses",
    "WORLD_SIZE": "torchrun, which starts no MPI",
}
"""The variables in which launchers tell the number of processes, and which launcher each is of."""

_STEP_SIZE = "SLURM_STEP_NUM_TASKS"
"""The tasks of one srun. SLURM_NTASKS also stands in the shell of a whole allocation, where a
program that is started by itself is meant to be alone."""

_FIRST_UNNUMBERED_STEP = 0xFFFFFFF0
"""Slurm gives steps that are no srun of the user's, such as a batch script, numbers from here."""

_copied_from: int | None = None
"""The process with MPI that this one has been forked from."""


def _note_fork() -> None:
    global _copied_from
    if "mpi4py.MPI" in sys.modules and _copied_from is None:
        _copied_from = os.getppid()
        atexit.register(_leave)


def _leave() -> None:
    """End a forked process at once: what follows is MPI_Finalize, which waits for other ranks.

    A status other than 0 takes os._exit, as Python recommends after os.fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


os.register_at_fork(after_in_child=_note_fork)


def is_copy() -> bool:
    """Tell whether this process has been forked from one that had started MPI."""
    return _copied_from is not None


def mpi() -> ModuleType:
    """Return `mpi4py.MPI`, which starts MPI when it is first imported.

    Raises
    ------
    RuntimeError
        In a worker process, which is no rank: MPI would wait there for ever, or end the job.
    """
    if _copied_from is not None:
        raise RuntimeError(
            f"distconv: process {os.getpid()} has been forked from process {_copied_from}, a rank "
            "of MPI, and cannot use MPI itself; return plain tensors from workers, and make grids "
            "and DistTensors of them in the rank"
        )
    started = sys.modules.get("mpi4py.MPI")
    if started is not None:
        return started
    if multiprocessing.parent_process() is not None and launched():
        raise RuntimeError(
            f"distconv: process {os.getpid()} ({multiprocessing.current_process().name}) is a "
            "worker that multiprocessing has started, and not a rank of MPI; make grids and "
            'DistTensors in the rank, under `if __name__ == "__main__":` where workers import the '
            "program anew, and return plain tensors from workers"
        )
    from mpi4py import MPI

    return MPI


def world() -> Any:
    """Return MPI.COMM_WORLD; None in a process that cannot start MPI."""
    try:
        return mpi().COMM_WORLD
    except (ImportError, RuntimeError):
        return None


def launched(environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Return the variables in which launchers have told the number of processes, with the numbers.

    Slurm's variables count for processes that an srun has started, and where MPI's own launcher has
    set none.
    """
    found = {}
    for name in _SIZES:
        if (size := _whole(environment.get(name))) is not None:
            found[name] = size
    step = _whole(environment.get("SLURM_STEP_ID"))
    size = _whole(environment.get(_STEP_SIZE)) or _whole(environment.get("SLURM_NTASKS"))
    by_mpi = "PMI_SIZE" in found or "OMPI_COMM_WORLD_SIZE" in found
    if size is not None and step is not None and step < _FIRST_UNNUMBERED_STEP and not by_mpi:
        found[_STEP_SIZE if environment.get(_STEP_SIZE) else "SLURM_NTASKS"] = size
    return found


def check_launch(ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `RuntimeError` where MPI knows one rank and a launcher has started several processes.

    Each of them would compute by itself, and nothing would tell.

    Parameters
    ----------
    ranks: the size of MPI.COMM_WORLD.
    """
    if ranks > 1 or environment.get(ALLOW_SINGLE) == "1":
        return
    for name, size in launched(environment).items():
        if size > 1:
            of_slurm = name not in _SIZES
            launcher = "srun, of which MPI has not heard" if of_slurm else _SIZES[name]
            way_out = (
                "srun --mpi=pmix or --mpi=pmi2 (srun --mpi=list names those there are)"
                if of_slurm
                else f"the mpiexec -n {size} of the library that mpi4py uses "
                "(python -c 'from mpi4py import MPI; print(MPI.Get_library_version())')"
            )
            raise RuntimeError(
                f"ProcessGrid: MPI has started this process alone, but {name}={size} says that it "
                f"is one of {size}, and each would compute by itself. It was set by {launcher}; "
                f"start it with {way_out}. Where one rank is meant, unset {name} or set "
                f"{ALLOW_SINGLE}=1"
            )


def _whole(text: str | None) -> int | None:
    """Return the whole number that a variable holds; None where it holds none."""
    return int(text) if text is not None and text.isdecimal() else None
