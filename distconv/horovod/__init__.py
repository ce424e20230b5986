"""Horovod's torch interface, on the ranks of mpiexec or torchrun.

A script written for `import horovod.torch as hvd` runs with `import distconv.horovod as hvd`. Every
rank has a whole model and its own samples. For a model that is partitioned over ranks use
`distconv.parallelize`, which does not need this module.
"""

from typing import Any as _Any

from distconv.horovod.collectives import Adasum as Adasum
from distconv.horovod.collectives import Average as Average
from distconv.horovod.collectives import Max as Max
from distconv.horovod.collectives import Min as Min
from distconv.horovod.collectives import Product as Product
from distconv.horovod.collectives import ReduceOp as ReduceOp
from distconv.horovod.collectives import Sum as Sum
from distconv.horovod.collectives import allgather as allgather
from distconv.horovod.collectives import allgather_async as allgather_async
from distconv.horovod.collectives import allreduce as allreduce
from distconv.horovod.collectives import allreduce_ as allreduce_
from distconv.horovod.collectives import allreduce_async as allreduce_async
from distconv.horovod.collectives import allreduce_async_ as allreduce_async_
from distconv.horovod.collectives import alltoall as alltoall
from distconv.horovod.collectives import alltoall_async as alltoall_async
from distconv.horovod.collectives import broadcast as broadcast
from distconv.horovod.collectives import broadcast_ as broadcast_
from distconv.horovod.collectives import broadcast_async as broadcast_async
from distconv.horovod.collectives import broadcast_async_ as broadcast_async_
from distconv.horovod.collectives import grouped_allgather as grouped_allgather
from distconv.horovod.collectives import grouped_allgather_async as grouped_allgather_async
from distconv.horovod.collectives import grouped_allreduce as grouped_allreduce
from distconv.horovod.collectives import grouped_allreduce_ as grouped_allreduce_
from distconv.horovod.collectives import grouped_allreduce_async as grouped_allreduce_async
from distconv.horovod.collectives import grouped_allreduce_async_ as grouped_allreduce_async_
from distconv.horovod.collectives import grouped_reducescatter as grouped_reducescatter
from distconv.horovod.collectives import grouped_reducescatter_async as grouped_reducescatter_async
from distconv.horovod.collectives import join as join
from distconv.horovod.collectives import reducescatter as reducescatter
from distconv.horovod.collectives import reducescatter_async as reducescatter_async
from distconv.horovod.collectives import sparse_allreduce_async as sparse_allreduce_async
from distconv.horovod.compression import Compression as Compression
from distconv.horovod.compression import poll as poll
from distconv.horovod.compression import synchronize as synchronize
from distconv.horovod.job import HorovodInternalError as HorovodInternalError
from distconv.horovod.job import ProcessSet as ProcessSet
from distconv.horovod.job import add_process_set as add_process_set
from distconv.horovod.job import ccl_built as ccl_built
from distconv.horovod.job import cross_rank as cross_rank
from distconv.horovod.job import cross_size as cross_size
from distconv.horovod.job import cuda_built as cuda_built
from distconv.horovod.job import ddl_built as ddl_built
from distconv.horovod.job import get_process_set_ids_and_ranks as get_process_set_ids_and_ranks
from distconv.horovod.job import global_process_set as global_process_set
from distconv.horovod.job import gloo_built as gloo_built
from distconv.horovod.job import gloo_enabled as gloo_enabled
from distconv.horovod.job import init as init
from distconv.horovod.job import is_homogeneous as is_homogeneous
from distconv.horovod.job import is_initialized as is_initialized
from distconv.horovod.job import local_rank as local_rank
from distconv.horovod.job import local_size as local_size
from distconv.horovod.job import mpi_built as mpi_built
from distconv.horovod.job import mpi_enabled as mpi_enabled
from distconv.horovod.job import mpi_threads_supported as mpi_threads_supported
from distconv.horovod.job import nccl_built as nccl_built
from distconv.horovod.job import rank as rank
from distconv.horovod.job import remove_process_set as remove_process_set
from distconv.horovod.job import rocm_built as rocm_built
from distconv.horovod.job import shutdown as shutdown
from distconv.horovod.job import size as size
from distconv.horovod.objects import allgather_object as allgather_object
from distconv.horovod.objects import barrier as barrier
from distconv.horovod.objects import broadcast_object as broadcast_object
from distconv.horovod.objects import broadcast_optimizer_state as broadcast_optimizer_state
from distconv.horovod.objects import broadcast_parameters as broadcast_parameters
from distconv.horovod.optimizer import DistributedOptimizer as DistributedOptimizer

_TIMELINE = 'record with distconv.timeline("trace.json"):'
_WAYS_OUT = {
    "elastic": "save checkpoints, and let torchrun or the scheduler start the job again",
    "run": "start the script with mpiexec -n 4 or torchrun --nproc-per-node 4",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "SyncBatchNorm": "train with distconv.parallelize, which normalizes over the whole mini-batch",
}
"""Names of Horovod that are missing here, and the way out for each."""


def __getattr__(name: str) -> _Any:
    if name in _WAYS_OUT:
        # Not an AttributeError: `from distconv.horovod import name` would drop its message.
        raise NotImplementedError(f"distconv.horovod has no {name}; {_WAYS_OUT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
