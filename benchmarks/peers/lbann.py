"""LBANN's PyTorch package, which is imported as `distconv`, as this library is.

DISTCONV_OF_LBANN is the folder with its `distconv/`.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from benchmarks.peers.peer import Step, Task, torch_step


def _theirs() -> ModuleType:
    """Import the package beside this library, which has its name; raise ImportError for none."""
    folder = os.environ.get("DISTCONV_OF_LBANN")
    if not folder:
        raise ImportError("DISTCONV_OF_LBANN names no folder")
    ours = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "distconv"}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("distconv")
    finally:
        sys.path.remove(folder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "distconv"]:
            del sys.modules[name]
        sys.modules.update(ours)


package = _theirs()
NAME = f"LBANN/DistConv {getattr(package, '__version__', 'of unknown version')}"


def step(task: Task, ranks: int) -> Step:
    """Return the step of a task with the first spatial dimension cut; all ranks call it."""
    ps = package.ParallelStrategy(num_shards=ranks, shard_dim=2, device_type="cpu")
    model = package.DistConvDDP(task.copied(), parallel_strategy=ps)
    x = package.DCTensor.distribute(task.x, ps)

    def loss(made: Any, y: Tensor) -> Tensor:
        return task.loss(made.to_replicate(), y)

    return torch_step(model, x, task.y, loss)
