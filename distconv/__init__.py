"""Convolutional networks on tensors cut over many processes, with the serial numbers."""

from distconv import ops as _ops  # registers what torch functions mean on DistTensors
from distconv.explain import explain
from distconv.extend import elementwise, windowed
from distconv.grid import ProcessGrid
from distconv.layout import Box, Layout
from distconv.ledger import Redistribution, redistributions
from distconv.method import method
from distconv.parallelize import no_sync, parallelize
from distconv.tensor import (
    DistTensor,
    UnsupportedOperation,
    default_layout,
    distribute_tensor,
    implements,
    local_box,
)
from distconv.verify import verify

__all__ = [
    "Box",
    "DistTensor",
    "Layout",
    "ProcessGrid",
    "Redistribution",
    "UnsupportedOperation",
    "default_layout",
    "distribute_tensor",
    "elementwise",
    "explain",
    "implements",
    "local_box",
    "method",
    "no_sync",
    "parallelize",
    "redistributions",
    "verify",
    "windowed",
]
del _ops
