"""Horovod's habits: the names of its torch interface, on the ranks of mpiexec or torchrun.

A script that was written for `import horovod.torch as hvd` runs with `import distconv.horovod as
hvd`. Every rank has a whole model and samples of its own; a model that is cut over ranks is the
matter of `distconv.parallelize`, which needs nothing of this.
"""

from typing import Any as _Any

from distconv.horovod.broadcasts import (
    allgather,
    allgather_async,
    allgather_object,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from distconv.horovod.compression import Compression, Compressor
from distconv.horovod.handles import poll, synchronize
from distconv.horovod.job import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from distconv.horovod.optimizer import DistributedOptimizer
from distconv.horovod.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    global_process_set,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]

_PROCESS_SETS = "make a distconv.ProcessGrid on some of the ranks, ProcessGrid([0, 1], sample=2)"
_TIMELINE = 'record with distconv.timeline("trace.json"):'
_WAYS_OUT = {
    "elastic": "save checkpoints, and let torchrun or the scheduler start the job again",
    "run": "start the script with mpiexec -n 4 or torchrun --nproc-per-node 4",
    "ProcessSet": _PROCESS_SETS,
    "add_process_set": _PROCESS_SETS,
    "remove_process_set": _PROCESS_SETS,
    "get_process_set_ids_and_ranks": _PROCESS_SETS,
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "SyncBatchNorm": "train with distconv.parallelize, where batch normalisation is exact",
    "alltoall": "exchange by allgather and take the own part",
    "grouped_allgather": "call allgather for each tensor",
    "grouped_allgather_async": "call allgather_async for each tensor",
    "grouped_reducescatter": "use grouped_allreduce and take the own part",
    "grouped_reducescatter_async": "use grouped_allreduce and take the own part",
    "alltoall_async": "exchange by allgather and take the own part",
    "reducescatter": "use allreduce and take the own part",
    "reducescatter_async": "use allreduce and take the own part",
    "sparse_allreduce_async": "pass sparse_as_dense=True to DistributedOptimizer",
}
"""Names of Horovod without a counterpart here, and what to do instead."""


def __getattr__(name: str) -> _Any:
    if name in _WAYS_OUT:
        # No AttributeError: `from distconv.horovod import name` would drop its message.
        raise NotImplementedError(f"distconv.horovod has no {name}; {_WAYS_OUT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
