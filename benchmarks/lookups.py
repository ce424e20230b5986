"""Warps, and messages on graphs: asking for what positions name, over gathering everything.

One call with its backward pass is timed. The numbers decide `gathered_plane` and `gathered_rows` in
`distconv/device/kinds.py`, up to which everything is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.measuring.memory import peak_of
from benchmarks.measuring.report import Row, of_bytes, over
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.turns import alternate
from distconv.device.kinds import Thresholds, thresholds
from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.ops.shape import rows
from distconv.ops.warp import grid_sample
from distconv.planning.scaling import Contender
from distconv.tensor.dist_tensor import distribute_tensor

PLANES = (
    *((1, (n, n)) for n in (32, 64, 128, 512)),
    *((16, (n, n)) for n in (32, 64, 128, 512)),
    *((1, (n, n, n)) for n in (16, 32, 64)),
)
"""Channels and plane of an image that is warped by displacements of up to one pixel."""

GRAPHS = tuple((n, f) for f in (1, 32) for n in (2**6, 2**8, 2**10, 2**12, 2**16))
"""Nodes and features. Each node gets messages from its neighbours in a mesh, 64 nodes wide."""


def warps(
    settings: Settings, cases: tuple[tuple[int, tuple[int, ...]], ...] = PLANES
) -> Iterator[Row]:
    """Yield rows of times and of peak memory for each case. All ranks call it."""
    grid = settings.grid(4)
    for channels, plane in cases:
        runs = {
            way: partial(_warp, grid, channels, plane, way == "gather") for way in ("box", "gather")
        }
        yield from _compared(settings, grid, "warp", f"{channels} channels, {by(plane)}", runs)


def graphs(settings: Settings, cases: tuple[tuple[int, int], ...] = GRAPHS) -> Iterator[Row]:
    """Yield rows of times and of peak memory for each case. All ranks call it."""
    grid = settings.grid(4)
    for nodes, features in cases:
        runs = {
            "rows": partial(_messages, grid, nodes, features, False, False),
            "rows, new indices": partial(_messages, grid, nodes, features, True, False),
            "gather": partial(_messages, grid, nodes, features, False, True),
        }
        case = f"{nodes} nodes, {features} features"
        yield from _compared(settings, grid, "graph", case, runs)


def _compared(
    settings: Settings,
    grid: ProcessGrid,
    name: str,
    case: str,
    runs: Mapping[str, Callable[[], Callable[[], None]]],
) -> Iterator[Row]:
    sides = [Contender(make(), settings.threads) for make in runs.values()]
    times = dict(zip(runs, alternate(grid.comm, sides, settings.seconds), strict=True))
    peaks = {way: max(grid.comm.allgather(peak_of(make).whole)) for way, make in runs.items()}
    row = name, case, settings.configuration(grid)
    for way in runs:
        if way != "gather":
            yield over(row, f"{way} over gather", times[way], times["gather"], None)
            yield of_bytes(row, f"{way}: peak over gather", peaks[way], peaks["gather"])


def _layout(grid: ProcessGrid, dimension: str) -> Layout:
    return Layout(**{dimension: tuple(axis for axis, n in grid.shape.items() if n > 1)})


def _warp(
    grid: ProcessGrid, channels: int, plane: tuple[int, ...], gathers: bool
) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, channels, *plane, generator=generator)
    moved = torch.rand(1, *plane, len(plane), generator=generator) * 2 - 1
    own = F.affine_grid(torch.eye(len(plane), len(plane) + 1)[None], [1, 1, *plane], False)
    points = own + moved * 2 / torch.tensor(plane[::-1])
    named = "height" if len(plane) == 2 else "depth"
    image = distribute_tensor(x, grid, _layout(grid, named)).requires_grad_()
    field = distribute_tensor(points, grid, _layout(grid, "channel")).requires_grad_()

    def step() -> None:
        with _by(grid_sample, gathers):
            F.grid_sample(image, field, align_corners=False).sum().backward()
        image.grad = field.grad = None

    return step


def _messages(
    grid: ProcessGrid, nodes: int, features: int, anew: bool, gathers: bool
) -> Callable[[], None]:
    layout = _layout(grid, "sample")
    given = torch.randn(nodes, features, generator=torch.Generator().manual_seed(1))
    x = distribute_tensor(given, grid, layout).requires_grad_()
    own = torch.arange(nodes)
    sources = torch.cat([(own + shift) % nodes for shift in (-64, -1, 1, 64)])
    order = own.repeat(4).argsort(stable=True)
    edges = torch.stack([sources[order], own.repeat(4)[order]])

    def step() -> None:
        source, target = edges.clone() if anew else edges
        with _by(rows, gathers):
            messages = x.index_select(0, source).sin()
            torch.zeros_like(x).index_add(0, target, messages).sum().backward()
        x.grad = None

    return step


@contextmanager
def _by(module: ModuleType, gathers: bool) -> Iterator[None]:
    """Let the rules of a module always gather, or never because something is small."""

    def none_small(accelerator: bool) -> Thresholds:
        return thresholds(accelerator)._replace(gathered_plane=-1, gathered_rows=-1)

    with (
        mock.patch.object(module, "thresholds", none_small),
        mock.patch.object(module, "may_read", lambda x, **_: not gathers),
    ):
        yield
