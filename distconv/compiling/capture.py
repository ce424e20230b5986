"""Device graphs of traced passes: one call starts all kernels and messages of a pass.

A graph has memory of its own: inputs are copied into this memory, and results out of it. Tensors
that the forward graph saves remain in place for the backward graph. Until the backward graph has
run, another forward pass is replayed without graphs. Messages are sent by the carriers directly,
without the journal's checks, which cannot run within a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distconv.compiling.trace import RANDOM, Communication, OpaqueCall, Pass
from distconv.device import streams
from distconv.device.kinds import is_accelerator
from distconv.device.streams import GraphedFunction
from distconv.grid.interface import Grid
from distconv.grid.journal import WrappedTransport
from distconv.torch_private import Operator

Warn = Callable[[str, str], None]

_WITHOUT = "is replayed without device graphs"


def why_not(one: Pass, device: torch.device) -> str:
    """Return the reason why a pass cannot be captured in a device graph; "" if none is known."""
    for node in one.graph.nodes:
        function = node.target
        if isinstance(function, Communication) and not function.transport.ordered:
            return f"transport {function.transport.name!r} makes the host wait for the GPU"
        if isinstance(function, OpaqueCall):
            return "it warps an image by boxes that depend on values (grid_sample)"
        if not isinstance(function, Operator):
            continue
        if RANDOM in function.tags:
            return f"it draws random numbers ({function})"
        named = node.kwargs.get("device")
        if named is not None and torch.device(named).type != device.type:
            return f"it creates a tensor on {named} ({function})"
    for x in one.constants.values():
        if x.device.type != device.type:
            return f"it uses a tensor of shape {tuple(x.shape)} on {x.device.type}"
    return ""


class CapturedPasses:
    """The forward and the backward pass of a traced program as device graphs.

    Attributes
    ----------
    passes: the functions of the passes. The first call of each captures the pass. Collective.
    failed: whether a capture has failed; then the passes run without graphs.
    """

    def __init__(self, passes: Sequence[Pass], results: int, grid: Grid, warn: Warn) -> None:
        self._grid, self._warn, self.failed = grid, warn, False
        kept = len(passes[0].results) - results
        counts = (results, 0), (len(passes[-1].results), kept)
        self._passes = [
            GraphedFunction(_by_carriers(x), grid.device, [*x.constants.values()], *n)
            for x, n in zip(passes, counts, strict=False)
        ]
        self.passes = [partial(self.run, number) for number in range(len(passes))]

    def run(self, number: int, *tensors: Tensor) -> Sequence[Tensor]:
        """Run pass `number` on `tensors`. The first call captures the pass and is collective."""
        one = self._passes[number]
        if number == 0 and one.has_moved():
            self._passes[-1].forget()
        if not (self.failed or one.begun):
            why = ""
            try:
                one.capture(tensors)
            except Exception as error:
                why = str(error)
            self.failed = _found(why, self._grid, self._warn, "the capture failed: ")
        return one.plain(*tensors) if self.failed else one(*tensors)


def _by_carriers(one: Pass) -> Callable[..., Any]:
    """Return a pass as a function whose messages are sent by carriers without the journal."""
    for node in one.graph.nodes:
        call = node.target
        if isinstance(call, Communication) and isinstance(call.transport, WrappedTransport):
            node.target = Communication(call.transport.carrier, call.method, call.group)
    return one.function()


def captured(
    passes: Sequence[Pass], results: int, writes: bool, grid: Grid, warn: Warn
) -> CapturedPasses | None:
    """Return the passes of a traced program as graphs of the grid's device. Collective.

    Return None if graphs are impossible. On accelerators one rank then calls `warn` with the
    reason.

    Parameters
    ----------
    results: the number of the program's results. Further results of the forward pass are saved for
        the backward pass.
    writes: whether the program writes to an input that may be a different tensor in each call.
    """
    why = streams.why_no_graphs(grid.device) or ""
    if why and not is_accelerator(grid.device):
        return None
    why = why or ("it writes to a tensor that is not a buffer" if writes else "")
    for one in passes:
        why = why or why_not(one, grid.device)
    return None if _found(why, grid, warn) else CapturedPasses(passes, results, grid, warn)


def _found(why: str, grid: Grid, warn: Warn, before: str = "") -> bool:
    """Return whether any rank has a reason `why` for no graphs. Collective.

    One rank calls `warn` with its reason, which follows the text `before`.
    """
    reasons = grid.all_gather_object(why)
    found = next(filter(None, reasons), "")
    if found and grid.rank == reasons.index(found):
        warn(_WITHOUT, before + found)
    return bool(found)
