"""Convolutional networks on tensors partitioned over many processes, with serial results."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

import torch as _torch

from distconv import ops as _ops  # registers what torch functions mean on DistTensors
from distconv.comm.ledger import Redistribution, redistributions
from distconv.geometry.layout import Box, Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.model.clipping import clip_grad_norm_
from distconv.model.parallelize import no_sync, parallelize, unparallelize
from distconv.model.state_dicts import full_state_dict, load_full_state_dict
from distconv.ops.conv.functions import method
from distconv.ops.extend import elementwise, windowed
from distconv.tensor.dispatch import UnsupportedOperation, implements
from distconv.tensor.dist_tensor import DistTensor, default_layout, distribute_tensor, local_box
from distconv.tools.version import __version__ as __version__

if TYPE_CHECKING:
    from distconv import data as data
    from distconv import horovod as horovod
    from distconv import lbann as lbann
    from distconv import planning as planning
    from distconv import training as training
    from distconv.compiling.front import compile
    from distconv.data.checkpoint import load_checkpoint, save_checkpoint
    from distconv.tools.explain import explain
    from distconv.tools.infer import infer
    from distconv.tools.timeline import timeline
    from distconv.tools.traffic import LayerTraffic, count_traffic
    from distconv.tools.verify import verify

__all__ = [
    "Box",
    "DistTensor",
    "LayerTraffic",
    "Layout",
    "ProcessGrid",
    "Redistribution",
    "UnsupportedOperation",
    "clip_grad_norm_",
    "compile",
    "count_traffic",
    "data",
    "default_layout",
    "distribute_tensor",
    "elementwise",
    "explain",
    "full_state_dict",
    "implements",
    "infer",
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

_ON_DEMAND = {
    **{name: name for name in ("data", "horovod", "lbann", "planning", "training")},
    "LayerTraffic": "tools.traffic",
    "compile": "compiling.front",
    "count_traffic": "tools.traffic",
    "explain": "tools.explain",
    "infer": "tools.infer",
    "load_checkpoint": "data.checkpoint",
    "save_checkpoint": "data.checkpoint",
    "timeline": "tools.timeline",
    "verify": "tools.verify",
}
"""Public names that are imported at their first use, each with its module."""


_OF_ARRAYS: dict[str, _Any] = {
    "einsum": _torch.einsum,
    "tensordot": lambda x, y, axes=2: _torch.tensordot(x, y, dims=axes),
    "transpose": _torch.permute,
}
"""Functions that opt_einsum looks up, by numpy's names, in the package of an array's type. Without
these entries opt_einsum calls numpy."""


def __getattr__(name: str) -> _Any:
    if name in _OF_ARRAYS:
        return _OF_ARRAYS[name]
    if name in _ON_DEMAND:
        found = _import_module(f"{__name__}.{_ON_DEMAND[name]}")
        found = found if name == _ON_DEMAND[name] else getattr(found, name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
