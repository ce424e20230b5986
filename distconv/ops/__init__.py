"""What torch functions mean on DistTensors, one folder a family; importing this registers them."""

from distconv.ops import autograd, comparison, foreach, interpolate, linear, loss, random, scalar
from distconv.ops.conv import functions as convolutions
from distconv.ops.linalg import matrices, vectors
from distconv.ops.math import (
    along_dimension,
    differences,
    distances,
    fourier,
    pointwise,
    product,
    search,
)
from distconv.ops.norm import batch_norm, sample_norm
from distconv.ops.pool import adaptive, average, lp_pool, maximum, unpool
from distconv.ops.reduce import aggregates, counts, extrema, order_statistics, sums
from distconv.ops.shape import (
    compositions,
    diagonals,
    indexing,
    joining,
    lookup,
    pad,
    patches,
    pixel_shuffle,
    rearrange,
    reshape,
    splitting,
    views,
    writing,
)

__all__ = [
    "adaptive",
    "aggregates",
    "along_dimension",
    "autograd",
    "average",
    "batch_norm",
    "comparison",
    "compositions",
    "convolutions",
    "counts",
    "diagonals",
    "differences",
    "distances",
    "extrema",
    "foreach",
    "fourier",
    "indexing",
    "interpolate",
    "joining",
    "linear",
    "lookup",
    "loss",
    "lp_pool",
    "matrices",
    "maximum",
    "order_statistics",
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
    "search",
    "splitting",
    "sums",
    "unpool",
    "vectors",
    "views",
    "writing",
]
