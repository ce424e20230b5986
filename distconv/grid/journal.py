"""The calls and messages of this rank, compared with the other ranks, which must make the same.

One rule decides what is compared: the first 16 of a kind, and every 64th later; with
DISTCONV_DEBUG=1 all. Such calls of a function on cut tensors are entries of the journal, with their
arguments. So is every exchange and reduction outside a backward pass (a *step*), the others by name
only. The ranks compare a running checksum of their entries: before each of the first 16 steps of a
function, and then every 64 steps without waiting. Where checksums differ, the ranks exchange their
latest entries, and all raise the same error. Contents of tensors are compared by the same rule.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from distconv.grid.call_keys import (
    Key,
    code_of,
    entry_in_words,
    first_difference,
    full_key,
    short_key,
)
from distconv.grid.whereabouts import CURRENT, NO_CALL, by_ranks, is_parked, place_of, user_line
from distconv.torch_private import backward_pass
from distconv.transport.interface import Comparison, Tags
from distconv.transport.launch import switched_on
from distconv.transport.watched import Wait, Waiting

_VARIABLE = "DISTCONV_DEBUG"
_FIRST, _EVERY = 16, 64
"""The number of first calls of a kind that are compared, and the distance of later ones. Every 64
steps the ranks take the result of one comparison, and start the next without waiting."""
_KEPT = 1024
"""The number of latest entries that are kept, to be named where ranks differ."""
_KINDS = 4096
"""The number of kinds of calls after which their counts are reset."""
_BACKWARD = {"backward", torch.autograd.backward, torch.autograd.grad}


class DivergenceError(RuntimeError):
    """The ranks of a grid run different operators, or the same ones with different arguments.

    It is raised on all ranks. A program that catches it, on all ranks, may continue.
    """


class Journal:
    """The calls and steps of this rank, which the other ranks of `comm` must make as well.

    Attributes
    ----------
    thread: the thread that takes the steps.
    debug: whether everything is compared each time, as with DISTCONV_DEBUG=1.
    number: the number of steps of this rank, reductions of gradients among them.
    place: the number of the latest entry, if it has arguments; else None.
    written: the number of entries.
    missed: the number of comparisons elsewhere that other ranks had started, and this one had not,
        when the ranks were found to differ.

    Parameters
    ----------
    comm: a `Communicator` of its own; None for a single rank, which compares nothing.
    waiting: shows the waits of comparisons to the watching thread.
    """

    def __init__(self, comm: Any, waiting: Waiting):
        self._comm, self.waiting = comm, waiting
        self.compares = comm is not None
        self.debug = self.compares and switched_on(_VARIABLE)
        self._all = False
        """Whether every step is compared for now."""
        self.number = self.written = self.missed = 0
        self._elsewhere = 0
        """The number of comparisons elsewhere."""
        self.place: int | None = None
        self._folded = self._summed = 0
        """The number of entries in the running checksum, and the checksum."""
        self._known_from = 0
        """The first entry by which tensors are told apart."""
        self._since = 0
        """The number of steps since the last comparison began."""
        self._last: deque[tuple[str, int, Key, str | None]] = deque(maxlen=_KEPT)
        self._calls: dict[Any, int] = {}
        self._steps: dict[Any, int] = {}
        self._counts: dict[Hashable, int] = {}
        """The numbers of calls and steps of each function, and of uses of other kinds."""
        self._tags = Tags()
        self.next_tag = self._tags.next
        self.thread = threading.get_ident()
        self._under_way: Comparison | None = None

    @property
    def operator(self) -> Any:
        """Return the function on DistTensors that this rank is running; None outside of any."""
        return CURRENT.call[0]

    def is_due(self, kind: Hashable) -> bool:
        """Return whether to compare in this call of a kind: the first ones, and one in many.

        Counted on each rank; the answer is the same on all ranks that make the same calls.
        """
        if len(self._counts) >= _KINDS and kind not in self._counts:
            self._counts.clear()
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        return count <= _FIRST or not count % _EVERY or self.debug

    def enter_call(self, function: Any) -> None:
        """Enter the running function if it is due, whatever it sends.

        Calls of backward passes and of other threads are not entered, as their order may differ.
        """
        if threading.get_ident() != self.thread or not self.compares:
            return
        self.place = None
        count = self._calls[function] = self._calls.get(function, 0) + 1
        if count > _FIRST and count % _EVERY and not self._compares_all:
            return
        if backward_pass() != -1:
            return
        if function not in _BACKWARD:
            self._write("call", 0, full_key(CURRENT.call, self._known_from), user_line())
            return
        # Arguments of autograd's functions may be blocks, which differ between ranks.
        self._write("call", 0, short_key(CURRENT.call), user_line())
        if self._compares_all:
            self.compare()  # before sums of gradients, which are not entered

    def take(self, kind: str, tag: int = 0) -> None:
        """Begin the next step.

        Raises DivergenceError on every rank, where the ranks are found to differ. Raises
        RuntimeError where two threads use the grid at once.
        """
        if threading.get_ident() != self.thread:
            self._change_thread()
        self.number += 1
        function = CURRENT.call[0]
        outside = function is None or function in _BACKWARD
        if outside and kind == "all_reduce":
            # Gradients are reduced as they become ready, in orders that differ between ranks.
            return
        # Only the count decides, as it is the same on all ranks: a key that is new to one rank may
        # be known to another, which would send its messages while the first waits to compare.
        count = self._steps[function] = self._steps.get(function, 0) + 1
        compared = self._compares_all or count <= _FIRST
        if not outside and (compared or not count % _EVERY):
            key = full_key(CURRENT.call, self._known_from)
        else:
            key = short_key(CURRENT.call)
            backward = function is not None or backward_pass() != -1
            compared = self._compares_all or (compared and not backward)
        self._write(kind, tag, key, user_line() if self._compares_all else None)
        self._since += 1
        if compared:
            self.compare()
        elif self._since >= _EVERY:
            self._start()

    @property
    def _compares_all(self) -> bool:
        return self._all or self.debug

    @contextmanager
    def comparing_all(self, event: str) -> Iterator[None]:
        """Enter an event, and compare every step within the context, at its beginning and its end.

        All ranks enter it together.
        """
        before, self._all = self._all, self.compares
        try:
            self.agrees(event, 0)
            yield
            self.compare()
        finally:
            self._all = before

    def agrees(self, event: str, number: int) -> bool:
        """Enter an event, compare all entries up to now, and wait for the result. Collective.

        Returns
        -------
        Whether `number` is the same on all ranks.

        Raises
        ------
        DivergenceError
            On every rank, where the entries differ.
        """
        if not self.compares:
            return True
        if threading.get_ident() != self.thread:
            self._change_thread()
        self.number += 1
        self._write(event, 0, short_key(NO_CALL), None)
        self._start(number)
        return self._settle()

    def latest(self) -> int | None:
        """Return the entry for a tensor that is made now; None on other threads and in a backward
        pass, where ranks may be at different ones.
        """
        if threading.get_ident() != self.thread or backward_pass() != -1:
            return None
        return self.place

    def compare(self) -> None:
        """Compare all entries, and wait; raise DivergenceError on every rank, where they differ."""
        if self.compares:
            self._start()
            self._settle()

    def count_elsewhere(self) -> None:
        """Count a comparison that begins elsewhere, without an entry."""
        if self._compares_all:
            self.compare()
        self._elsewhere += 1

    def _write(self, kind: str, tag: int, key: Key, line: str | None) -> None:
        if self.written - self._folded == _KEPT:
            self._fold()
        self._last.append((kind, tag, key, line))
        self.written += 1
        self.place = self.written if len(key) > 2 else None

    def latest_codes(self, most: int = _KEPT) -> tuple[int, list[int]]:
        """Return the number of the first of the latest entries, and their codes.

        The watching thread calls it, too.
        """
        last = list(self._last)[max(0, len(self._last) - most) :]
        codes = [code_of(kind, key) + tag for kind, tag, key, _ in last]
        return self.written - len(last) + 1, codes

    def entry(self, number: int | None) -> str:
        """Return an entry as a user would write it; the latest one for None."""
        last = list(self._last)
        index = len(last) - 1 if number is None else number - 1 - self.written + len(last)
        return entry_in_words(*last[index]) if 0 <= index < len(last) else "nothing yet"

    def _fold(self) -> None:
        """Add new entries to the running checksum."""
        _, codes = self.latest_codes(self.written - self._folded)
        self._summed = crc32(array("q", codes).tobytes(), self._summed)
        self._folded = self.written

    def _start(self, number: int = 0) -> None:
        """Start to compare the running checksum, and a number, once the comparison under way has
        ended.
        """
        self._settle()
        self._fold()
        self._since = 0
        self._under_way = self._comm.compare([self._summed, number])

    def _settle(self) -> bool:
        """Wait for the comparison under way, if there is one, and raise where entries differ.

        Return whether its number is the same on all ranks.
        """
        if self._under_way is None:
            return True
        comparison, self._under_way = self._under_way, None
        with Wait(self.waiting):
            alike, number_alike = comparison.wait()
        if not alike:
            raise DivergenceError(self._differences())
        return number_alike

    def _differences(self) -> str:
        """Return each rank's first entry that differs, in words. Collective."""
        with Wait(self.waiting):
            ranks = self._comm.allgather(self.latest_codes())
            number = first_difference(ranks)
            told = self.entry(number), place_of(self.thread), self._tags.last, self._elsewhere
            steps, places, tags, elsewhere = zip(*self._comm.allgather(told), strict=True)
        # A program that catches the error continues with the same numbers on all ranks.
        self._tags.last = max(tags)
        self.missed += max(elsewhere) - self._elsewhere
        self._elsewhere = max(elsewhere)
        self._summed = self._since = 0
        for known in (self._calls, self._steps, self._counts, self._last):
            known.clear()
        self.written = self._folded = max(begin + len(codes) - 1 for begin, codes in ranks)
        # Tensors made after the ranks diverged have different entries.
        self._known_from, self.place = self.written + 1, None
        begin = max(begin for begin, _ in ranks)
        found = (
            f"before collective step {begin}; their last ones are"
            if number is None
            else f"in collective step {number}"
        )
        hint = f" {_VARIABLE}=1 compares before every step, and names its line."
        return (
            f"the ranks differ {found}. {by_ranks(steps, ': ')}. They are now: "
            f"{by_ranks(places, ' at ')}. All ranks have to run the same operators with the same "
            "arguments in the same order; look for a condition on the rank, or on data that the "
            f"ranks do not share.{'' if self.debug else hint}"
        )

    def _change_thread(self) -> None:
        """Let the calling thread take the steps from now on, unless another one is about to."""
        if backward_pass() != -1:
            return  # autograd computes on behalf of the thread that called backward()
        if not is_parked(self.thread):
            raise RuntimeError(
                f"two threads use one grid, or grids over the same ranks, at once: one is at "
                f"{place_of(self.thread)}, the other at {user_line()}. Their messages would be "
                "taken for each other's; let one thread do all that communicates, and hand it "
                "work by a queue, or let one thread end before the other goes on"
            )
        self.thread = threading.get_ident()
