"""Learning at scale: what depends on how many replicas learn together.

Everything here counts P_N, the replicas of a grid, and never its ranks: a worker is a replica, the
P_S ranks that share a sample. Models, optimizers and training loops stay those of the program.
"""

from distconv.training.advice import advise, max_batch
from distconv.training.compression import GradientCompression
from distconv.training.concurrent import ConcurrentReductions
from distconv.training.consistency import assert_in_sync
from distconv.training.decay import (
    Constant,
    Cosine,
    Decay,
    Exponential,
    InverseTime,
    Polynomial,
    Step,
)
from distconv.training.elastic import ElasticAveraging
from distconv.training.lag import GradientLag
from distconv.training.larc import LARC, LARS
from distconv.training.noise_scale import NoiseScale
from distconv.training.recipe import Recipe, base_rate, number_of_steps
from distconv.training.workers import worker_grid

__all__ = [
    "LARC",
    "LARS",
    "ConcurrentReductions",
    "Constant",
    "Cosine",
    "Decay",
    "ElasticAveraging",
    "Exponential",
    "GradientCompression",
    "GradientLag",
    "InverseTime",
    "NoiseScale",
    "Polynomial",
    "Recipe",
    "Step",
    "advise",
    "assert_in_sync",
    "base_rate",
    "max_batch",
    "number_of_steps",
    "worker_grid",
]
