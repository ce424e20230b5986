"""A GPU's streams on a CPU, watched: a use of memory that does not wait for another is found.

torch's own sanitizer for CUDA (`torch.cuda._sanitizer`) has vector clocks over streams and events.
Here it hears of the operators that torch dispatches, as if the current stream ran them, and of what
others, such as a stand-in for NCCL, say that they do on their streams. All is done at once, so
numbers are right whatever is missing; what is reported would be wrong where streams run at will.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.cuda._sanitizer import ArgumentHandler, EventHandler, UnsynchronizedAccessError
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_CELL = 4
"""Bytes that are looked at together."""


class Event:
    """Stands for torch.Event."""

    def __init__(self, sanitizer: Sanitizer):
        self._sanitizer, self.number = sanitizer, sanitizer.next_number()

    def synchronize(self) -> None:
        self._sanitizer.handler()._handle_event_synchronization(self.number)

    def query(self) -> bool:
        return True


class Stream:
    """Stands for torch.Stream."""

    device = torch.device("cpu")

    def __init__(self, sanitizer: Sanitizer, number: int):
        self._sanitizer, self.native_handle = sanitizer, number
        sanitizer.handler()._handle_stream_creation(number)

    def record_event(self) -> Event:
        event = Event(self._sanitizer)
        self._sanitizer.handler()._handle_event_record(event.number, self.native_handle)
        return event

    def wait_event(self, event: Event) -> None:
        self._sanitizer.handler()._handle_event_wait(event.number, self.native_handle)

    def wait_stream(self, stream: Stream) -> None:
        event = stream.record_event()
        self._sanitizer.handler()._handle_event_wait(event.number, self.native_handle)

    def synchronize(self) -> None:
        self._sanitizer.handler()._handle_stream_synchronization(self.native_handle)

    def is_capturing(self) -> bool:
        return False


class _Allocation(NamedTuple):
    """Memory that torch's allocator has given away, on the stream on which it may be used again."""

    storage: StorageWeakRef
    cells: range
    stream: int
    users: set[int]
    """Streams for which the allocator would wait."""


class _Uses(ArgumentHandler):
    """The memory that an operator reads and writes, cell by cell."""

    def _handle_argument(
        self,
        value: Any,
        is_write: bool,
        metadata_only: bool,
        name: str | None = None,
        is_output: bool = False,
    ) -> None:
        if isinstance(value, Tensor) and (is_write or not metadata_only):
            (self.dataptrs_written if is_write else self.dataptrs_read).update(_cells(value))


class Sanitizer(TorchDispatchMode):
    """Watches the uses of memory while it is entered.

    Attributes
    ----------
    reports: what is wrong, in words: two uses of one memory in no order, and memory released that
        another stream may still use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []
        self._handler = EventHandler()
        self._numbers = 0
        self._allocations: dict[int, _Allocation] = {}
        self.current = Stream(self, 0)
        self.host = Stream(self, self.next_number())
        """Where the host, and MPI, use memory."""

    def replace_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the library streams that this one watches."""

        class Made(Stream):  # a class, as torch.compile asks for one
            def __init__(made, **_: Any) -> None:
                super().__init__(self, self.next_number())

        monkeypatch.setattr(torch, "Stream", Made)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.accelerator, "set_stream", self._set_stream)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(Tensor, "record_stream", lambda *used: self._record_stream(*used))

    def next_number(self) -> int:
        """Return a number that no stream and no event has."""
        self._numbers += 1
        return self._numbers

    def handler(self) -> EventHandler:
        """Return torch's handler, which knows of all memory that has been released up to now."""
        for key, allocation in list(self._allocations.items()):
            if allocation.storage.expired():
                del self._allocations[key]
                self._release(allocation)
        return self._handler

    def launch(self, stream: int, name: str, reads: set[int], writes: set[int]) -> None:
        """Let a stream read and write cells of memory."""
        errors: Any = self.handler()._handle_kernel_launch(
            stream, reads - writes, writes, set(), name, defaultdict(list)
        )
        for error in errors[:1]:
            self._report(error)

    def pinned(self, like: Tensor) -> Tensor:
        """Return memory of the host that copies of any stream use.

        torch's allocator gives it away again when those are done, and no kernel clears it.
        """
        with _disable_current_modes():
            tensor = torch.empty(like.shape, dtype=like.dtype)
            storage = tensor.untyped_storage()
            cells = _range(storage.data_ptr(), storage.nbytes())
            everyone = set(range(self._numbers + 1))
            self._allocations[storage._cdata] = _Allocation(
                StorageWeakRef(storage), cells, self.host.native_handle, everyone
            )
        return tensor

    def launched(self, stream: int, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Let a stream send the memory that it reads, and receive what it writes."""
        used = [
            {cell for m, *_ in memory for cell in _range(m.address, m.nbytes)}
            for memory in (reads, writes)
        ]
        self.launch(stream, "messages", *used)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor and issubclass(kind, Tensor) for kind in types):
            return func(*args, **kwargs)  # which leads to operators on plain tensors
        uses = _Uses()
        uses.parse_inputs(func._schema, args, kwargs, is_factory=False)
        self.handler()
        result = func(*args, **kwargs)
        uses.parse_outputs(func._schema, result, is_factory=False)
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                self._allocation_of(tensor)
        self.launch(
            self.current.native_handle,
            func._schema.name,
            uses.dataptrs_read - uses.dataptrs_written,
            uses.dataptrs_written,
        )
        return result

    def _allocation_of(self, tensor: Tensor) -> _Allocation | None:
        storage = tensor.untyped_storage()
        if not storage.resizable() or not storage.nbytes():
            return None  # memory that somebody else owns
        known = self._allocations.get(storage._cdata)
        if known is None:
            cells = _range(storage.data_ptr(), storage.nbytes())
            known = _Allocation(StorageWeakRef(storage), cells, self.current.native_handle, set())
            self._allocations[storage._cdata] = known
        return known

    def _record_stream(self, tensor: Tensor, stream: Stream) -> None:
        allocation = self._allocation_of(tensor)
        if allocation is not None:
            allocation.users.add(stream.native_handle)

    def _release(self, allocation: _Allocation) -> None:
        """Forget released memory, which whatever its own stream is given next may overwrite."""
        accesses = self._handler.tensors_accessed.accesses
        unknown: str | None = None
        for cell in allocation.cells:
            info = accesses.pop(cell, None)
            for access in () if info is None else (*info.reads, info.write):
                if access is None or access.stream in allocation.users:
                    continue
                state = allocation.stream, access.seq_num, access.stream
                if not self._handler.syncs.is_ordered_after(*state):
                    unknown = f"{access.type} it on stream {access.stream}, {access.operator}"
        if unknown:
            self.reports.append(f"memory of stream {allocation.stream} is released while {unknown}")

    def _report(self, error: UnsynchronizedAccessError) -> None:
        now, before = (
            f"{access.type} on stream {access.stream} ({access.operator})"
            for access in (error.current_access, error.previous_access)
        )
        self.reports.append(f"{now} does not wait for {before}")

    def _set_stream(self, stream: Stream) -> None:
        self.current = stream


class WatchedMPI:
    """A transport by MPI between tensors on the host, of whose uses of memory a sanitizer hears."""

    name, ordered = "mpi", False

    def __init__(self, transport: Any, sanitizer: Sanitizer):
        self._transport, self._sanitizer = transport, sanitizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, arriving: Any, leaving: Any, tag: int) -> Any:
        self._use([t for _, t in leaving], [t for _, t in arriving])
        return _HostRequest(self._transport.exchange(arriving, leaving, tag), self._sanitizer)

    def all_reduce(self, tensor: Tensor, group: Any) -> Any:
        self._use([], [tensor])
        return _HostRequest(self._transport.all_reduce(tensor, group), self._sanitizer)

    def _use(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        used = [
            {cell for t in all_of_them for cell in _cells(t)} for all_of_them in (reads, writes)
        ]
        self._sanitizer.launch(self._sanitizer.host.native_handle, "MPI", *used)


class _HostRequest:
    """What MPI does meanwhile; whoever waits for it starts what follows on streams later."""

    def __init__(self, request: Any, sanitizer: Sanitizer):
        self._request, self._sanitizer = request, sanitizer

    def wait(self) -> None:
        self._request.wait()
        self._sanitizer.host.synchronize()


def _range(address: int, nbytes: int) -> range:
    return range(address // _CELL, -(-(address + nbytes) // _CELL)) if nbytes else range(0)


def _cells(tensor: Tensor) -> Iterable[int]:
    """Return the cells in which elements of a tensor lie."""
    if tensor.layout != torch.strided or not tensor.numel():
        return ()
    if tensor.is_contiguous():
        return _range(tensor.data_ptr(), tensor.nbytes)
    offsets = np.zeros(1, dtype=np.int64)
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            offsets = np.add.outer(offsets, stride * np.arange(n)).ravel()
    size = tensor.element_size()
    first = tensor.data_ptr() + size * offsets
    return {int(a) // _CELL for part in range(0, size, _CELL) for a in first + part}
