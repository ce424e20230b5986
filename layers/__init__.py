"""Drop-in torch.nn layers, for plain and distributed tensors.

These layers take the constructor arguments of the torch.nn layers of the same name, compute the
same on plain tensors, and have the same state_dict keys; further arguments are choices that only a
parallel layer has. A torch.nn layer with a DistTensor as input exchanges its halos by itself, so
where there is nothing to choose, use torch.nn.
"""

from torch.nn import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)

from distconv.layers.channels import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Linear,
)
from distconv.layers.norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm
from distconv.layers.redistribute import Redistribute

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "GroupNorm",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Redistribute",
]
