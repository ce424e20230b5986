"""torch's DTensor: the width of planes and volumes is cut, as it convolves along no other."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from benchmarks.peers.peer import Step, Task, torch_step, with_whole_gradients

NAME = f"torch DTensor {torch.__version__}"


def step(task: Task, ranks: int) -> Step:
    """Return the step of a task; all ranks call it."""
    mesh = init_device_mesh("cpu", (ranks,))
    module = distribute_module(task.copied(), mesh)
    x, y = (distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for t in (task.x, task.y))
    return with_whole_gradients(torch_step(module, x, y, task.loss))
