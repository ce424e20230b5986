"""Reading and writing of samples, each rank its block, and checkpoints of training runs.

Importing this package needs neither h5py nor zarr; opening or writing their files does.
"""

from __future__ import annotations

from distconv.data.augment import Change as Change
from distconv.data.augment import ChannelJitter as ChannelJitter
from distconv.data.augment import Crop as Crop
from distconv.data.augment import Flip as Flip
from distconv.data.augment import Move as Move
from distconv.data.augment import Noise as Noise
from distconv.data.augment import Normalize as Normalize
from distconv.data.augment import Rotate90 as Rotate90
from distconv.data.augment import Translate as Translate
from distconv.data.checkpoint import Checkpoint as Checkpoint
from distconv.data.checkpoint import load_checkpoint as load_checkpoint
from distconv.data.checkpoint import save_checkpoint as save_checkpoint
from distconv.data.dataset import Dataset as Dataset
from distconv.data.distributed_loader import distribute as distribute
from distconv.data.errors import DataError as DataError
from distconv.data.errors import on_rank_zero as on_rank_zero
from distconv.data.errors import together as together
from distconv.data.fields import HaloBlock as HaloBlock
from distconv.data.loader import Loader as Loader
from distconv.data.loader import Traffic as Traffic
from distconv.data.sampler import Sampler as Sampler
from distconv.data.sources.functions import Function as Function
from distconv.data.sources.hdf5 import HDF5Source as HDF5Source
from distconv.data.sources.interface import Source as Source
from distconv.data.sources.opening import open_files as open_files
from distconv.data.sources.opening import open_stack as open_stack
from distconv.data.writing.convert import convert as convert
from distconv.data.writing.save import save as save
