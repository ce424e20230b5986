"""Sharded parameters: every rank keeps only its block of a weight.

A sharded parameter is a DistTensor: operators, optimizers and load_state_dict see the whole tensor,
and tensors made from it, such as an optimizer's state, are cut in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from distconv.geometry.layout import Cuts, Layout, effective_cuts, idle_axes, rank_box
from distconv.geometry.topology import Topology
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.dist_tensor import DistTensor, as_parameter, default_layout

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def shard_weights(module: nn.Module, layouts: Mapping[str, Layout], grid: ProcessGrid) -> None:
    """Make the weights of layers sharded parameters if the layout of the layer cuts channels.

    These are weights of convolutions and fully connected layers, almost all parameters. A weight
    that is computed from other parameters, as by a parametrization, stays whole. Every rank passes
    the same module; no communication.

    `layouts` has the layouts of modules' inputs by name, which also apply to their submodules. The
    inputs of other modules have the grid's default layout.
    """
    for name, part in module.named_modules():
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if weight is None or not isinstance(part, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)):
            continue
        if isinstance(weight, DistTensor):
            # Another layer shares the weight, and was handled first.
            continue
        cuts = _cuts(part, weight, _layout_of(name, layouts, grid), grid.topology)
        if any(cuts):
            # Other holders of the parameter, such as an optimizer, hold its block from now on.
            swap_tensors(weight, _sharded(weight, cuts, grid))


def make_whole(weight: DistTensor) -> None:
    """Turn a sharded parameter and its gradient into plain ones. All ranks call it together."""
    with torch.no_grad():
        whole = nn.Parameter(weight.full_tensor().clone(), weight.requires_grad)
        if isinstance(weight.grad, DistTensor):
            whole.grad = weight.grad.full_tensor().clone()
    swap_tensors(weight, whole)


def _layout_of(name: str, layouts: Mapping[str, Layout], grid: ProcessGrid) -> Layout:
    """Return the layout of the module `name`, or of the nearest enclosing module that has one."""
    while name not in layouts:
        if not name:
            return default_layout(grid, 2)
        name = name.rpartition(".")[0]
    return layouts[name]


def _cuts(layer: nn.Module, weight: Tensor, layout: Layout, topology: Topology) -> Cuts:
    """Return the cuts of a layer's weight over the axes that cut the channels of its input.

    The layer's `parallel` chooses channels, filters or both (see `ops.conv.channel_algorithms`).
    "auto", the default, cuts channels if outputs have fewer elements than inputs, else filters.
    Layers with groups cut the dimension that holds all groups.
    """
    (axes,) = effective_cuts((layout.axes("channel"),), topology)
    if not axes:
        return ((),) * weight.dim()
    transposed = isinstance(layer, _TRANSPOSED)
    algorithm = getattr(layer, "parallel", "auto")
    if algorithm == "auto":
        stride = prod(getattr(layer, "stride", ()))
        outputs, inputs = weight.shape[:2]
        if transposed:
            inputs, outputs = outputs, inputs * stride
        else:
            inputs *= stride
        algorithm = "x" if outputs < inputs else "y"
    if getattr(layer, "groups", 1) > 1:
        # The dimension that contains all groups.
        algorithm = "x" if transposed else "y"
    if algorithm == "w" and len(axes) == 1:
        axes += idle_axes(layout.cutting_axes, topology)
    of_channels = {"x": len(axes), "y": 0, "w": len(axes) // 2}[algorithm]
    parts = (axes[:of_channels], axes[of_channels:])
    kernel = ((),) * (weight.dim() - 2)
    return (*(parts if transposed else reversed(parts)), *kernel)


def _sharded(weight: Tensor, cuts: Cuts, grid: ProcessGrid) -> DistTensor:
    """Return this rank's block of a weight as a sharded parameter, cut by `cuts`."""
    box = rank_box(tuple(weight.shape), cuts, grid.topology, grid.rank)
    block = weight.detach()[box.slices].clone().requires_grad_(weight.requires_grad)
    return as_parameter(DistTensor(block, weight.shape, cuts, grid))
