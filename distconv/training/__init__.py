"""Learning at scale: methods for many replicas that train one model together.

They count the P_N replicas of a grid, never its ranks: a worker is a replica, the P_S ranks that
share a sample. Models, optimizers and training loops stay those of the program.
"""

from distconv.training.advice import advise, max_batch
from distconv.training.asynchronous_elastic import AsynchronousElastic
from distconv.training.client import Worker
from distconv.training.concurrent import ConcurrentReductions
from distconv.training.consistency import assert_in_sync
from distconv.training.decay import (
    Constant,
    Cosine,
    CosineRestarts,
    Decay,
    Exponential,
    InverseTime,
    Polynomial,
    Step,
)
from distconv.training.downpour import Downpour
from distconv.training.elastic import ElasticAveraging, worker_grid
from distconv.training.lag import GradientLag
from distconv.training.larc import LARC, LARS
from distconv.training.noise_scale import NoiseScale
from distconv.training.recipe import Recipe, base_rate, number_of_steps
from distconv.training.requests import ServerLost
from distconv.training.server import Report
from distconv.training.server_checkpoints import server_state
from distconv.training.serving import AllWorkersLost, serve
from distconv.training.team import Team

__all__ = [
    "LARC",
    "LARS",
    "AllWorkersLost",
    "AsynchronousElastic",
    "ConcurrentReductions",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Decay",
    "Downpour",
    "ElasticAveraging",
    "Exponential",
    "GradientLag",
    "InverseTime",
    "NoiseScale",
    "Polynomial",
    "Recipe",
    "Report",
    "ServerLost",
    "Step",
    "Team",
    "Worker",
    "advise",
    "assert_in_sync",
    "base_rate",
    "max_batch",
    "number_of_steps",
    "serve",
    "server_state",
    "worker_grid",
]
