"""DistDL: layers of its own on the ranks of MPI; the first spatial dimension is cut.

A network of torch has its layers replaced. Rank 0 holds the parameters.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import distdl.nn as layers
import numpy as np
import torch
from distdl.backends.mpi.partition import MPIPartition
from torch import Tensor, nn

from benchmarks.peers.peer import Step, Task, torch_step
from distconv.transport.launch import mpi

NAME = f"DistDL {metadata.version('distdl')}"

_NORMS = {"weight": "gamma", "bias": "beta"}
"""Names of a batch norm's parameters, by torch's."""


def step(task: Task, ranks: int) -> Step:
    """Return the step of a task; all ranks call it."""
    comm = mpi().COMM_WORLD
    base = MPIPartition(comm).create_partition_inclusive(np.arange(ranks))
    parts = base.create_cartesian_topology_partition([1, 1, ranks, *(1,) * (task.x.dim() - 3)])
    module = task.copied()
    _translate(module, parts)
    # The first n mod p parts have one element more, in both.
    x, y = (t.tensor_split(ranks, 2)[comm.rank].contiguous() for t in (task.x, task.y))
    made = torch_step(module, x, y, layers.DistributedMSELoss(parts))

    def gradients() -> list[Tensor]:
        found = []
        for name, p in task.module.named_parameters():
            layer, _, kind = name.rpartition(".")
            grad = _parameter(module.get_submodule(layer), kind).grad
            found.append(comm.bcast(None if grad is None else grad.reshape(p.shape)))
        return found

    return made._replace(gradients=gradients)


def _translate(module: nn.Module, parts: Any) -> None:
    """Replace the layers within a module by layers on a partition; all ranks call it."""
    for name, part in module.named_children():
        if next(part.children(), None) is not None:
            _translate(part, parts)
            continue
        made = _layer(part, parts)
        setattr(module, name, made)
        if mpi().COMM_WORLD.rank == 0:
            for kind, p in part.named_parameters():
                own = _parameter(made, kind)
                with torch.no_grad():
                    own.copy_(p.reshape(own.shape))


def _layer(part: Any, parts: Any) -> nn.Module:
    """Return DistDL's layer in place of a layer of torch, on a partition."""
    name = type(part).__name__
    if isinstance(part, (nn.Conv2d, nn.Conv3d)):
        makes = getattr(layers, f"DistributedFeature{name}")
        same = "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"
        options = {option: getattr(part, option) for option in same}
        bias = part.bias is not None
        made = makes(parts, bias=bias, dtype=part.weight.dtype, **options)
    elif isinstance(part, (nn.MaxPool2d, nn.MaxPool3d)):
        made = getattr(layers, f"Distributed{name}")(parts, part.kernel_size, part.stride)
    elif isinstance(part, (nn.BatchNorm2d, nn.BatchNorm3d)):
        made = layers.DistributedBatchNorm(parts, part.num_features, part.eps, part.momentum)
        made = made.to(part.weight.dtype)
    elif next(part.parameters(), None) is None:
        return part  # of every element alone
    else:
        raise NotImplementedError(f"DistDL has no {name}")
    result: nn.Module = made
    return result


def _parameter(layer: nn.Module, kind: str) -> Tensor:
    """Return the parameter that torch names `weight` or `bias`; empty but on rank 0."""
    norm = isinstance(layer, layers.DistributedBatchNorm)
    found: Tensor = getattr(layer, _NORMS[kind] if norm else kind)
    return found
