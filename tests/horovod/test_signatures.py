"""Functions have the parameters of Horovod 0.28.1, by name and in order."""

from __future__ import annotations

import inspect

import pytest

import distconv.horovod as hvd

SIGNATURES = """
allgather: tensor | name process_set
allgather_async: tensor | name process_set
allgather_object: obj | name
allreduce: tensor | average name compression op prescale_factor postscale_factor process_set
allreduce_: tensor | average name op prescale_factor postscale_factor process_set
allreduce_async: tensor | average name op prescale_factor postscale_factor process_set
allreduce_async_: tensor | average name op prescale_factor postscale_factor process_set
alltoall: tensor | splits name process_set
alltoall_async: tensor | splits name process_set
barrier: | process_set
broadcast: tensor root_rank | name process_set
broadcast_: tensor root_rank | name process_set
broadcast_async: tensor root_rank | name process_set
broadcast_async_: tensor root_rank | name process_set
broadcast_object: obj | root_rank name process_set
broadcast_optimizer_state: optimizer root_rank | model
broadcast_parameters: params root_rank |
grouped_allgather: tensors | name process_set
grouped_allgather_async: tensors | name process_set
grouped_allreduce: tensors | average name compression op prescale_factor postscale_factor \
process_set
grouped_allreduce_: tensors | average name op prescale_factor postscale_factor process_set
grouped_allreduce_async: tensors | average name op prescale_factor postscale_factor process_set
grouped_allreduce_async_: tensors | average name op prescale_factor postscale_factor process_set
grouped_reducescatter: tensors | name compression op process_set prescale_factor postscale_factor
grouped_reducescatter_async: tensors | name op process_set prescale_factor postscale_factor
join: | device
poll: handle |
reducescatter: tensor | name compression op process_set prescale_factor postscale_factor
reducescatter_async: tensor | name op process_set prescale_factor postscale_factor
sparse_allreduce_async: tensor name op | process_set
synchronize: handle |
init: | comm process_sets
add_process_set: process_set |
remove_process_set: process_set |
ProcessSet: ranks_or_comm |
DistributedOptimizer: optimizer | named_parameters compression backward_passes_per_step op \
gradient_predivide_factor num_groups groups sparse_as_dense process_set
Compression.none.compress: tensor |
Compression.none.decompress: tensor ctx |
Compression.fp16.compress: tensor |
Compression.fp16.decompress: tensor ctx |
ccl_built: |
cross_rank: |
cross_size: |
cuda_built: |
ddl_built: |
gloo_built: |
gloo_enabled: |
is_initialized: |
local_rank: |
local_size: |
mpi_built: |
mpi_enabled: |
mpi_threads_supported: |
nccl_built: |
rank: |
rocm_built: |
shutdown: |
size: |
"""
"""A line for each function: the required parameters, a bar, and the optional ones.

From horovod/torch/__init__.py, mpi_ops.py, functions.py, optimizer.py and compression.py, and from
horovod/common/basics.py and process_sets.py.
"""


@pytest.mark.parametrize("line", SIGNATURES.strip().split("\n"))
def test_parameters_have_horovods_names_and_order(line: str) -> None:
    name, _, theirs = line.partition(": ")
    required, optional = (part.split() for part in theirs.split("|"))
    function = hvd
    for part in name.split("."):
        function = getattr(function, part)
    ours = list(inspect.signature(function).parameters.values())
    assert [p.name for p in ours][: len(required + optional)] == required + optional
    for p in ours:
        assert p.name in required or p.default is not p.empty
        assert p.name not in required + optional or p.kind is p.POSITIONAL_OR_KEYWORD
