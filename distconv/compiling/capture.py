"""Traced steps as graphs of a device: one call starts all kernels and messages of a piece.

A piece is the calls between two optimizers' steps, messages by streams included; it is captured
when it first runs. Optimizers step outside, with their present settings. A graph has memory of its
own: its inputs are copied into it, and its results out of it, so that two replays share none.
Messages go to the carriers themselves, as nothing in a replay can be watched or compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distconv.compiling import tracing
from distconv.compiling.cases import CAPTURE, is_expanded
from distconv.compiling.program import Existing, Program, TracedCall, TracedStep, Value, in_pieces
from distconv.device import graphs
from distconv.device.graphs import DeviceGraph
from distconv.grid.interface import Grid
from distconv.grid.watched import WrappedTransport
from distconv.torch_private import Operator, returns_views

_MESSAGES = (
    *(tracing.empty, tracing.start_exchange, tracing.start_sum),
    *(tracing.gather, tracing.broadcast),
)
"""Functions of a traced step whose first argument is a carrier."""

_PYTHON = tracing.give, tracing.step


def why_not(step: TracedStep, grid: Grid) -> str:
    """Return why a step cannot be captured in graphs, in words; "" if no reason is known."""
    device = grid.device
    if why := graphs.why_no_graphs(device):
        return why
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


def captured(step: TracedStep, grid: Grid) -> TracedStep:
    """Return the step with each sequence of calls between optimizers' steps replaced by one graph.

    The graph starts them on the device by one call. All ranks of the grid run it together.
    """
    apart = {id(call) for call in step.calls if call.function in _PYTHON}

    def taken(calls: Sequence[TracedCall], results: Sequence[Value]) -> TracedCall:
        piece = _Piece(calls, results, step, grid)
        return TracedCall(piece, tuple(piece.given), {}, tuple(x.number for x in results))

    return in_pieces(step, apart, taken)


class _Piece:
    """Consecutive calls of a step that become one graph of the device when they first run.

    Attributes
    ----------
    given: the values of the step that the graph takes as inputs.
    """

    __name__ = "graph"

    def __init__(
        self, calls: Sequence[TracedCall], results: Sequence[Value], step: TracedStep, grid: Grid
    ) -> None:
        made = {n for call in calls for n in call.made}
        used = [x for call in calls for x in call.used]
        outside = (x for x in used if isinstance(x, Value) and x.number not in made)
        self.given = list(dict.fromkeys(outside))
        numbers = [x.number for x in self.given]
        self._written = [n in _written(calls, numbers) for n in numbers]
        existing = {x.number for x in used if isinstance(x, Existing)}
        self._constants = [step.constants[n] for n in existing]
        alone = TracedStep(numbers, list(map(_unwatched, calls)), results, step.constants, [])
        self._run = Program(alone).run
        self._grid = grid
        self._graph: DeviceGraph | None = None
        self._static: list[Tensor] = []
        self._addresses: list[int] = []

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay the graph, captured at the first call, on these inputs; return its results."""
        addresses = [x.data_ptr() for x in self._constants]
        if self._graph is None:
            self._capture_together(tensors)
        elif addresses != self._addresses:
            self._capture(tensors)
        self._addresses = addresses
        assert self._graph is not None
        for mine, given in zip(self._static, tensors, strict=True):
            mine.copy_(given)
        self._graph.replay()
        for mine, given, written in zip(self._static, tensors, self._written, strict=True):
            if written:
                given.copy_(mine)
        return tuple(_copies(self._graph.made, self._constants))

    def _capture(self, tensors: Sequence[Tensor]) -> None:
        """Capture the calls in a graph, with input memory like `tensors`; no communication."""
        self._static = [_memory_like(x).copy_(x) for x in tensors]
        self._graph = DeviceGraph(self._grid.device, lambda: self._run(*self._static))

    def _capture_together(self, tensors: Sequence[Tensor]) -> None:
        """Capture the calls on all ranks; raise RuntimeError on every rank if one rank cannot."""
        why = ""
        try:
            self._capture(tensors)
        except Exception as error:
            why = str(error)
        for rank, theirs in enumerate(self._grid.all_gather_object(why)):
            if theirs:
                raise RuntimeError(
                    f"compile: the step cannot be captured on rank {rank}: {theirs}. Leave "
                    f"backend={CAPTURE!r} out"
                )


def _memory_like(x: Tensor) -> Tensor:
    """Return new memory like `x`, with its strides unless elements of `x` share one place."""
    if is_expanded(x):
        return torch.empty_like(x)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _copies(tensors: Iterable[Tensor], constants: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield a copy of each tensor; copies share memory if their originals do.

    A tensor in the memory of one of `constants` is yielded itself.
    """
    there = {x.untyped_storage().data_ptr() for x in constants}
    copied: dict[int, torch.UntypedStorage] = {}
    for x in tensors:
        storage = x.untyped_storage()
        address = storage.data_ptr()
        if address in there:
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


def _written(calls: Sequence[TracedCall], given: Sequence[int]) -> set[int]:
    """Return the numbers among `given` of values that `calls` may write to, also through views."""
    memory = {n: {n} for n in given}
    """The given values in whose memory each value may lie."""
    written: set[int] = set()
    for call in calls:
        within = (memory.get(x.number, set()) for x in call.used if isinstance(x, Value))
        touched = set[int]().union(*within)
        if not call.is_pure:
            written |= touched
        elif touched and returns_views(call.function):
            memory |= dict.fromkeys(call.made, touched)
    return written
