"""The passes of a case as graphs of a device: one call starts all kernels and messages of a pass.

A graph has memory of its own: inputs are copied into it, and results out of it. What the forward
graph keeps stays in place for the backward graph. Until that has run, another forward pass is
replayed without graphs. Messages go to the carriers themselves, as nothing in a replay can be
watched or compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distconv.compiling import trace
from distconv.compiling.program import Existing, Program, TracedCall, TracedStep
from distconv.device import streams
from distconv.device.kinds import is_accelerator
from distconv.device.streams import DeviceGraph
from distconv.grid.communicators import WrappedTransport
from distconv.grid.interface import Grid
from distconv.torch_private import Operator

Warn = Callable[[str, str], None]

_WITHOUT = "is replayed without graphs of the device"

_MESSAGES = trace.empty, trace.start_exchange, trace.start_sum, trace.gather, trace.broadcast
"""Functions of a traced step whose first argument is a carrier."""


def why_not(step: TracedStep, device: torch.device) -> str:
    """Return why a step cannot be captured in a graph, in words; "" if no reason is known."""
    for call in step.calls:
        function = call.function
        if function in _MESSAGES and not call.arguments[0].ordered:
            return f"transport {call.arguments[0].name!r} lets the host wait for the GPU"
        if not isinstance(function, Operator):
            continue
        if torch.Tag.nondeterministic_seeded in function.tags:
            return f"it draws random numbers ({function})"
        named = call.options.get("device")
        if named is not None and torch.device(named).type != device.type:
            return f"it makes a tensor on {named} ({function})"
    for x in step.constants.values():
        if x.device.type != device.type:
            return f"it uses a tensor of shape {tuple(x.shape)} on {x.device.type}"
    return ""


class CapturedPasses:
    """Both passes of a case as graphs; used like `Passes`.

    Attributes
    ----------
    failed: whether a capture has failed, after which the passes run without graphs.
    """

    def __init__(
        self, forward: TracedStep, backward: TracedStep, results: int, grid: Grid, warn: Warn
    ) -> None:
        self._first = _Pass(forward, grid.device, results, 0)
        self._second = _Pass(
            backward, grid.device, len(backward.results), len(forward.results) - results
        )
        self._grid, self._warn, self.failed = grid, warn, False

    def forward(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the forward pass, captured by the first call; all ranks make that together."""
        if self._first.has_moved():
            self._second.graph = None
        return self._run(self._first, tensors)

    def backward(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the backward pass, captured by the first call; all ranks make that together."""
        return self._run(self._second, tensors)

    def _run(self, one: _Pass, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if not (self.failed or one.begun):
            why = ""
            try:
                one.capture(tensors)
            except Exception as error:
                why = str(error)
            reasons = self._grid.all_gather_object(why)
            found = next(filter(None, reasons), "")
            self.failed = bool(found)
            if found and self._grid.rank == reasons.index(found):
                self._warn(_WITHOUT, f"the capture has failed: {found}")
        return one.plain(*tensors) if self.failed else one.replay(tensors)


class _Pass:
    """One pass, which becomes a graph of the device when it first runs.

    Parameters
    ----------
    results: the number of results that are copied out of the graph.
    fixed: the number of first inputs that lie in memory of the other pass, in all calls the same.
    """

    def __init__(self, step: TracedStep, device: torch.device, results: int, fixed: int) -> None:
        used = {x.number for call in step.calls for x in call.used if isinstance(x, Existing)}
        self._constants = [step.constants[n] for n in used]
        self._device, self._results, self._fixed = device, results, fixed
        self.plain = Program(replace(step, calls=[*map(_unwatched, step.calls)])).run
        self.graph: DeviceGraph | None = None
        self.begun = False
        self._static: list[Tensor] = []
        self._addresses: list[int] = []

    def has_moved(self) -> bool:
        """Return whether a parameter or buffer has other memory than in the capture."""
        return [x.data_ptr() for x in self._constants] != self._addresses

    def capture(self, tensors: Sequence[Tensor]) -> None:
        """Capture the pass, with memory for inputs like `tensors`; no communication."""
        self.begun = True
        self._addresses = [x.data_ptr() for x in self._constants]
        copied = (_memory_like(x).copy_(x) for x in tensors[self._fixed :])
        self._static = [*tensors[: self._fixed], *copied]
        self.graph = DeviceGraph(self._device, lambda: self.plain(*self._static))

    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Replay the graph on these inputs, captured anew if memory has moved."""
        if self.graph is None or self.has_moved():
            self.capture(tensors)
        assert self.graph is not None
        for mine, given in zip(self._static[self._fixed :], tensors[self._fixed :], strict=True):
            mine.copy_(given)
        self.graph.replay()
        made = self.graph.made
        return *_copies(made[: self._results], self._constants), *made[self._results :]


def captured(
    forward: TracedStep, backward: TracedStep, results: int, writes: bool, grid: Grid, warn: Warn
) -> CapturedPasses | None:
    """Return the passes of a case as graphs of the grid's device; None if that is impossible.

    On accelerators `warn` is then called on one rank with the reason. All ranks call it together.

    Parameters
    ----------
    results: the number of results of the program; those after them are kept for the backward pass.
    writes: whether the program writes to a tensor that may be another one in each call.
    """
    why = streams.why_no_graphs(grid.device) or ""
    if why and not is_accelerator(grid.device):
        return None
    why = why or ("it writes to a tensor that is no buffer" if writes else "")
    why = why or why_not(forward, grid.device) or why_not(backward, grid.device)
    reasons = grid.all_gather_object(why)
    found = next(filter(None, reasons), "")
    if found and grid.rank == reasons.index(found):
        warn(_WITHOUT, found)
    return None if found else CapturedPasses(forward, backward, results, grid, warn)


def _memory_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _copies(tensors: Iterable[Tensor | None], constants: Iterable[Tensor]) -> Iterator[Any]:
    """Yield a copy of each tensor; copies share memory if their originals do.

    A tensor in the memory of one of `constants` is yielded itself, and so is None.
    """
    there = {x.untyped_storage().data_ptr() for x in constants}
    copied: dict[int, torch.UntypedStorage] = {}
    for x in tensors:
        if x is None or (address := (storage := x.untyped_storage()).data_ptr()) in there:
            yield x
        elif x.is_conj() or x.is_neg():
            yield x.clone()
        else:
            if address not in copied:
                whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
                copied[address] = whole.clone().untyped_storage()
            yield x.new_empty(0).set_(copied[address], x.storage_offset(), x.shape, x.stride())


def _unwatched(call: TracedCall) -> TracedCall:
    """Return `call`, changed to send by the bare carrier, without the watched one around it."""
    if call.function not in _MESSAGES or not isinstance(call.arguments[0], WrappedTransport):
        return call
    carrier, *rest = call.arguments[0].carrier, *call.arguments[1:]
    return replace(call, arguments=(carrier, *rest))
