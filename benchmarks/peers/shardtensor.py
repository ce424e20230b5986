"""ShardTensor of NVIDIA's PhysicsNeMo: the first spatial dimension is cut."""

from __future__ import annotations

from importlib import metadata

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module

from benchmarks.peers.peer import Step, Task, torch_step, with_whole_gradients


def _declare_operators_of_torchvision() -> None:
    """Declare the operators that an import of torchvision asks for, and that no network here uses.

    Its wheels bring them for torch on CUDA, and do not load beside a torch for CPUs.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            form = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", form)


_declare_operators_of_torchvision()

from physicsnemo.domain_parallel import ShardTensor, register_custom_ops  # noqa: E402

register_custom_ops()  # by itself only where torch finds a GPU

NAME = f"ShardTensor {metadata.version('nvidia-physicsnemo')}"


def step(task: Task, ranks: int) -> Step:
    """Return the step of a task; all ranks call it."""
    mesh = init_device_mesh("cpu", (ranks,))
    x, y = (
        ShardTensor.from_local(
            t.chunk(ranks, 2)[mesh.get_local_rank()].contiguous(),
            *(mesh, [Shard(2)]),
            sharding_shapes="chunk",
            global_shape=tuple(t.shape),
        )
        for t in (task.x, task.y)
    )
    module = distribute_module(task.copied(), mesh)
    return with_whole_gradients(torch_step(module, x, y, task.loss))
