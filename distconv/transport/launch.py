"""How the ranks of the job were started and connect: by MPI, or by torch.distributed.

MPI is initialised when a program first needs it. Worker processes that a rank starts are not ranks.
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

ALLOW_SINGLE = "DISTCONV_ALLOW_SINGLE"

CONTINUE = "DISTCONV_CONTINUE"
"""The environment variable with the path of a file that a program creates to be continued: the
job's script queues the job again if the file exists."""

_SIZES = {
    "PMI_SIZE": "the mpiexec of MPICH or Intel MPI, or srun with PMI, which belongs to another MPI "
    "library than mpi4py uses",
    "OMPI_COMM_WORLD_SIZE": "the mpiexec of Open MPI, which belongs to another MPI library than "
    "mpi4py uses",
    "SUBMITIT_LOCAL_NTASKS": "submitit",
    "WORLD_SIZE": "a launcher like torchrun, but RANK, MASTER_ADDR and MASTER_PORT, which ranks "
    "need to connect, are not all set",
}
"""The launchers' variables for the number of processes, each with its launcher in words."""

_SIZES_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

_STEP_SIZE = "SLURM_STEP_NUM_TASKS"
"""The variable with the number of tasks of one srun. SLURM_NTASKS is also set in the shell of an
allocation, where a program started without srun is meant to be a single process."""

_ALLOCATED = ("SLURM_NTASKS", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "PBS_NP")
"""Variables with the number of tasks of a job, also set without the job's launcher."""

_FIRST_UNNUMBERED_STEP = 0xFFFFFFF0
"""The smallest number that Slurm gives to steps other than sruns, such as a batch script."""

_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables with which ranks of torch.distributed connect."""

_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The variable that only torchrun sets."""

_SHARED = "/dev/shm"
"""The shared memory of the processes of a node; containers have 64 MiB of it, or less."""

_FOR_EACH_RANK = 1_060_000
"""The bytes of shared memory that MPICH was measured to need for each rank."""

_copied_from: int | None = None
"""The process number of the rank from which this process was forked; None in a rank."""

_has_joined = False
"""Whether this process has connected to the other ranks by a store of torch.distributed."""


def _note_fork() -> None:
    global _copied_from
    if ("mpi4py.MPI" in sys.modules or _has_joined) and _copied_from is None:
        _copied_from = os.getppid()
        atexit.register(_leave)


def _leave() -> None:
    """End a forked process at its exit, before MPI_Finalize, which would wait for other ranks.

    The exit status is 0. A process that needs another status calls os._exit, as Python advises
    after os.fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


os.register_at_fork(after_in_child=_note_fork)


def is_copy() -> bool:
    """Return whether this process was forked from a rank that was connected to other ranks."""
    return _copied_from is not None


def note_joined() -> None:
    """Note that this process has connected to the other ranks by a store of torch.distributed."""
    global _has_joined
    _has_joined = True


def check_is_rank() -> None:
    """Raise `RuntimeError` in a worker process, which is not a rank and cannot send messages."""
    if _copied_from is not None:
        raise RuntimeError(
            f"distconv: process {os.getpid()} was forked from process {_copied_from}, a rank of "
            "the job, and cannot send messages; return plain tensors from workers, and create "
            "grids and DistTensors in the rank"
        )
    started = _ranks_of_mpi() > 1 or _has_joined or has_default_group()
    if not started and multiprocessing.parent_process() is not None and launched():
        raise RuntimeError(
            f"distconv: process {os.getpid()} ({multiprocessing.current_process().name}) is a "
            "worker started by multiprocessing, not a rank of the job; create grids and "
            'DistTensors in the rank, under `if __name__ == "__main__":` because workers import '
            "the program again, and return plain tensors from workers"
        )


def mpi() -> ModuleType:
    """Import `mpi4py.MPI`, which initialises MPI, and return it; raise RuntimeError in a worker."""
    check_is_rank()
    return _imported_mpi()


@cache
def _imported_mpi() -> ModuleType:
    _warn_of_little_memory()
    from mpi4py import MPI

    return MPI


def check_mpi_runs() -> None:
    """Raise `RuntimeError` if mpi4py.MPI is imported, but MPI is not running."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_finalized():
        raise RuntimeError(
            "ProcessGrid: MPI has ended, by MPI.Finalize(); use grids before that call, or remove "
            "it, since mpi4py calls it at the end of the program"
        )
    if MPI is not None and not MPI.Is_initialized():
        raise RuntimeError(
            "ProcessGrid: MPI is not initialized, because mpi4py.rc.initialize is False; call "
            "MPI.Init_thread() on every rank before the first grid, or do not set "
            "mpi4py.rc.initialize"
        )


def keep_launcher_from_children() -> None:
    """Delete the environment variables by which a child of this rank would connect to the launcher.

    A child that imports mpi4py, as a spawned worker may, would initialise MPI a second time as this
    rank. A job of MPICH then ends; a job of Open MPI crashes or never ends. Does nothing before MPI
    is initialised.
    """
    if _ranks_of_mpi():
        for name in [name for name in os.environ if name == "PMI_FD" or name.startswith("PMIX_")]:
            del os.environ[name]


def running_mpi() -> Any:
    """Return the module mpi4py.MPI if MPI is initialised and not finalised, else None."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    return MPI if MPI and MPI.Is_initialized() and not MPI.Is_finalized() else None


def _ranks_of_mpi() -> int:
    """Return the number of ranks of MPI.COMM_WORLD; 0 if MPI is not running in this process."""
    MPI = running_mpi()
    return MPI.COMM_WORLD.size if MPI else 0


def _warn_of_little_memory(environment: Mapping[str, str] = os.environ) -> None:
    """Print a warning if this node has too little shared memory for its ranks of MPICH.

    Without enough shared memory, a rank ends by a bus error without a message. Only the first rank
    of each node checks.
    """
    ranks = int(environment.get("MPI_LOCALNRANKS", 0))
    if environment.get("MPI_LOCALRANKID") != "0" or not os.path.isdir(_SHARED):
        return
    free = shutil.disk_usage(_SHARED).free
    if free < ranks * _FOR_EACH_RANK:
        print(
            f"distconv: {_SHARED} has {free / 2**20:.1f} MiB free, and MPICH needs about "
            f"{ranks * _FOR_EACH_RANK / 2**20:.1f} MiB there for {ranks} ranks, or it fails with "
            "a bus error (signal 7). Increase it, for example by docker run --shm-size=1g, or "
            "remove old files from it",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(2)  # when a rank ends, the launcher drops output that it has not yet read


def has_mpi() -> bool:
    """Return whether `mpi4py.MPI` can be imported; the import initialises MPI.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.mpi_built() in (True, False)
    True
    """
    try:
        check_is_rank()
        _imported_mpi()
    except (ImportError, RuntimeError):
        return False
    return True


def has_default_group() -> bool:
    """Return whether the program has initialised a default group of torch.distributed."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def switched_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment variable `name` is set, and not to 0, false, no or off."""
    return environment.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def start_line(ranks: int) -> str:
    """Return a command that starts `ranks` ranks, such as "mpiexec -n 4 ...", by this launcher."""
    if meets_by_torch():
        return f"torchrun --nproc-per-node {ranks} ..."
    return f"{'srun -n' if _STEP_SIZE in launched() else 'mpiexec -n'} {ranks} ..."


def meets_by_torch() -> bool:
    """Return whether the ranks of the job connect by torch.distributed, not by MPI.

    True under torchrun. Also true if torchrun's variables are set or torch has a default group,
    unless a launcher of MPI has started several ranks. False with DISTCONV_ALLOW_SINGLE=1.
    """
    if switched_on(ALLOW_SINGLE):
        return False
    meeting = all(os.environ.get(name) for name in _MEETING)
    if meeting and _BY_TORCHRUN in os.environ:
        return True  # also if MPI or Slurm has started torchrun on each node
    by_mpi = _ranks_of_mpi() > 1 or any(
        (_whole(os.environ.get(name)) or 1) > 1 for name in _SIZES_OF_MPI
    )
    return (meeting or has_default_group()) and not by_mpi


def launched(environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Return the number of processes that each launcher's variable in `environment` gives, by name.

    A variable of Slurm is included if srun has started this process, and no launcher of MPI has.
    """
    found = {}
    for name in _SIZES:
        if (size := _whole(environment.get(name))) is not None:
            found[name] = size
    step = _whole(environment.get("SLURM_STEP_ID"))
    size = _whole(environment.get(_STEP_SIZE)) or _whole(environment.get("SLURM_NTASKS"))
    by_mpi = any(name in found for name in _SIZES_OF_MPI)
    if size is not None and step is not None and step < _FIRST_UNNUMBERED_STEP and not by_mpi:
        found[_STEP_SIZE if environment.get(_STEP_SIZE) else "SLURM_NTASKS"] = size
    return found


def place_by_torch() -> tuple[int, int] | None:
    """Return this process's rank in torch.distributed and the number of ranks, or None.

    Returns None if the ranks do not connect by torch, and in a worker that multiprocessing has
    started in a rank.
    """
    if not meets_by_torch():
        return None
    if has_default_group():
        from torch import distributed

        return distributed.get_rank(), distributed.get_world_size()
    if not _has_joined and multiprocessing.parent_process() is not None:
        return None
    rank, size = (_whole(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    return None if rank is None or size is None else (rank, size)


def check_launch(ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `RuntimeError` if `ranks` is 1 although a launcher has started several processes.

    Otherwise each process would run the complete program alone, without an error.
    """
    if ranks > 1 or switched_on(ALLOW_SINGLE, environment):
        return
    for name, size in launched(environment).items():
        if size > 1:
            raise RuntimeError(
                f"ProcessGrid: this process is not connected to other ranks, but {name}={size} "
                f"declares {size} ranks, and each would compute alone. {_way_out(name, size)}. If "
                f"one rank is intended, unset {name} or set {ALLOW_SINGLE}=1"
            )


def notice_of_tasks(ranks: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if `ranks` is 1 in a job of several tasks, else None.

    This is not an error, as the shell of a job may start a single process on purpose.
    """
    if ranks > 1 or launched(environment) or switched_on(ALLOW_SINGLE, environment):
        return None
    for name in _ALLOCATED:
        if (tasks := _whole(environment.get(name)) or 0) > 1:
            return (
                f"one rank computes everything, in a job of {name}={tasks} tasks; start the "
                f"program by the job's launcher, for example srun -n {tasks}, or set "
                f"{ALLOW_SINGLE}=1"
            )
    return None


def _way_out(name: str, size: int) -> str:
    """Return advice: which launcher sets the variable `name`, and how to start `size` ranks."""
    by_torch = f"torchrun --nproc-per-node {size}"
    if name == "SUBMITIT_LOCAL_NTASKS":
        return (
            "It was set by submitit; call submitit.helpers.TorchDistributedEnvironment().export() "
            "before the first grid, by which its tasks become ranks"
        )
    if name != "WORLD_SIZE" and importlib.util.find_spec("mpi4py") is None:
        return (
            "mpi4py, which connects ranks of MPI, is not installed: pip install "
            "'distconv[mpich]', or 'distconv[mpi]' for an installed MPI, or start the program "
            f"with {by_torch}"
        )
    launcher = _SIZES.get(name, "srun without support for this MPI")
    if name == "WORLD_SIZE":
        start = f"{by_torch}, or mpiexec -n {size}"
    elif name in _SIZES_OF_MPI:
        start = (
            f"the mpiexec -n {size} of the library that mpi4py uses "
            "(python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'), or torchrun"
        )
    else:
        start = (
            "srun --mpi=pmix or --mpi=pmi2 (srun --mpi=list shows the available ones), or "
            "torchrun on each node"
        )
    return f"It was set by {launcher}; start the program with {start}"


def _whole(text: str | None) -> int | None:
    """Return the integer, 0 or more, that `text` holds; None for other text, or for None."""
    return int(text) if text is not None and text.isdecimal() else None
