"""Convolutional networks on tensors cut over many processes, with the serial numbers."""

from distconv import ops as _ops  # registers what torch functions mean on DistTensors
from distconv.clip import clip_grad_norm_
from distconv.explain import explain
from distconv.extend import elementwise, windowed
from distconv.grid import ProcessGrid
from distconv.layout import Box, Layout
from distconv.ledger import Redistribution, redistributions
from distconv.method import method
from distconv.parallelize import no_sync, parallelize
from distconv.state import full_state_dict, load_full_state_dict
from distconv.tensor import (
    DistTensor,
    UnsupportedOperation,
    default_layout,
    distribute_tensor,
    implements,
    local_box,
)
from distconv.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Box",
    "DistTensor",
    "Layout",
    "ProcessGrid",
    "Redistribution",
    "UnsupportedOperation",
    "clip_grad_norm_",
    "default_layout",
    "distribute_tensor",
    "elementwise",
    "explain",
    "full_state_dict",
    "implements",
    "load_full_state_dict",
    "local_box",
    "method",
    "no_sync",
    "parallelize",
    "redistributions",
    "verify",
    "windowed",
]
del _ops
