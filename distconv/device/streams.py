"""Streams and events of devices, and work captured in device graphs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from distconv.device.kinds import is_accelerator

# Streams of an accelerator, and requests for which a stream waits while the host continues.
#
# All messages and reductions of a process are queued on one side stream. So the device processes
# them in the order in which the host starts them, which is the same on all ranks for any library.
# Kernels of two communicators that wait for other ranks then never wait for each other.


@contextmanager
def using(stream: torch.Stream) -> Iterator[None]:
    """Make `stream` torch's current stream within the context."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def record_event(device: torch.device) -> torch.Event:
    """Record and return an event after all work queued so far on a device's current stream."""
    return torch.accelerator.current_stream(device).record_event()


def has_passed(event: torch.Event, device: torch.device) -> bool:
    """Return whether a device has done all work queued before `event`. Any thread may call it.

    The thread's current device becomes `device`, as a query would else allocate memory on another
    device.
    """
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    return event.query()


def is_capturing(device: torch.device) -> bool:
    """Return whether an accelerator's current stream is being captured into a graph."""
    stream: Any = torch.accelerator.current_stream(device)
    if hasattr(stream, "is_capturing"):
        return bool(stream.is_capturing())
    module = torch.get_device_module(device)  # of older versions of torch
    ask = getattr(module, "is_current_stream_capturing", None)
    return bool(ask and ask())


_CAPTURED: dict[int, Tensor] = {}
"""The tensors that captured graphs read, by their ids."""


def keep_if_captured(device: torch.device, *tensors: Tensor) -> None:
    """Keep `tensors` until the process ends if a graph, which reads them, is being captured."""
    if is_accelerator(device) and is_capturing(device):
        _CAPTURED.update((id(x), x) for x in tensors)


def number_of_stream(device: torch.device) -> int | None:
    """Return the number of a device's current stream, for comparison; None on a host.

    Stream objects cannot be compared by `!=`, which is always false.
    """
    return torch.accelerator.current_stream(device).stream_id if is_accelerator(device) else None


class StreamRequest:
    """Work queued on a side stream, and the tensors whose memory the work uses.

    The request keeps the tensors alive until `wait`. Work that is queued on the current stream
    after `wait` runs later, also if it reuses the memory. (`record_stream` also works, but blocks
    reuse of the memory during the capture of a graph.)
    """

    def __init__(self, stream: torch.Stream, tensors: Iterable[Tensor]):
        self._device, self._event = stream.device, stream.record_event()
        self._tensors = tuple(tensors)

    def wait(self) -> None:
        """Make the current stream wait for this work, and free the tensors; the host continues."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors = ()

    def __del__(self) -> None:
        # An exception may leave messages behind, which are sent and arrive all the same.
        if self._tensors and not sys.is_finalizing():
            self.wait()


class SideStream:
    """A second stream of a device, with high priority, for messages and copies."""

    def __init__(self, device: torch.device):
        self.stream = torch.Stream(device=device, priority=-1)

    def follow(self) -> None:
        """Make this stream wait for all work queued so far on the current stream."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))

    def mark(self, tensors: Iterable[Tensor]) -> StreamRequest:
        """Return a request for all work queued so far on this stream, which uses `tensors`."""
        return StreamRequest(self.stream, tensors)


# Device graphs: work that was captured while it was queued on streams, and that one call repeats.


def why_no_graphs(device: torch.device) -> str | None:
    """Return the reason why work on a device cannot be captured in a graph; None if it can."""
    if not is_accelerator(device):
        return f"graphs are for GPUs, and the grid computes on {device.type}"
    if device.type == "cuda" or hasattr(torch.accelerator, "Graph"):
        return None
    return f"torch {torch.__version__} has no graphs of {device.type}"


class DeviceGraph:
    """The work that a function queues on a device, captured once and repeated by each replay.

    `made` is the function's result, whose memory every replay overwrites. Other threads may query
    events during the capture.

    Parameters
    ----------
    work: the function. It must use the current stream only, and tensors that keep their addresses.
    """

    def __init__(self, device: torch.device, work: Callable[[], Any]):
        self._graph, capturing = _new()
        stream = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with using(stream), capturing:
            self.made = work()
        torch.accelerator.current_stream(device).wait_stream(stream)

    def replay(self) -> None:
        """Queue the captured work on the current stream."""
        self._graph.replay()


class GraphedFunction:
    """A function of tensors that is captured in a device graph, with memory of its own.

    Inputs are copied into the graph's memory, and results out of it.

    Attributes
    ----------
    plain: the function.
    begun: whether a capture has begun.

    Parameters
    ----------
    constants: the tensors that the function uses besides its inputs.
    results: the number of results that are copied; further results stay in the graph's memory.
    fixed: the number of leading inputs that are not copied, as they have the same memory in all
        calls.
    """

    def __init__(
        self,
        plain: Callable[..., Sequence[Tensor]],
        device: torch.device,
        constants: Sequence[Tensor],
        results: int,
        fixed: int,
    ) -> None:
        self.plain, self.begun = plain, False
        self._device, self._constants = device, constants
        self._results, self._fixed = results, fixed
        self._graph: DeviceGraph | None = None
        self._static: list[Tensor] = []
        self._addresses: list[int] = []

    def has_moved(self) -> bool:
        """Return whether the address of one of the constants has changed since the capture."""
        return [x.data_ptr() for x in self._constants] != self._addresses

    def forget(self) -> None:
        """Discard the graph, so that the next call captures the function again."""
        self._graph = None

    def capture(self, tensors: Sequence[Tensor]) -> None:
        """Capture the function, messages included, with new memory for inputs like `tensors`."""
        self.begun = True
        self._addresses = [x.data_ptr() for x in self._constants]
        copied = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
            for x in tensors[self._fixed :]
        )
        self._static = [*tensors[: self._fixed], *copied]
        self._graph = DeviceGraph(self._device, lambda: self.plain(*self._static))

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the results for the inputs `tensors`; capture first if a constant has moved."""
        if self._graph is None or self.has_moved():
            self.capture(tensors)
        assert self._graph is not None
        for mine, given in zip(self._static[self._fixed :], tensors[self._fixed :], strict=True):
            mine.copy_(given)
        self._graph.replay()
        made = self._graph.made
        return *_copies(made[: self._results], self._constants), *made[self._results :]


def _copies(tensors: Iterable[Tensor | None], constants: Iterable[Tensor]) -> Iterator[Any]:
    """Yield a copy of each tensor; copies share memory if their originals do.

    None, and a tensor in the memory of one of `constants`, are yielded without a copy.
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


def release_graphs() -> None:
    """Reset all device graphs of this process, also graphs that the program has captured itself.

    NCCL closes a connection only if no graph contains messages over it.
    """
    kinds = torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", torch.cuda.CUDAGraph)
    gc.unfreeze()  # or graphs that were there when the program called gc.freeze would stay unseen
    for thing in gc.get_objects():
        if issubclass(type(thing), kinds):
            with suppress(RuntimeError):
                thing.reset()


def _new() -> tuple[Any, AbstractContextManager[Any]]:
    """Return an empty graph, and a context that captures work on the current stream into it."""
    if hasattr(torch.accelerator, "Graph"):
        graph: Any = torch.accelerator.Graph(capture_error_mode="thread_local")
        return graph, graph
    graph = torch.cuda.CUDAGraph()
    return graph, torch.cuda.graph(graph, capture_error_mode="thread_local")
