"""Reading and writing samples box by box, and keeping the state of a run.

It is imported without h5py and zarr, which are needed where such files are opened.
"""

from distconv.data.augment import (
    Change,
    ChannelJitter,
    Crop,
    Flip,
    Move,
    Noise,
    Rotate90,
    Translate,
)
from distconv.data.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from distconv.data.dataset import Dataset
from distconv.data.distributed_loader import distribute
from distconv.data.errors import DataError, on_rank_zero, together
from distconv.data.fields import HaloBlock
from distconv.data.loader import Loader, Traffic
from distconv.data.normalize import Normalize
from distconv.data.sampler import Sampler
from distconv.data.sources.functions import Function
from distconv.data.sources.hdf5 import HDF5Source
from distconv.data.sources.interface import Source
from distconv.data.sources.opening import open_files
from distconv.data.writing.save import save

__all__ = [
    "Change",
    "ChannelJitter",
    "Checkpoint",
    "Crop",
    "DataError",
    "Dataset",
    "Flip",
    "Function",
    "HDF5Source",
    "HaloBlock",
    "Loader",
    "Move",
    "Noise",
    "Normalize",
    "Rotate90",
    "Sampler",
    "Source",
    "Traffic",
    "Translate",
    "distribute",
    "load_checkpoint",
    "on_rank_zero",
    "open_files",
    "save",
    "save_checkpoint",
    "together",
]
