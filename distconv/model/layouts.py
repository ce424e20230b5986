"""Layouts of a module's inputs and parameters: redistribute inputs, and shard weights."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import count
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from distconv.geometry.layout import Cuts, Layout, effective_cuts, idle_axes, rank_box
from distconv.geometry.topology import Topology
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.base import replaced, tensors_in
from distconv.tensor.dispatch import SerialTrace
from distconv.tensor.dist_tensor import DistTensor, as_parameter, default_layout
from distconv.tensor.redistribution import cuts_of_layout, redistribute_once
from distconv.torch_private import run_eagerly

# Sharded parameters: every rank keeps only its block of a weight.
#
# A sharded parameter is a DistTensor: operators, optimizers and load_state_dict see the global
# tensor, and tensors made from the parameter, such as an optimizer's state, are partitioned in the
# same way.


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def shard_weights(module: nn.Module, layouts: Mapping[str, Layout], grid: ProcessGrid) -> None:
    """Shard the weights of convolutions and linear layers with inputs partitioned over channels.

    Each such weight becomes a sharded parameter in place. A weight that is computed from other
    parameters, as by a parametrization, is not sharded. Every rank passes the same module; no
    communication.

    `layouts` maps module names to the layouts of the modules' inputs. A module without a layout has
    the layout of the nearest enclosing module, or else the grid's default layout.
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
            swap_tensors(weight, sharded(weight, cuts, grid))


def make_whole(weight: DistTensor) -> None:
    """Replace a sharded parameter and its gradient by plain global tensors. Collective."""
    with torch.no_grad():
        whole = nn.Parameter(weight.full_tensor().clone(), weight.requires_grad)
        if isinstance(weight.grad, DistTensor):
            whole.grad = weight.grad.full_tensor().clone()
    swap_tensors(weight, whole)


def _layout_of(name: str, layouts: Mapping[str, Layout], grid: ProcessGrid) -> Layout:
    """Return the layout of module `name`, of the nearest enclosing module, or the default."""
    while name not in layouts:
        if not name:
            return default_layout(grid, 2)
        name = name.rpartition(".")[0]
    return layouts[name]


def _cuts(layer: nn.Module, weight: Tensor, layout: Layout, topology: Topology) -> Cuts:
    """Return, for each dimension of a layer's weight, the grid axes that partition the dimension.

    The axes are those that partition the channels of the layer's input, by `layout`. The layer's
    `parallel` says whether they partition the channels ("x") or filters ("y") of the weight, or
    both ("w"); see `ops.conv.channel_algorithms`. "auto", the default, partitions channels if
    outputs have fewer elements than inputs, else filters. In layers with groups, the dimension that
    holds all groups is partitioned.
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
    channels, filters = axes[:of_channels], axes[of_channels:]
    kernel = ((),) * (weight.dim() - 2)
    return (channels, filters, *kernel) if transposed else (filters, channels, *kernel)


def sharded(weight: Tensor, cuts: Cuts, grid: ProcessGrid) -> DistTensor:
    """Return a sharded parameter with this rank's block of the plain tensor `weight`.

    `cuts` has the grid axes that partition each dimension. No communication.
    """
    box = rank_box(tuple(weight.shape), cuts, grid.topology, grid.rank)
    block = weight.detach()[box.slices].clone().requires_grad_(weight.requires_grad)
    return as_parameter(DistTensor(block, weight.shape, cuts, grid))


# A layout for each layer: hooks that redistribute the inputs of modules.


def match_layouts(module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layout of each module whose name matches a key of `layouts`, by module name.

    Keys are shell patterns as in Python's `fnmatch`; the last one that matches decides. Raises
    ValueError for a pattern that matches nothing. Raises TypeError for a pattern that is not a
    string, or a value that is not a `Layout`.
    """
    if not isinstance(layouts, Mapping):
        raise TypeError(
            f"layouts={layouts!r} is not a dictionary; write {{'block5.*': Layout(...)}}, for "
            "example"
        )
    parts = dict(module.named_modules(remove_duplicate=False))
    found: dict[nn.Module, Layout] = {}
    for pattern, layout in layouts.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"layouts: {pattern!r} is not a pattern of module names; write 'block5.*', for "
                "example"
            )
        if not isinstance(layout, Layout):
            raise TypeError(
                f"layouts[{pattern!r}]={layout!r} is not a Layout; write "
                "Layout(channel='height'), for example"
            )
        matching = [part for name, part in parts.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"layouts: no module's name matches {pattern!r}; the modules are "
                f"{', '.join(filter(None, parts))}, and '' for the whole module"
            )
        found.update(dict.fromkeys(matching, layout))
    return {name: found[part] for name, part in parts.items() if part in found}


def redistribute_inputs(module: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Register hooks by which the modules named in `layouts` redistribute their inputs."""
    for name, part in module.named_modules():
        if name in layouts:
            part.register_forward_pre_hook(InputLayout(name, layouts[name]), with_kwargs=True)


_hook_numbers = count()
_LAYOUTS: WeakValueDictionary[int, InputLayout] = WeakValueDictionary()
"""The `InputLayout` hooks by number, with which the nodes of traced graphs name them."""


def redistributed_node(number: int, x: Tensor) -> Tensor:
    """Return `x` redistributed by the `InputLayout` hook `number`; copy a plain tensor.

    In a graph of `compile` the call is one node. Collective for a DistTensor.
    """
    hook = _LAYOUTS.get(number)
    return hook.redistributed(x) if hook and isinstance(x, DistTensor) else x.clone()


class InputLayout:
    """A forward pre-hook of a module that redistributes its input tensors to one layout."""

    def __init__(self, name: str, layout: Layout):
        self._operator, self._layout = f"layouts, {name or 'the module'}", layout
        self._number = next(_hook_numbers)
        _LAYOUTS[self._number] = self

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if SerialTrace.under_way:
            named = {key: self._traced(x) for key, x in kwargs.items()}
            return tuple([self._traced(x) for x in args]), named
        return self._redistribute(args, kwargs)

    def redistributed(self, x: DistTensor) -> DistTensor:
        """Return `x` redistributed to the layout of this hook. Collective."""
        return redistribute_once(x, cuts_of_layout(self._layout, x.grid, x.dim()), self._operator)

    @run_eagerly
    def _redistribute(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        recut = {
            id(x): self.redistributed(x)
            for x in tensors_in(args, kwargs)
            if isinstance(x, DistTensor)
        }
        return replaced(args, recut), replaced(kwargs, recut)

    def _traced(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return redistributed_node(self._number, argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)([self._traced(x) for x in argument])
        return argument
