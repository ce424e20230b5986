"""What torch functions mean on DistTensors, one file per family; importing this registers them."""

from distconv.ops import (
    conv,
    index,
    linear,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    reduction,
    resample,
    scalar,
    shape,
)

__all__ = [
    "conv",
    "index",
    "linear",
    "loss",
    "norm",
    "pad",
    "pointwise",
    "pool",
    "reduction",
    "resample",
    "scalar",
    "shape",
]
