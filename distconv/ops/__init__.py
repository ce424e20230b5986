"""What torch functions mean on DistTensors, one file per family; importing this registers them."""

from distconv.ops import (
    conv,
    extrema,
    index,
    interpolate,
    linear,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    reduction,
    resample,
    samplenorm,
    scalar,
    shape,
    transposed,
)

__all__ = [
    "conv",
    "extrema",
    "index",
    "interpolate",
    "linear",
    "loss",
    "norm",
    "pad",
    "pointwise",
    "pool",
    "reduction",
    "resample",
    "samplenorm",
    "scalar",
    "shape",
    "transposed",
]
