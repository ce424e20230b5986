"""Horovod's habits: the names of its torch interface, on the ranks of mpiexec or torchrun.

A script that was written for `import horovod.torch as hvd` runs with `import distconv.horovod as
hvd`. Every rank has a whole model and samples of its own; a model that is cut over ranks is the
matter of `distconv.parallelize`, which needs nothing of this.
"""

from typing import Any as _Any

from distconv.horovod.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from distconv.horovod.compression import Compression, Compressor
from distconv.horovod.handles import poll, synchronize
from distconv.horovod.job import HorovodInternalError
from distconv.horovod.objects import (
    allgather_object,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from distconv.horovod.optimizer import DistributedOptimizer
from distconv.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    get_process_set_ids_and_ranks,
    global_process_set,
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
    remove_process_set,
    rocm_built,
    shutdown,
    size,
)

__all__ = [
    "sparse_allreduce_async",
    "remove_process_set",
    "reducescatter_async",
    "reducescatter",
    "grouped_reducescatter_async",
    "grouped_reducescatter",
    "grouped_allgather_async",
    "grouped_allgather",
    "get_process_set_ids_and_ranks",
    "alltoall_async",
    "alltoall",
    "add_process_set",
    "ProcessSet",
    "HorovodInternalError",
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

_TIMELINE = 'record with distconv.timeline("trace.json"):'
_WAYS_OUT = {
    "elastic": "save checkpoints, and let torchrun or the scheduler start the job again",
    "run": "start the script with mpiexec -n 4 or torchrun --nproc-per-node 4",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "SyncBatchNorm": "train with distconv.parallelize, where batch normalisation is exact",
}
"""Names of Horovod without a counterpart here, and what to do instead."""


def __getattr__(name: str) -> _Any:
    if name in _WAYS_OUT:
        # No AttributeError: `from distconv.horovod import name` would drop its message.
        raise NotImplementedError(f"distconv.horovod has no {name}; {_WAYS_OUT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
