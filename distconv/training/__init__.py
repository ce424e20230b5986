"""Learning at scale: training algorithms for many replicas that train one model together.

Learning rates, batch sizes and numbers of workers count the P_N replicas of a grid, never its
ranks: a worker is a replica, the P_S ranks that share a sample. Models, optimizers and training
loops stay those of the program.
"""

from distconv.model.consistency import assert_in_sync as assert_in_sync
from distconv.training.client import Worker as Worker
from distconv.training.downpour import Downpour as Downpour
from distconv.training.elastic import AsynchronousElastic as AsynchronousElastic
from distconv.training.elastic import ElasticAveraging as ElasticAveraging
from distconv.training.elastic import worker_grid as worker_grid
from distconv.training.gradient_messages import ConcurrentReductions as ConcurrentReductions
from distconv.training.gradient_messages import GradientLag as GradientLag
from distconv.training.history import History as History
from distconv.training.history import Loss as Loss
from distconv.training.history import TrainingLoss as TrainingLoss
from distconv.training.larc import LARC as LARC
from distconv.training.larc import LARS as LARS
from distconv.training.noise_scale import NoiseScale as NoiseScale
from distconv.training.noise_scale import advise as advise
from distconv.training.noise_scale import max_batch as max_batch
from distconv.training.recipe import Constant as Constant
from distconv.training.recipe import Cosine as Cosine
from distconv.training.recipe import CosineRestarts as CosineRestarts
from distconv.training.recipe import Decay as Decay
from distconv.training.recipe import Exponential as Exponential
from distconv.training.recipe import InverseTime as InverseTime
from distconv.training.recipe import Polynomial as Polynomial
from distconv.training.recipe import Recipe as Recipe
from distconv.training.recipe import Step as Step
from distconv.training.recipe import base_rate as base_rate
from distconv.training.recipe import number_of_steps as number_of_steps
from distconv.training.requests import ServerLost as ServerLost
from distconv.training.server import Report as Report
from distconv.training.server import server_state as server_state
from distconv.training.serving import AllWorkersLost as AllWorkersLost
from distconv.training.serving import serve as serve
from distconv.training.stopping import EarlyStopping as EarlyStopping
from distconv.training.stopping import TimeToStop as TimeToStop
from distconv.training.team import Team as Team
