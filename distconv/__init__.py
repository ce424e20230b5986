"""Convolutional networks on tensors cut over many processes, with the serial program's numbers."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING
from typing import Any as _Any

import torch as _torch

from distconv import data
from distconv import ops as _ops  # registers what torch functions mean on DistTensors
from distconv.comm.ledger import Redistribution, redistributions
from distconv.compiling.front import compile
from distconv.data.checkpoint import load_checkpoint, save_checkpoint
from distconv.geometry.layout import Box, Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.model.clipping import clip_grad_norm_
from distconv.model.parallelize import no_sync, parallelize, unparallelize
from distconv.model.state_dicts import full_state_dict, load_full_state_dict
from distconv.ops.conv.functions import method
from distconv.ops.extend import elementwise, windowed
from distconv.tensor.dispatch import UnsupportedOperation, implements
from distconv.tensor.dist_tensor import DistTensor, default_layout, distribute_tensor, local_box
from distconv.tools.explain import explain
from distconv.tools.timeline import timeline
from distconv.tools.verify import verify
from distconv.tools.version import __version__ as __version__

if TYPE_CHECKING:
    from distconv import horovod as horovod
    from distconv import lbann as lbann
    from distconv import planning as planning
    from distconv import training as training

__all__ = [
    "Box",
    "DistTensor",
    "Layout",
    "ProcessGrid",
    "Redistribution",
    "UnsupportedOperation",
    "clip_grad_norm_",
    "compile",
    "data",
    "default_layout",
    "distribute_tensor",
    "elementwise",
    "explain",
    "full_state_dict",
    "implements",
    "load_checkpoint",
    "load_full_state_dict",
    "local_box",
    "method",
    "no_sync",
    "parallelize",
    "redistributions",
    "save_checkpoint",
    "timeline",
    "unparallelize",
    "verify",
    "windowed",
]
del _ops, TYPE_CHECKING

_ON_DEMAND = ("horovod", "lbann", "planning", "training")
"""Folders that are imported when they are first used."""


_OF_ARRAYS: dict[str, _Any] = {
    "einsum": _torch.einsum,
    "tensordot": lambda x, y, axes=2: _torch.tensordot(x, y, dims=axes),
    "transpose": _torch.permute,
}
"""Functions that opt_einsum looks up, by numpy's names, in the package of an array's type. Without
them it uses numpy's."""


def __getattr__(name: str) -> _ModuleType | _Any:
    if name in _OF_ARRAYS:
        return _OF_ARRAYS[name]
    if name in _ON_DEMAND:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
