"""A thread on each rank that detects ranks waiting for each other in vain, reports, and aborts.

About once a second the thread checks the waits of the host and of a GPU's streams. It acts if a
wait lasts longer than DISTCONV_TIMEOUT seconds (300 by default), such as for a killed rank; if the
program of an awaited rank has ended; if two waiting ranks have run different steps; or if NCCL has
reported an error. Then the thread asks all ranks for their place in the program, prints one message
with the first step in which ranks differ, and aborts the job.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

from distconv.grid.abort import ABANDONED, abort_job, say
from distconv.grid.board import ALARM, LEFT, Board, open_board
from distconv.grid.journal import Entries, Journal, StreamWait, Wait, Waiting, first_difference
from distconv.grid.words import (
    by_ranks,
    error_of,
    errors_in_words,
    operator_name,
    operator_of,
    place_of,
    ranks_in_words,
)

_VARIABLE = "DISTCONV_TIMEOUT"
_DEFAULT = 300.0
_GRACE = 2.0
"""Seconds for which messages of a rank whose program has ended may still be in flight."""
_ANSWER = 5.0
"""Seconds allowed for the answers of other ranks."""
_COMPARED, _COMPARED_IN_ALL = 256, 2**20
"""The largest number of latest steps that a report compares: for each rank, and over all ranks."""
_TURN = 3.0
"""Seconds between the reports of consecutive ranks, where ranks cannot ask each other."""
_READ = 256
"""The largest number of ranks whose notes are read by one request."""
_UNKNOWN = Entries(1, (), ())
"""The entries of a rank that has not sent its entries."""


def time_limit() -> float:
    """Return the seconds that a wait may last, by DISTCONV_TIMEOUT, 300 by default.

    Raises ValueError if DISTCONV_TIMEOUT is not a positive number.
    """
    text = os.environ.get(_VARIABLE, str(_DEFAULT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"{_VARIABLE}={text!r} is not a time limit; choose the seconds that a rank may wait "
            "for others, such as 300, or inf"
        )
    return seconds


def time_limit_or_default() -> float:
    """Return the seconds that a wait may last; 300 if DISTCONV_TIMEOUT is not a positive number.

    `ProcessGrid` raises for such a value, on all ranks.
    """
    try:
        return time_limit()
    except ValueError:
        return _DEFAULT


class Watch:
    """A thread that watches the waits of this rank for the other ranks of a journal.

    `rank` is this rank's number among the `size` ranks of the journal; `waiting` has the waits.
    """

    def __init__(self, rank: int, size: int, waiting: Waiting):
        self._rank, self._size, self._waiting = rank, size, waiting
        self._journal, self._board = Journal(None, waiting), Board()
        self._limit = time_limit_or_default()
        # Each rank of a large job sends requests to rank 0 less often.
        self._period = max(min(1.0, self._limit / 8), size / 2000)
        self._compared = max(1, min(_COMPARED, _COMPARED_IN_ALL // size))
        self._answered = False
        self._leaving = threading.Event()
        self._looking = threading.Thread(target=self._look, name="distconv-watch", daemon=True)
        self._looking.start()

    def connect(self, comm: Any, journal: Journal) -> None:
        """Connect the watching threads of all ranks of `comm`, to compare journals. Collective.

        `journal` is this rank's journal.
        """
        alone, self._board, self._journal = self._board, open_board(comm), journal
        alone.wake()
        if not _WATCHES:
            atexit.register(_leave_together, os.getpid())
        _WATCHES.append(self)

    def leave(self) -> None:
        """Let the thread inform the other ranks that this rank's program has ended, and then end.

        Return at once.
        """
        self._leaving.set()
        self._board.wake()

    def wait_for_others(self) -> None:
        """Wait until the programs of all ranks have ended, or the job is aborted."""
        self._looking.join()

    def _look(self) -> None:
        due = 0.0
        while not self._leaving.is_set():
            board = self._board
            board.serve(due - time.monotonic())
            if board is not self._board:
                board.close()  # the board from before `connect`
            if time.monotonic() >= due:
                due = time.monotonic() + self._period
                why = None
                with suppress(Exception):  # the program may change data meanwhile: check again
                    why = self._reason_to_report()
                if why:
                    self._alarm(why)
            with suppress(Exception):
                self._answer()
        self._board.post(f"left/{self._rank}", self._journal.number)
        self._board.add(LEFT)
        self._board.close()

    def _reason_to_report(self) -> str | None:
        """Return the reason why this rank waits too long or in vain, for the report; else None."""
        wait = self._waiting.now
        host = _seconds(wait)
        too_long = f"for more than {_VARIABLE}={self._limit:g} seconds"
        if host > self._limit:
            return too_long
        try:
            for check in self._waiting.checks:
                check()
            given = self._waiting.oldest_of_streams()
        except RuntimeError as error:
            return f"in vain: {error} (rank {self._rank})"
        stream = _seconds(given)
        if stream > self._limit:
            return too_long
        late = []
        if wait is not None and host > _GRACE:
            late.append((wait.peers and wait.peers(), self._journal.number))
        if given is not None and stream > _GRACE:
            late.append((given.peers, given.step))
        gone = {rank for peers, step in late for rank in self._gone(peers, step)}
        if gone:
            return f"for {ranks_in_words(sorted(gone))}, which has left the program"
        return "in vain: they ran different steps" if late and self._differs_from_next() else None

    def _gone(self, peers: Iterable[int] | None, step: int) -> Iterator[int]:
        """Yield the ranks of `peers` whose programs have ended before collective step `step`.

        If `peers` is None, all ranks are checked.
        """
        [left] = self._board.read([LEFT])
        if left:
            ranks = range(self._size) if peers is None else peers
            for rank, steps in self._notes("left", ranks):
                if isinstance(steps, int) and steps < step:
                    yield rank

    def _notes(self, name: str, ranks: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yield each of `ranks` that has posted a note called `name`, and the note."""
        ranks = list(ranks)
        for first in range(0, len(ranks), _READ):
            some = ranks[first : first + _READ]
            notes = self._board.read([f"{name}/{rank}" for rank in some])
            yield from ((rank, n) for rank, n in zip(some, notes, strict=True) if n is not None)

    def _differs_from_next(self) -> bool:
        """Return whether the latest journal entries of this rank and the next rank differ.

        Each waiting rank posts checksums of its entries; the rank after the last is rank 0. If all
        ranks wait and any two of their journals differ, those of two consecutive ranks differ.
        """
        first, texts, _ = self._journal.latest_entries(self._compared)
        sums = [crc32(text.encode()) for text in texts]
        self._board.post(f"waits/{self._rank}", (first, sums))
        [note] = self._board.read([f"waits/{(self._rank + 1) % self._size}"])
        with suppress(ValueError, TypeError):  # no note, or a note in another format
            other, others = note
            begin = max(first, other)
            pairs = zip(sums[begin - first :], others[begin - other :], strict=False)
            return any(mine != theirs for mine, theirs in pairs)
        return False

    def _state(self) -> _State:
        """Return this rank's place in the program as text, its latest journal entries and error."""
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
        return _State(what, journal.latest_entries(self._compared), error_of(journal.thread))

    def _answer(self) -> None:
        """Post this rank's state if any rank has raised the alarm, unless posted already."""
        if not self._answered and ALARM in self._board.announced:
            self._answered = True
            self._board.post(f"state/{self._rank}", self._state())

    def _alarm(self, why: str) -> None:
        """Report the states of all ranks and abort the job, for the reason `why`.

        If another rank has raised the alarm first, that rank reports.
        """
        try:
            reporters = self._board.add(ALARM)
            self._answer()
            if reporters is None:  # rank 0 is out of reach: ranks report in turn until one aborts
                time.sleep(min(_TURN * self._rank, 10 * _TURN))
            elif reporters > 1:
                self._serve(4 * _ANSWER)  # the rank that reports first aborts the job
            states = self._states()
            say(_report(why, self._size, states, self._board.reaches))
        finally:
            abort_job()

    def _serve(self, seconds: float) -> None:
        """Handle and forward messages of other ranks for `seconds`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._board.serve(left)

    def _states(self) -> dict[int, _State]:
        """Return the state of each rank that answers within some seconds or has ended, by rank."""
        states = {self._rank: self._state()}
        end = time.monotonic() + _ANSWER
        while len(states) < self._size and time.monotonic() < end and self._board.reaches:
            for rank, steps in self._notes("left", set(range(self._size)) - set(states)):
                states[rank] = _State(f"has left the program, after {steps} collective steps")
            for rank, note in self._notes("state", set(range(self._size)) - set(states)):
                with suppress(ValueError, TypeError):  # a note in another format
                    what, entries, error = note
                    states[rank] = _State(str(what), Entries(*entries), error)
            self._serve(min(0.1, self._period))
        return states


class _State(NamedTuple):
    """The place of a rank in its program as text, and the latest entries of its journal.

    `error` is the text of the last error that a function on DistTensors has raised on this rank, or
    None.
    """

    what: str
    entries: Entries = _UNKNOWN
    error: str | None = None


def _report(why: str, size: int, states: dict[int, _State], reached: bool) -> str:
    """Return the text of a report: the reason, each rank's place, and the first differing step.

    `states` has the states of ranks that answered, out of `size` ranks. `reached` is whether other
    ranks could be asked.
    """
    silent = "does not answer; it was killed or stopped, or runs code that blocks all threads"
    if not reached:
        silent = f"cannot be reached, because one of them {silent.replace('it was', 'was')}"
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
    met = [states[rank].error if rank in states else None for rank in range(size)]
    if errors := errors_in_words(met):
        lines.append(errors)
    return "\n".join(
        (
            f"distconv: ranks wait {why}",
            *lines,
            "All ranks must run the same operators in the same order, and the same number of "
            "batches. Usually one rank has returned early, skipped or added a call (for example "
            "under `if rank == 0`), caught an error that the other ranks did not get, or takes "
            f"longer than the limit, which {_VARIABLE} changes. DISTCONV_DEBUG=1 names the first "
            "operator that differs.",
        )
    )


def _seconds(wait: Wait | StreamWait | None) -> float:
    """Return the seconds since the watching thread first saw `wait`; 0 if it is new or None."""
    if wait is None:
        return 0.0
    now = time.monotonic()
    wait.seen = wait.seen or now
    return now - wait.seen


_WATCHES: list[Watch] = []
"""The watching threads of this process, which end together when its program ends."""


def _leave_together(process: int) -> None:
    if os.getpid() != process or ABANDONED.is_set():
        return  # a forked child is not a rank, and an aborted job has no ranks left
    for watch in _WATCHES:
        watch.leave()
    for watch in _WATCHES:
        watch.wait_for_others()
