"""A journal of this rank's calls and messages, which must equal the journals of the other ranks.

An entry is the text of a call with its arguments, or of a collective *step*: an exchange, or a
reduction outside a backward pass. The ranks compare a running checksum of their entries: before
each of the first 16 steps of a function, with each call of a parallelized module, and every 64
steps without waiting. If checksums differ, the ranks exchange their latest entries, and all raise
the same error.

The first 16 calls of a function on partitioned tensors are entries, and later every 64th call; with
DISTCONV_DEBUG=1 every call. Other steps are entries without arguments. The contents of tensors are
compared by the same rule (`comm/checksums.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor

from distconv.device.kinds import is_accelerator
from distconv.device.streams import has_passed, is_capturing, record_event
from distconv.grid.words import (
    CURRENT,
    by_ranks,
    call_in_words,
    errors_in_words,
    function_in_words,
    is_parked,
    place_of,
    user_line,
)
from distconv.torch_private import backward_pass
from distconv.transport.interface import (
    Comparison,
    Message,
    Request,
    StreamTransport,
    Transport,
    tags,
    tags_behind,
)
from distconv.transport.launch import switched_on

# This rank's present waits for other ranks, which the watching thread of `stall.py` reads.


class Wait:
    """A context during which the host waits for other ranks.

    `peers()` returns the numbers of the awaited ranks; `peers` is None if all ranks are awaited.
    `seen` is the time (`time.monotonic`, in seconds) at which the watching thread first saw the
    wait, or 0.
    """

    __slots__ = ("_before", "_waiting", "peers", "seen")

    def __init__(self, waiting: Waiting, peers: Callable[[], Iterable[int]] | None = None):
        self._waiting, self.peers, self.seen = waiting, peers, 0.0

    def __enter__(self) -> None:
        self._before, self._waiting.now = self._waiting.now, self

    def __exit__(self, *_: object) -> None:
        self._waiting.now = self._before


class StreamWait:
    """A wait for the ranks `peers` that was queued on the current stream of a GPU.

    `step` is the number of this rank's collective step, and `operator` the running function or
    None. `seen` is the time (`time.monotonic`, in seconds) at which the watching thread first saw
    the wait, or 0. The wait is over when the GPU has reached `event`.
    """

    def __init__(self, device: torch.device, peers: Iterable[int], step: int, operator: Any):
        self.device, self.event = device, record_event(device)
        self.peers, self.step, self.operator, self.seen = peers, step, operator, 0.0


class Waiting:
    """The present waits of this rank for other ranks, which the watching thread reads.

    Attributes
    ----------
    now: the innermost wait of the host, or None.
    of_streams: the waits of a GPU's streams, in the order in which the waits were queued.
    checks: functions that raise `RuntimeError` if a carrier between accelerators reports an error.
    """

    def __init__(self) -> None:
        self.now: Wait | None = None
        self.of_streams: deque[StreamWait] = deque()
        self.checks: list[Callable[[], None]] = []

    def oldest_of_streams(self) -> StreamWait | None:
        """Return the earliest queued wait of a stream that is not over, or None.

        Waits that are over are removed. Only the watching thread may call this method.
        """
        given = self.of_streams
        while given and has_passed(given[0].event, given[0].device):
            given.popleft()
        return given[0] if given else None


_VARIABLE = "DISTCONV_DEBUG"
_FIRST, _EVERY = 16, 64
"""The first 16 calls of a kind are compared, and later every 64th call. Every 64 steps the ranks
finish one comparison, and start the next without waiting."""
_KEPT = 1024
"""The number of latest entries that are kept for error messages."""
_KINDS = 4096
"""The number of kinds of uses at which their counts are reset."""
_BACKWARD = {"backward", torch.autograd.backward, torch.autograd.grad}


class DivergenceError(RuntimeError):
    """Raised on all ranks of a grid that run different operators, or with different arguments.

    A program that catches the error on all ranks may continue.
    """

    on_all_ranks = True


class Entries(NamedTuple):
    """The latest entries of one rank's journal; `first` is the number of the first of them.

    `texts` has the texts, which must be equal on all ranks. `lines` has the line of the user's
    program for each entry, or None; lines may differ between ranks.
    """

    first: int
    texts: Sequence[str]
    lines: Sequence[str | None]

    def words(self, number: int) -> str:
        """Return the text of entry `number` with its line of the program, for an error message."""
        index = number - self.first
        if not 0 <= index < len(self.texts):
            return "no recorded step"
        line = self.lines[index]
        return self.texts[index] + (f", at {line}" if line else "")


def first_difference(ranks: Sequence[Entries]) -> int | None:
    """Return the number of the first entry that differs between `ranks`.

    None if all kept entries are equal, so that an entry that is no longer kept must have differed.
    """
    begin = max(entries.first for entries in ranks)
    end = max(entries.first + len(entries.texts) for entries in ranks)
    for number in range(begin, end):
        if len({tuple(entries.texts[number - entries.first :][:1]) for entries in ranks}) > 1:
            return number
    return None


class Journal:
    """The calls and collective steps of this rank, for comparison with the other ranks of `comm`.

    Attributes
    ----------
    thread: the id of the thread that may communicate.
    debug: whether every call and step is compared, as with DISTCONV_DEBUG=1.
    number: the number of steps of this rank, including reductions of gradients.
    place: the number of the latest entry if its text has arguments, else None. Later entries name a
        tensor made now by this number.
    written: the number of entries.

    Parameters
    ----------
    comm: a `Communicator` that nothing else uses; None for a single rank, which compares nothing.
    waiting: the waits of this rank, to which the journal adds its own waits.
    """

    def __init__(self, comm: Any, waiting: Waiting):
        self._comm, self.waiting = comm, waiting
        self.compares = comm is not None
        self.debug = self.compares and switched_on(_VARIABLE)
        self._compares_all = self.debug
        """Whether every step is compared, with DISTCONV_DEBUG=1 or in `comparing_all`."""
        self.any_order = 0
        """The number of active contexts in which ranks may start backward passes in any order."""
        self.number = self.written = 0
        self.place: int | None = None
        self._checksum = 0
        """The running checksum of all entries."""
        self._known_from = 0
        """The number of the first entry by which later entries may name a tensor."""
        self._since = 0
        """The number of steps since the start of the last comparison."""
        self._last: deque[tuple[str, str | None]] = deque(maxlen=_KEPT)
        """The texts and lines of the latest entries."""
        self._calls: dict[Any, int] = {}
        self._steps: dict[Any, int] = {}
        self._counts: dict[Hashable, int] = {}
        """The numbers of calls and of steps of each function, and of uses of other kinds."""
        self.next_tag = tags()
        self.thread = threading.get_ident()
        self._under_way: Comparison | None = None

    def compares_on(self, device: torch.device) -> bool:
        """Return whether the ranks can compare the contents of tensors on `device`.

        False for a single rank, and while `device` captures a graph, as the host cannot read
        elements during a capture.
        """
        return self.compares and not (is_accelerator(device) and is_capturing(device))

    def is_due(self, kind: Hashable, device: torch.device) -> bool:
        """Count a use of `kind`, and return whether the ranks should compare its tensors.

        The ranks compare the first 16 uses and then every 64th, but none while `device`, on which
        the tensors are, captures a graph. All ranks with the same calls get the same result. No
        communication.
        """
        if not self.compares_on(device):
            return False
        if len(self._counts) >= _KINDS and kind not in self._counts:
            self._counts.clear()
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        return count <= _FIRST or not count % _EVERY or self.debug

    def enter_call(self, function: Any) -> None:
        """Write an entry for the running call of `function`, if this call is to be compared.

        Calls within backward passes and in other threads have no entry, as their order may differ
        between ranks. The same holds for calls of backward within contexts counted by `any_order`.
        """
        if threading.get_ident() != self.thread or not self.compares:
            return
        self.place = None
        count = self._calls[function] = self._calls.get(function, 0) + 1
        if count > _FIRST and count % _EVERY and not self._compares_all:
            return
        if backward_pass() != -1 or (self.any_order and function in _BACKWARD):
            return
        self._write(f"call{call_in_words(CURRENT.call, self._known_from)}", user_line())
        if function != "backward":
            self.place = self.written
        elif self._compares_all:
            self.compare()  # before reductions of gradients, which have no entries

    def step(self, kind: str, tag: int = 0) -> None:
        """Write an entry for a collective step, such as "exchange", and compare ranks if it is due.

        `kind` is the name of the step. `tag` is the tag of an exchange, which must be equal on all
        ranks. Raises DivergenceError on every rank if ranks differ, and RuntimeError if two threads
        use the grid at the same time.
        """
        self._begin_step()
        function, arguments, _ = CURRENT.call
        outside = function is None or function in _BACKWARD
        if outside and kind == "all_reduce":
            # Gradients are reduced as they become ready, in orders that differ between ranks.
            return
        # Only the count decides, as it is the same on all ranks. Arguments that are new to one rank
        # may be known to another, which would send its messages while the first waits to compare.
        count = self._steps[function] = self._steps.get(function, 0) + 1
        compared = self._compares_all or count <= _FIRST
        with_arguments = not outside and (compared or not count % _EVERY)
        if with_arguments:
            words = call_in_words(CURRENT.call, self._known_from)
        else:
            grid = getattr(arguments[0], "grid", None) if arguments else None
            words = function_in_words(function, None if grid is None else grid.topology)
        numbered = f"{kind} {tag}" if tag else kind
        self._write(f"{numbered}{words}", user_line() if self._compares_all else None)
        self.place = self.written if with_arguments else None
        self._since += 1
        if compared:
            self.compare()
        elif self._since >= _EVERY:
            self._start()

    @contextmanager
    def comparing_all(self, event: str) -> Iterator[None]:
        """Compare the ranks at every step within the context, and at its start and end. Collective.

        `event` is the text of an entry that is written at the start.
        """
        before, self._compares_all = self._compares_all, self.compares
        try:
            self.agrees(event, 0)
            yield
            self.compare()
        finally:
            self._compares_all = before

    def agrees(self, event: str, number: int) -> bool:
        """Return whether `number` is equal on all ranks, after a comparison of all entries.

        An entry with the text `event` is written first. Raises DivergenceError on every rank if
        entries differ. Collective.
        """
        if not self.compares:
            return True
        self._begin_step()
        self._write(event, None)
        self.place = None
        self._start(number)
        return self._wait()

    def latest(self) -> int | None:
        """Return the number of the entry that names a tensor made now, or None.

        None if the latest entry has no arguments, and on a thread that may not communicate.
        """
        return self.place if threading.get_ident() == self.thread else None

    def compare(self) -> None:
        """Compare all entries between ranks, and wait for the result. Collective.

        Raises DivergenceError on every rank if entries differ.
        """
        if self.compares:
            self._begin_step()  # so that reports show that a rank that has ended does not take part
            self._start()
            self._wait()

    def latest_entries(self, most: int = _KEPT) -> Entries:
        """Return the latest entries, `most` at most. Any thread may call this method."""
        last = list(self._last)[-most:]
        texts, lines = zip(*last, strict=True) if last else ((), ())
        return Entries(self.written - len(last) + 1, texts, lines)

    def _begin_step(self) -> None:
        """Count a collective step, after a check that this thread may communicate.

        Raises RuntimeError if two threads use the grid at the same time.
        """
        if threading.get_ident() != self.thread:
            self._change_thread()
        self.number += 1

    def _write(self, text: str, line: str | None) -> None:
        self._checksum = crc32(text.encode(), self._checksum)
        self._last.append((text, line))
        self.written += 1

    def _start(self, number: int = 0) -> None:
        """Start to compare between ranks the checksum of all entries, and `number`.

        An earlier comparison is finished first, which may raise DivergenceError. Collective.
        """
        self._wait()
        self._since = 0
        self._under_way = self._comm.compare([self._checksum, number])

    def _wait(self) -> bool:
        """Finish the comparison that was started last; return whether its numbers were equal.

        Return True if none was started. Raises DivergenceError on every rank if entries differ.
        """
        if self._under_way is None:
            return True
        comparison, self._under_way = self._under_way, None
        with Wait(self.waiting):
            alike, numbers_alike = comparison.wait()
        if not alike:
            raise DivergenceError(self._differences())
        return numbers_alike

    def _differences(self) -> str:
        """Return the error message for different entries, and reset the journal. Collective."""
        tag = self.next_tag()
        told = self.latest_entries(), place_of(self.thread), tag, CURRENT.error
        with Wait(self.waiting):
            ranks, places, reached, errors = zip(*self._comm.allgather(told), strict=True)
        number = first_difference(ranks)
        # A program that catches the error continues with the same numbers on all ranks.
        for _ in range(tags_behind(tag, reached)):
            self.next_tag()
        self._checksum = self._since = 0
        CURRENT.error = None
        for known in (self._calls, self._steps, self._counts, self._last):
            known.clear()
        ends = [entries.first + len(entries.texts) - 1 for entries in ranks]
        self.written = max(ends)
        # Tensors made after the ranks diverged have different entries.
        self._known_from, self.place = self.written + 1, None
        if number is None:
            begin = max(entries.first for entries in ranks)
            found = f"before collective step {begin}; their last ones are"
            steps = [entries.words(end) for entries, end in zip(ranks, ends, strict=True)]
        else:
            found = f"in collective step {number}"
            steps = [entries.words(number) for entries in ranks]
        met = f"{words} " if (words := errors_in_words(errors)) else ""
        hint = f" {_VARIABLE}=1 compares before every step, and names its line."
        return (
            f"the ranks differ {found}. {by_ranks(steps, ': ')}. Their current operators: "
            f"{by_ranks(places, ' at ')}. {met}All ranks must run the same operators with the "
            "same arguments in the same order; look for a condition that depends on the rank, or "
            f"on data that differ between ranks.{'' if self.debug else hint}"
        )

    def _change_thread(self) -> None:
        """Make the calling thread the only one that may communicate.

        Raises RuntimeError unless the previous thread has ended, or waits for a lock or a queue. In
        a backward pass nothing changes, as autograd has threads of its own.
        """
        if backward_pass() != -1:
            return  # autograd computes on behalf of the thread that called backward()
        if not is_parked(self.thread):
            raise RuntimeError(
                "two threads use one grid, or grids over the same ranks, at the same time: one is "
                f"at {place_of(self.thread)}, the other at {user_line()}. Their messages would be "
                "confused; call collective functions in one thread only, which receives work from "
                "a queue, or wait for one thread to end before the other continues"
            )
        self.thread = threading.get_ident()


# A transport that records its waits for the watching thread, and its steps in the journal.


Peers = Callable[[], Iterable[int]]
"""A function that returns the numbers of the ranks for which a wait waits."""


class WrappedTransport:
    """A transport that wraps another transport, `carrier`, by which subclasses send messages."""

    def __init__(self, carrier: Transport):
        self.name, self.ordered, self.next_tag = carrier.name, carrier.ordered, carrier.next_tag
        self.carry_by(carrier)

    def carry_by(self, carrier: Transport) -> None:
        """Send all later messages by `carrier`."""
        # `empty` is copied, as every message allocates memory, and a method would cost a call.
        self.carrier, self.empty = carrier, carrier.empty


class _WatchedRequest:
    """A request whose `wait` runs in the context `wait()`, so that the watching thread sees it."""

    __slots__ = ("_request", "_wait")

    def __init__(self, request: Request, wait: Callable[[], Any]):
        self._request, self._wait = request, wait

    def wait(self) -> None:
        with self._wait():
            self._request.wait()


class WatchedTransport(WrappedTransport):
    """A transport that records its waits for the watching thread, and its steps in the journal.

    `members(group)` returns the ranks of the communicator `group`, as numbers in the grid.
    """

    def __init__(
        self, carrier: Transport, journal: Journal, members: Callable[[Any], Iterable[int]]
    ):
        super().__init__(carrier)
        self._journal, self._members = journal, members
        self.next_tag, self._waiting = journal.next_tag, journal.waiting
        if carrier.ordered:
            by_streams = cast(StreamTransport, carrier)
            self._waiting.checks.append(by_streams.check)
            self._visible: Callable[[Peers], Any] = partial(self._on_stream, by_streams.device)
        else:
            self._visible = partial(Wait, self._waiting)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        self._journal.step("exchange", tag)
        request = self.carrier.exchange(arriving, leaving, tag)

        def peers() -> Iterable[int]:
            return {rank for rank, _ in (*arriving, *leaving)}

        return _WatchedRequest(request, partial(self._visible, peers))

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        self._journal.step("all_reduce")
        peers = partial(self._members, group)
        with Wait(self._waiting, peers):  # the first call for a group connects its ranks
            request = self.carrier.all_reduce(tensor, group)
        return _WatchedRequest(request, partial(self._visible, peers))

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        self._journal.step("all_gather")
        with self._visible(partial(self._members, group)):
            return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        self._journal.step("broadcast")
        with self._visible(partial(self._members, group)):
            self.carrier.broadcast(tensor, group)

    @contextmanager
    def _on_stream(self, device: Any, peers: Peers) -> Iterator[None]:
        """Record a wait of the host for `peers()` within the context, and then one of the stream.

        The host may wait within the context until ranks are connected. After the context a wait of
        the current stream of `device` is recorded. None is recorded while a graph is captured, as
        the wait then happens at each replay.
        """
        with Wait(self._waiting, peers):
            yield
        if not is_capturing(device):
            wait = StreamWait(device, peers(), self._journal.number, CURRENT.call[0])
            self._waiting.of_streams.append(wait)
