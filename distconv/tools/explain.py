"""`explain`: layouts, halos, redistributions and memory of each layer of a module on a grid.

The rows are those of a recorded forward pass (`planning.recorded_step`), made by the same code that
will run, so `explain` agrees with `predict` and `plan`. The bytes of the backward pass are from
another recording.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world_if_rank
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.recorded_step import record_step, shapes_of
from distconv.planning.recording import LayerPlan, backward_of, with_backward
from distconv.planning.table import Cell, byte_size, size_cell, table

Shape = Sequence[int]


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: a module's layers on one rank of a grid; prints as a table."""

    module: str
    grid: str
    rank: int
    layers: tuple[LayerPlan, ...]
    """The layers in the order of the forward pass; ends with the first unsupported layer."""
    parameter_bytes: int
    """Bytes of all parameters of a rank."""
    serial_kept_bytes: int | None
    """Bytes that the serial program keeps for the backward pass; None if the module supports
    DistTensors only."""
    gradient_bytes: int | None = None
    """Bytes received in reductions of parameters' gradients; None without a recorded backward
    pass."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the rank keeps for the backward pass, without parameters."""
        return sum(layer.kept_bytes for layer in self.layers)

    @property
    def refusal(self) -> str | None:
        """Return the reason why the module cannot run on this grid; None when it can."""
        return self.layers[-1].refusal if self.layers else None

    def __str__(self) -> str:
        moved = sum(layer.redistributed_bytes for layer in self.layers)
        received = sum(layer.halo_bytes for layer in self.layers)
        reduced = sum(layer.reduced_bytes for layer in self.layers)
        forward = sum(layer.forward_bytes for layer in self.layers)
        backward = sum(layer.backward_bytes for layer in self.layers)
        sums = *map(size_cell, (received, moved)), "", *map(size_cell, (reduced, forward, backward))
        memory = map(size_cell, (self.kept_bytes, self.parameter_bytes))
        total = "total", *("",) * 5, *sums, *memory
        lines = [
            f"{self.module} on rank {self.rank} of {self.grid}, forward",
            table([HEADING, *map(cells_of_layer, self.layers), total]),
        ]
        if self.refusal is not None:
            lines.append(f"{self.layers[-1].name} is unsupported: {self.refusal}")
        elif self.serial_kept_bytes is not None:
            kept, alone = self.kept_bytes, self.serial_kept_bytes
            times = f", {alone / kept:,.2f} times as much" if kept else ""
            lines.append(
                f"kept for backward: {byte_size(kept)}; serially {byte_size(alone)}{times}"
            )
        if self.gradient_bytes:
            lines.append(f"received for gradients of parameters: {byte_size(self.gradient_bytes)}")
        return "\n".join(lines)


def explain(
    module: nn.Module,
    input_shape: Shape | Sequence[Shape],
    grid: ProcessGrid | Mapping[str, int],
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    layout: Layout | Sequence[Layout | None] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    rank: int | None = None,
    show: bool = True,
    progress: Callable[[LayerPlan], object] = lambda layer: None,
    **options: Any,
) -> Explanation:
    """Return, and print, the plan of each layer of `module` on one rank of `grid`.

    The forward pass runs on tensors without elements, in the module's current mode; no memory of
    the size of the model or its input is allocated, and the module is not changed. No
    communication: one process suffices for any grid. Under `torch.no_grad()` layers keep no memory
    for a backward pass.

    Raises TypeError or ValueError for arguments that do not fit: no Module, no shape, or not one
    type or layout for each input. Raises RuntimeError if the forward pass raises, naming the
    layer; also if it reads the elements of a tensor. An unsupported layer raises nothing: it
    is the last row of the table.

    Parameters
    ----------
    module: any torch.nn.Module, before `parallelize`.
    input_shape: the global shape of its input, or a sequence of shapes for several inputs.
    grid: a grid, or the ranks along its axes, such as {"height": 64, "width": 64}.
    dtype: the type of the input, or one for each input; the type of the parameters by default.
    layout: the layout of the input, or one for each input; by default every dimension is
        partitioned over the axis of its own name.
    layouts, options: as for `parallelize`, such as `shard_parameters=True`. With `offload=True`
        saved activations are kept on the host; the layers are then planned for GPUs.
    rank: the rank to show; by default the rank in the middle of every axis.
    show: whether to print the table, on rank 0.
    progress: called with each line of the table as it is ready.

    Examples
    --------
    >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
    >>> layers = dc.explain(net, (1, 1, 4096, 4096), {"height": 4, "width": 4}, show=False)
    >>> print(layers)
    Sequential on rank 10 of ProcessGrid(height=4, width=4) on 16 ranks, forward
    layer  type    output         layout         local          halo ...
    0      Conv2d  1x8x4096x4096  height, width  1x8x1024x1024  height 1+1 width ...
    1      ReLU    1x8x4096x4096  height, width  1x8x1024x1024 ...
    total ...
    kept for backward: 36 MiB; serially 576 MiB, 15.99 times as much
    received for gradients of parameters: 615 B
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"explain: {type(module).__name__} is not a torch.nn.Module")
    extents = grid.shape if isinstance(grid, ProcessGrid) else grid
    given: Any = {"dtype": dtype, "loss": None, "caller": "explain"}
    shapes = shapes_of(input_shape)
    cut = {"rank": rank, "layout": layout, "layouts": layouts, "progress": progress} | options
    cut["gpu"] = bool(options.get("offload"))
    recording = record_step(module, shapes, extents, **given, **cut)
    try:
        alone = record_step(module, shapes, {}, serial=True, **given)
        serial = None if alone.refusal else sum(alone.kept.values())
    except RuntimeError:
        serial = None
    received = None
    if torch.is_grad_enabled() and recording.refusal is None:
        received = _received_in_backward(module, shapes, extents, given | cut)
    explanation = Explanation(
        type(module).__name__,
        str(DryRunGrid(extents)),
        recording.rank,
        with_backward(recording.calls, received or Counter()),
        recording.parameter_bytes,
        serial,
        None if received is None else received["gradients"],
    )
    comm = grid if isinstance(grid, ProcessGrid) else world_if_rank()
    if show and (comm is None or comm.rank == 0):
        print(explanation, flush=True)
    return explanation


def _received_in_backward(
    module: nn.Module, shapes: Sequence[Shape], extents: Mapping[str, int], given: dict[str, Any]
) -> Counter[str] | None:
    """Return the bytes that each layer receives in the backward pass of a mean squared error.

    Returns None if the module has no such backward pass.
    """
    options = given | {"loss": "mse", "progress": lambda layer: None}
    try:
        return backward_of(record_step(module, shapes, extents, **options).events)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, NotImplementedError):
        return None


HEADING = (
    *("layer", "type", "output", "layout", "local", "halo", "received", "moved"),
    *("redistribution", "reduced", "forward", "backward", "kept", "parameters"),
)


def cells_of_layer(layer: LayerPlan) -> tuple[Cell, ...]:
    """Return a layer's row in a table with the columns of `HEADING`."""
    kind, moved = layer.kind.lower(), []
    for r in layer.redistributions:
        # The operator is named unless the layer's type has its name.
        how = "" if r.operator in kind else f" by {r.operator.removeprefix(f'{kind}, ')}"
        moved.append(f"{_cut(r.source)} -> {_cut(r.target)}{how}")
    halos = [
        " ".join(f"{name} {before}+{after}" for name, (before, after) in widths if before + after)
        for widths in (halo.widths.items() for halo in layer.halos)
    ]
    return (
        layer.name,
        layer.kind,
        "x".join(map(str, layer.shape)) if layer.shape is not None else "",
        "refused" if layer.refusal is not None else layout_in_words(layer),
        "x".join(map(str, layer.local_shape)) if layer.local_shape is not None else "",
        "; ".join(filter(None, dict.fromkeys(halos))),
        size_cell(layer.halo_bytes),
        size_cell(layer.redistributed_bytes),
        "; ".join(dict.fromkeys(moved)),
        size_cell(layer.reduced_bytes),
        size_cell(layer.forward_bytes),
        size_cell(layer.backward_bytes),
        size_cell(layer.kept_bytes),
        size_cell(layer.parameter_bytes),
    )


def layout_in_words(layer: LayerPlan) -> str:
    """Return the layout of a layer's output as text; "plain" for a plain tensor, "" for none."""
    if layer.layout is None:
        return "plain" if layer.shape is not None else ""
    return _cut(layer.layout)


def _cut(layout: Layout) -> str:
    """Return a layout as text: partitioned dimensions, axes with other names; or "whole"."""
    text = repr(layout).removeprefix("Layout(").removesuffix(")")
    return re.sub(r"\b(\w+)='\1'", r"\1", text) or "whole"
