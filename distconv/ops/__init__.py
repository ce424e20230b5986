"""What torch functions mean on DistTensors, one folder a family; importing this registers them."""

from distconv.ops import (
    attention,
    autograd,
    foreach,
    grid_sample,
    interpolate,
    linear,
    loss,
    random,
    scalar,
)
from distconv.ops.conv import functions as convolutions
from distconv.ops.math import along_dimension, pointwise, product, softmax
from distconv.ops.norm import batch_norm, sample_norm
from distconv.ops.pool import adaptive, average, lp_pool, maximum, unpool
from distconv.ops.reduce import aggregates, extrema, norms, sums
from distconv.ops.shape import (
    indexing,
    lookup,
    pad,
    patches,
    pixel_shuffle,
    rearrange,
    reshape,
    scatter,
)

__all__ = [
    "adaptive",
    "aggregates",
    "along_dimension",
    "attention",
    "autograd",
    "average",
    "batch_norm",
    "convolutions",
    "extrema",
    "foreach",
    "grid_sample",
    "indexing",
    "interpolate",
    "linear",
    "lookup",
    "loss",
    "lp_pool",
    "maximum",
    "norms",
    "pad",
    "patches",
    "pixel_shuffle",
    "pointwise",
    "product",
    "random",
    "rearrange",
    "reshape",
    "sample_norm",
    "scalar",
    "scatter",
    "softmax",
    "sums",
    "unpool",
]
