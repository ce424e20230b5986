"""The published layers and networks at full size, and steps of them, plain or cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import layer
from benchmarks.measuring.network import cut_blocks
from benchmarks.networks import classes
from distconv import DistTensor
from distconv.grid.interface import Grid
from examples.cosmoflow.network import FORMS, CosmoFlowNet
from examples.mesh_tangling.network import mesh_tangling_1k, mesh_tangling_2k
from examples.unet3d.network import UNet3d

Step = Callable[[], None]


class Case(NamedTuple):
    """A layer or a network with its input, and the function that makes a training step of it."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, Tensor, Tensor], Step]
    """Makes a step from the module, its input, and the target or gradient made by `like`."""
    like: Callable[[tuple[int, ...]], Tensor] = torch.randn
    """Makes a target, or a gradient, from the shape of the output."""
    target: float | None = None
    """The most that a step on one rank should take, in times of plain torch's."""
    published: str = ""
    """The published strong scaling, in words."""


def trained(
    loss: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype | None = None
) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    """Return a function that makes steps: forward, loss and backward, under autocast to `kind`."""

    def step_of(module: nn.Module, x: Tensor, y: Tensor) -> Step:
        def step() -> None:
            module.zero_grad()
            with torch.autocast(x.device.type, kind, enabled=kind is not None):
                value = loss(module(x), y)
            value.backward()

        return step

    return step_of


def _layer(channels: int, filters: int, extent: int, kernel: int = 3, stride: int = 1) -> Case:
    known = layer.plane(channels, filters, extent, kernel, stride)
    return Case(known.name, known.shape, known.make, layer.step_of)


LAYERS = (
    _layer(16, 16, 1024),
    _layer(18, 128, 2048, 5, 2),
    _layer(384, 128, 64, 3, 2),
    _layer(3, 64, 224, 7, 2),
    _layer(512, 128, 28, 1),
)

CONVOLUTIONS = tuple(
    _layer(n, n, extent) for n in (16, 64, 256) for extent in (64, 256, 1024, 2048)
)[:-1]
"""Layers of all sizes, by which the smallest block is found whose halos are better overlapped."""

_1K, _2K = (1, 18, 1024, 1024), (1, 18, 2048, 2048)
_SQUARES = trained(F.mse_loss)
MESH_1K = Case("mesh-tangling 1K, float32", _1K, mesh_tangling_1k, _SQUARES, torch.rand, 1.02)
MESH_2K = Case(
    *("mesh-tangling 2K, float32", _2K, mesh_tangling_2k, _SQUARES, torch.rand),
    published="16 GPUs close to 4 times as fast as 2",
)
UNET = Case(
    *("3-D U-Net, 128^3", (1, 1, 128, 128, 128), lambda: UNet3d(classes=3)),
    *(trained(F.cross_entropy), classes),
)
_HALF = trained(F.mse_loss, torch.bfloat16)
MESH_1K_HALF = MESH_1K._replace(name="mesh-tangling 1K, bfloat16", step=_HALF)
NETWORKS = (
    MESH_1K,
    MESH_1K_HALF,
    MESH_2K,
    MESH_2K._replace(name="mesh-tangling 2K, bfloat16", step=_HALF),
    *(
        Case(
            f"CosmoFlow, {name} pooling, {size}^3",
            (1, 4, size, size, size),
            partial(CosmoFlowNet, form, size),
            _SQUARES,
        )
        for size in (128, 256)
        for name, form in FORMS.items()
    ),
    UNET,
)
COSMOFLOW_512 = Case(
    "CosmoFlow without its head, average pooling, 512^3",
    (1, 4, 512, 512, 512),
    lambda: CosmoFlowNet(FORMS["average"], 512).blocks,
    _SQUARES,
)


def cut(case: Case, grid: Grid, device: torch.device) -> tuple[DistTensor, DistTensor]:
    """Return the input of a case and its target or gradient; only this rank's blocks are made."""
    with torch.device("meta"), torch.no_grad():
        made = case.make()(torch.empty(case.shape)).shape
    with device:
        return cut_blocks(case.shape, made, case.like, grid)


def module(case: Case, device: torch.device) -> nn.Module:
    """Return the module of a case, with the same parameters every time."""
    torch.manual_seed(0)
    with device:
        return case.make()


def plain(case: Case, grid: Grid, device: torch.device) -> Step:
    """Return a step of plain torch on the blocks that this rank has on `grid`."""
    network = module(case, device)
    x, y = cut(case, grid, device)
    return case.step(network, x.shard, y.shard)
