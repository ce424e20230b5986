"""A thread that notices if ranks wait for each other in vain, reports it, and ends the job.

About once a second it looks at the waits of the host and of a GPU's streams. It acts if a wait
lasts longer than DISTCONV_TIMEOUT seconds (300 by default), as for a killed rank; if the awaited
rank has left the program; if two waiting ranks have taken different steps; or if NCCL has met an
error. Then it asks all ranks for their place in the program, prints one message with the first step
in which they differ, and aborts the job.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from zlib import crc32

from distconv.grid.abort import ABANDONED, abort_job
from distconv.grid.calls import operator_name, operator_of
from distconv.grid.journal import Entries, Journal, first_difference
from distconv.grid.program_lines import place_of
from distconv.grid.rank_words import by_ranks, ranks_in_words
from distconv.grid.waits import StreamWait, Wait, Waiting
from distconv.transport.torch_groups import Store, open_store

_VARIABLE = "DISTCONV_TIMEOUT"
_DEFAULT = 300.0
_GRACE = 2.0
"""Seconds that messages of a rank that has left may still be on their way."""
_ANSWER = 5.0
"""Seconds that the other ranks have for their answers."""
_COMPARED = 256
"""The number of latest steps that the ranks compare then."""
_UNKNOWN = Entries(1, (), ())
"""The entries of a rank that has not told them."""


def time_limit() -> float:
    """Return the seconds that a wait may last, by DISTCONV_TIMEOUT, or raise ValueError."""
    text = os.environ.get(_VARIABLE, str(_DEFAULT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"{_VARIABLE}={text!r} is no time limit; give the seconds that a rank may wait for "
            "others, such as 300, or inf"
        )
    return seconds


class Board:
    """Short texts and counters by which the watching threads of all ranks inform each other.

    The board keeps them in a store of torch.distributed on the first rank.
    """

    def __init__(self, store: Store = None):
        self._store = store

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the store's method of the name `method`, and return its result.

        Returns None if the store cannot be reached.
        """
        try:
            return None if self._store is None else getattr(self._store, method)(*arguments)
        except RuntimeError:
            self._store = None

    def read(self, name: str) -> str | None:
        """Return the text stored under `name`, or None."""
        note = self.ask("get", name) if self.ask("check", [name]) else None
        return None if note is None else note.decode()


class Watch:
    """A thread that watches this rank's waits for the other ranks of a journal.

    `rank` is this rank's number among the `size` ranks of the journal.
    """

    def __init__(self, rank: int, size: int, waiting: Waiting):
        self._rank, self._size, self._waiting = rank, size, waiting
        self._journal, self._board = Journal(None, waiting), Board()
        try:
            self._limit = time_limit()
        except ValueError:
            self._limit = _DEFAULT  # and the grid raises the error, on all ranks
        # A large job asks the first rank less often.
        self._period = max(min(1.0, self._limit / 8), size / 2000)
        self._answered = False
        self._leaving = threading.Event()
        self._looking = threading.Thread(target=self._look, name="distconv-watch", daemon=True)
        self._looking.start()

    def connect(self, comm: Any, journal: Journal) -> None:
        """Begin to inform the other ranks' watches about this rank's journal. All ranks call it."""
        self._board, self._journal = Board(open_store(comm)), journal
        if not _WATCHES:
            atexit.register(_leave_together, os.getpid())
        _WATCHES.append(self)

    def leave(self) -> None:
        """Tell the other ranks that this rank's program has ended, and after how many steps."""
        self._leaving.set()
        self._looking.join()
        self._board.ask("set", f"left/{self._rank}", str(self._journal.number))
        self._board.ask("add", "left", 1)

    def wait_for_others(self) -> None:
        """Wait until the programs of all ranks have ended, or the job is aborted.

        The first rank, which keeps the store, goes last.
        """
        self._until("left", self._size)
        if self._rank:
            self._board.ask("add", "read", 1)
        else:
            self._until("read", self._size - 1)

    def _until(self, name: str, enough: int) -> None:
        """Wait until counter `name` reaches `enough`, or the store cannot be reached."""
        pause, longest = 0.001, max(0.02, self._size / 10_000)
        while (count := self._board.ask("add", name, 0)) is not None and count < enough:
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _look(self) -> None:
        while not self._leaving.wait(self._period):
            why = self._wrong()
            if why:
                self._alarm(why)
            self._answer()

    def _wrong(self) -> str | None:
        """Return the reason to report, if ranks wait too long or in vain; else None."""
        try:
            for check in self._waiting.checks:
                check()
            given = self._waiting.oldest_of_streams()
        except RuntimeError as error:
            return f"in vain: {error} (rank {self._rank})"
        wait = self._waiting.now
        host, stream = _seconds(wait), _seconds(given)
        if max(host, stream) > self._limit:
            return f"for more than {_VARIABLE}={self._limit:g} seconds"
        late = []
        if wait is not None and host > _GRACE:
            late.append((wait.peers and wait.peers(), self._journal.number))
        if given is not None and stream > _GRACE:
            late.append((given.peers, given.step))
        gone = {rank for peers, step in late for rank in self._gone(peers, step)}
        if gone:
            return f"for {ranks_in_words(sorted(gone))}, which will not come"
        return "in vain: they have taken different steps" if late and self._has_parted() else None

    def _gone(self, peers: Iterable[int] | None, step: int) -> Iterator[int]:
        """Yield the ranks of `peers`, or of all for None, that have ended before step `step`."""
        if self._board.ask("add", "left", 0):
            for rank in range(self._size) if peers is None else peers:
                steps = self._board.read(f"left/{rank}")
                if steps is not None and int(steps) < step:
                    yield rank

    def _has_parted(self) -> bool:
        """Return whether this waiting rank's latest entries differ from the next waiting rank's.

        Each waiting rank posts its entries. If any ranks differ, two neighbours do.
        """
        first, texts, _ = self._journal.latest_entries(_COMPARED)
        sums = [crc32(text.encode()) for text in texts]
        self._board.ask("set", f"waits/{self._rank}", json.dumps((first, sums)))
        note = self._board.read(f"waits/{(self._rank + 1) % self._size}")
        if note is None:
            return False
        other, others = json.loads(note)
        begin = max(first, other)
        pairs = zip(sums[begin - first :], others[begin - other :], strict=False)
        return any(mine != theirs for mine, theirs in pairs)

    def _state(self) -> _State:
        """Return this rank's place in the program, in words, and its latest journal entries."""
        what, journal = "elsewhere", self._journal
        wait, given = self._waiting.now, self._waiting.oldest_of_streams()
        if wait is not None and wait.seen:
            what = f"waiting for {_seconds(wait):.0f} s"
        if given is not None and given.seen:
            within = f" in {operator_name(given.operator)}" if given.operator else ""
            what = f"its GPU waiting for {_seconds(given):.0f} s{within}; the host {what}"
        operator = operator_of(journal.thread)
        what += f" in {operator}" if operator else ""
        what += f" at {place_of(journal.thread)}, after {journal.number} collective steps"
        return _State(what, journal.latest_entries(_COMPARED))

    def _answer(self) -> None:
        """Post this rank's state, once, as soon as any rank has raised the alarm."""
        if not self._answered and self._board.read("alarm") is not None:
            self._answered = True
            self._board.ask("set", f"state/{self._rank}", json.dumps(self._state()))

    def _alarm(self, why: str) -> None:
        """Report the states of all ranks and end the job, unless another rank does so already."""
        self._board.ask("set", "alarm", "")
        self._answer()
        if self._board.ask("add", "reporters", 1) not in (None, 1):
            time.sleep(4 * _ANSWER)  # the first to report ends the job
        states = self._states()
        sys.stdout.flush()
        print(_report(why, self._size, states), file=sys.__stderr__, flush=True)
        abort_job()

    def _states(self) -> dict[int, _State]:
        """Return, by rank, the states of ranks that answer within some seconds, or have ended."""
        states = {self._rank: self._state()}
        end = time.monotonic() + _ANSWER
        while len(states) < self._size and time.monotonic() < end:
            for rank in set(range(self._size)) - set(states):
                if (steps := self._board.read(f"left/{rank}")) is not None:
                    states[rank] = _State(f"has left the program, after {steps} collective steps")
                elif (note := self._board.read(f"state/{rank}")) is not None:
                    what, entries = json.loads(note)
                    states[rank] = _State(what, Entries(*entries))
            time.sleep(min(0.1, self._period))
        return states


class _State(NamedTuple):
    """The place of a rank in its program, in words, and the latest entries of its journal."""

    what: str
    entries: Entries = _UNKNOWN


def _report(why: str, size: int, states: dict[int, _State]) -> str:
    """Return the report: the reason, each rank's place, and the first step that differs."""
    silent = "does not answer; it was killed or stopped, or runs code that lets no thread run"
    places: dict[str, list[int]] = {}
    for rank in range(size):
        places.setdefault(states[rank].what if rank in states else silent, []).append(rank)
    lines = [f"  {ranks_in_words(ranks)}: {what}" for what, ranks in places.items()]
    known = [state.entries for state in states.values() if state.entries.texts]
    number = first_difference(known) if known else None
    if number is not None:
        entries = [states[r].entries if r in states else _UNKNOWN for r in range(size)]
        words = [theirs.words(number) for theirs in entries]
        lines.append(f"Step {number} is the first in which they differ. {by_ranks(words, ': ')}.")
    return "\n".join(
        (
            f"distconv: ranks wait {why}",
            *lines,
            "All ranks have to run the same operators in the same order, and the same number of "
            "batches. Usually one of them has returned early, skipped or added a call (under "
            "`if rank == 0`, say), caught an error that the others have not seen, or takes longer "
            f"than the limit, which {_VARIABLE} changes. DISTCONV_DEBUG=1 names the first operator "
            "that differs.",
        )
    )


def _seconds(wait: Wait | StreamWait | None) -> float:
    """Return the seconds since the watching thread first saw a wait; 0 for a new one or None."""
    if wait is None:
        return 0.0
    now = time.monotonic()
    wait.seen = wait.seen or now
    return now - wait.seen


_WATCHES: list[Watch] = []
"""The watches of this process, which leave together when its program ends."""


def _leave_together(process: int) -> None:
    if os.getpid() != process or ABANDONED.is_set():
        return  # a forked child is none of the ranks, and an aborted job has none left
    for watch in _WATCHES:
        watch.leave()
    for watch in _WATCHES:
        watch.wait_for_others()
