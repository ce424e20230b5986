"""A thread that notices when ranks wait for each other in vain, says where, and ends the job.

The thread looks about once a second at the wait under way, the host's and that of a GPU's streams.
Where one takes longer than DISTCONV_TIMEOUT seconds (300 when not set), where a rank that is waited
for has left the program, where two ranks that wait have taken different steps, or where NCCL has
met with an error, it asks all ranks where they are and in which step they first differ, prints one
message, and aborts.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

from distconv.grid.abort import ABANDONED, abort_job
from distconv.grid.board import Board
from distconv.grid.order import Order, by_ranks, first_difference, ranks_in_words
from distconv.grid.whereabouts import operator_name, operator_of, place_of
from distconv.transport.watched import StreamWait, Wait, Waiting

_VARIABLE = "DISTCONV_TIMEOUT"
_DEFAULT = 300.0
_GRACE = 2.0
"""Seconds that messages of a rank that has left may still be on their way."""
_ANSWER = 5.0
"""Seconds that the other ranks have to say where they are."""
_COMPARED = 128
"""How many of their latest steps the ranks compare then."""


def time_limit() -> float:
    """Return the seconds that a wait may take."""
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


class Watch:
    """A thread that looks at what this rank waits for among a set of ranks.

    Parameters
    ----------
    ranks: which ranks of the job they are, in the order in which they are numbered.
    rank: this rank's number.
    waiting: the wait of this rank that is under way.
    """

    def __init__(self, ranks: Sequence[int], rank: int, waiting: Waiting):
        self._rank, self._size = rank, len(ranks)
        self._waiting = waiting
        self._order: Order | None = None
        self._board: Board | None = None
        try:
            self._limit = time_limit()
        except ValueError:
            self._limit = _DEFAULT  # and the grid raises the error, on all ranks
        # A large job asks the first rank less often.
        self._period = max(min(1.0, self._limit / 8), self._size / 2000)
        self._host, self._stream = _Seen(), _Seen()
        self._thread = threading.get_ident()
        self._noted: tuple[int, int] | None = None
        self._questions = ["alarm", "difference"]
        self._leaving = threading.Event()
        self._looking = threading.Thread(target=self._look, name="distconv-watch", daemon=True)
        self._looking.start()

    def connect(self, comm: Any, order: Order) -> None:
        """Begin to share notes with all ranks, and to count steps by `order`; all ranks call it."""
        self._board, self._order = Board(comm), order
        _LEAVING.add(self)

    def leave(self) -> None:
        """Tell the others that this rank's program has ended."""
        self._leaving.set()
        self._looking.join()
        if self._board is not None:
            self._board.post(f"left/{self._rank}", str(self._steps))
        self._count("left")

    def wait_for_others(self) -> None:
        """Wait until all ranks have left, as MPI_Finalize does, or the job is aborted.

        The first rank, which keeps the notes, goes last.
        """
        self._until("left", self._size)
        if self._rank:
            self._count("read")
        else:
            self._until("read", self._size - 1)

    def _until(self, name: str, enough: int) -> None:
        """Wait until a counter has come so far, or cannot be read any more."""
        pause, longest = 0.001, max(0.02, self._size / 10_000)
        while 0 <= self._count(name, 0) < enough:
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _count(self, name: str, more: int = 1) -> int:
        return -1 if self._board is None else self._board.count(name, more)

    @property
    def _steps(self) -> int:
        return 0 if self._order is None else self._order.number

    def _look(self) -> None:
        while not self._leaving.wait(self._period):
            self._look_at_wait()
            self._attend()

    def _attend(self) -> None:
        """Answer the next question of the rank that reports, if it has been asked."""
        if self._board is not None and self._questions:
            asked = self._board.read(self._questions[0])
            if asked is not None:
                self._answer(self._questions.pop(0), asked)

    def _answer(self, question: str, asked: str) -> None:
        """Tell where this rank is and its latest steps, or what it has done in one of them."""
        if self._board is None or self._order is None:
            return
        if question == "alarm":
            steps = self._order.latest_numbers(_COMPARED)
            self._board.post(f"state/{self._rank}", json.dumps([*self._state(), steps]))
        else:
            self._board.post(f"step/{self._rank}", self._order.in_words(int(asked)))

    def _look_at_wait(self) -> None:
        """Raise the alarm where a wait goes on since the last look for too long, or for nobody."""
        try:
            for check in self._waiting.checks:
                check()
            given = self._waiting.streams.oldest()
        except RuntimeError as error:
            self._alarm(f"in vain: {error} (rank {self._rank})")
            return
        wait = self._waiting.now
        self._host.look(wait)
        self._stream.look(given)
        seconds = max(self._host.seconds, self._stream.seconds)
        if seconds > self._limit:
            self._alarm(f"for more than {_VARIABLE}={self._limit:g} seconds")
        elif seconds > _GRACE:
            gone = set[int]()
            if wait is not None and self._host.seconds > _GRACE:
                gone |= self._gone(wait.peers and wait.peers(), self._steps)
            if given is not None and self._stream.seconds > _GRACE:
                gone |= self._gone(given.peers, given.step)
            if gone:
                self._alarm(f"for {ranks_in_words(sorted(gone))}, which will not come")
            elif self._has_parted():
                self._alarm("in vain: they have taken different steps")

    def _gone(self, peers: Iterable[int] | None, step: int) -> set[int]:
        """Return which of these ranks, or of all, have left the program before a step."""
        board = self._board
        if board is None or board.count("left", 0) < 1:
            return set()
        gone = set()
        for rank in range(self._size) if peers is None else peers:
            steps = board.read(f"left/{rank}")
            if steps is not None and int(steps) < step:
                gone.add(rank)
        return gone

    def _has_parted(self) -> bool:
        """Note the latest steps of this rank, which waits; return whether the next rank has noted
        another one of the same number. Wherever ranks differ, two that are neighbours do."""
        board, order = self._board, self._order
        if board is None or order is None:
            return False
        first, steps = order.latest_numbers(_COMPARED, told_apart=False)
        if (state := (order.differences, order.number)) != self._noted:
            board.post(f"waits/{self._rank}", json.dumps([order.differences, first, steps]))
            self._noted = state
        note = board.read(f"waits/{(self._rank + 1) % self._size}")
        differences, other, others = json.loads(note) if note else (-1, 0, [])
        begin = max(first, other)
        pairs = zip(steps[begin - first :], others[begin - other :], strict=False)
        return differences == order.differences and any(mine != theirs for mine, theirs in pairs)

    def _state(self) -> list[Any]:
        """Return what this rank does, its operator, its line of the program, and its step."""
        thread = self._thread if self._order is None else self._order.thread
        what = "elsewhere"
        if self._host.is_still(self._waiting.now):
            what = f"waiting for {self._host.seconds:.0f} s"
        given = self._waiting.streams.oldest()
        if self._stream.is_still(given):
            within = f" in {operator_name(given.operator)}" if given and given.operator else ""
            seconds = f"{self._stream.seconds:.0f} s{within}"
            what = f"its GPU waiting for {seconds}; the host {what}"
        return [what, operator_of(thread), place_of(thread), self._steps]

    def _alarm(self, why: str) -> None:
        """Report where all ranks are, if no other rank does, and end the job."""
        answers: dict[int, Any] = {}
        difference = None
        if self._board is not None:
            answers = self._states(self._board)
            difference = self._difference(self._board, answers)
        answers.setdefault(self._rank, self._state())
        sys.stdout.flush()
        print(_report(why, self._size, answers, difference), file=sys.__stderr__, flush=True)
        abort_job()

    def _states(self, board: Board) -> dict[int, Any]:
        """Ask all ranks where they are, and return their answers by rank."""
        board.post("alarm", "")
        self._attend()
        if board.count("reporters") > 1:
            # The first to report ends the job.
            end = time.monotonic() + 4 * _ANSWER
            while time.monotonic() < end:
                self._attend()
                time.sleep(self._period)
        return {rank: json.loads(text) for rank, text in self._collect(board, "state").items()}

    def _difference(self, board: Board, answers: dict[int, Any]) -> str | None:
        """Ask what each rank has done in the first step in which those that answer differ."""
        steps = [latest for *_, latest in answers.values() if latest is not None]
        number = first_difference(steps) if len(steps) > 1 else None
        if number is None:
            return None
        board.post("difference", str(number))
        self._attend()
        told = self._collect(board, "step")
        words = [told.get(rank, "unknown") for rank in range(self._size)]
        return f"Step {number} is the first in which they differ. {by_ranks(words, ': ')}."

    def _collect(self, board: Board, name: str) -> dict[int, str]:
        """Return the notes of that name by rank, for which the ranks have some seconds; of a rank
        that has left, that it has."""
        end = time.monotonic() + _ANSWER
        notes: dict[int, str] = {}
        while len(notes) < self._size and time.monotonic() < end:
            time.sleep(min(0.1, self._period))
            for rank in range(self._size):
                if rank in notes:
                    continue
                if (steps := board.read(f"left/{rank}")) is not None:
                    left = "has left the program"
                    state = json.dumps([left, None, None, int(steps), None])
                    notes[rank] = state if name == "state" else left
                elif (note := board.read(f"{name}/{rank}")) is not None:
                    notes[rank] = note
        return notes


def _report(why: str, size: int, answers: dict[int, Any], difference: str | None) -> str:
    """Return where each rank is, ranks at the same place together, the first step in which they
    differ, and the usual reason."""
    silent = ["does not answer; it was killed or stopped, or runs code that lets no thread run"]
    places: dict[str, list[int]] = {}
    for rank in range(size):
        what, operator, line, step = answers.get(rank, [*silent, None, None, None])[:4]
        text = what
        text += f" in {operator}" if operator else ""
        text += f" at {line}" if line else ""
        text += f", after {step} collective steps" if step is not None else ""
        places.setdefault(text, []).append(rank)
    lines = [f"  {ranks_in_words(ranks)}: {text}" for text, ranks in places.items()]
    return "\n".join(
        (
            f"distconv: ranks wait {why}",
            *lines,
            *([] if difference is None else [difference]),
            "All ranks have to run the same operators in the same order, and the same number of "
            "batches. Usually one of them has returned early, skipped or added a call (under "
            "`if rank == 0`, say), caught an error that the others have not seen, or takes longer "
            f"than the limit, which {_VARIABLE} changes. DISTCONV_DEBUG=1 names the first operator "
            "that differs.",
        )
    )


class _Seen:
    """The wait that was seen last, held weakly so that its messages may go, and since when."""

    def __init__(self) -> None:
        self._wait: ref[Wait | StreamWait] | None = None
        self._since = 0.0

    def look(self, wait: Wait | StreamWait | None) -> None:
        """Note which wait is under way now."""
        if wait is None or not self.is_still(wait):
            self._wait, self._since = None if wait is None else ref(wait), time.monotonic()

    def is_still(self, wait: Wait | StreamWait | None) -> bool:
        """Return whether this is the wait that was seen last."""
        return wait is not None and self._wait is not None and self._wait() is wait

    @property
    def seconds(self) -> float:
        """Return for how long the last look and those before have seen the same wait."""
        return 0.0 if self._wait is None else time.monotonic() - self._since


class _Leaving:
    """The watches of this process, which leave together when its program ends."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._process = 0

    def add(self, watch: Watch) -> None:
        if not self._watches:
            self._process = os.getpid()
            atexit.register(self._leave)
        self._watches.append(watch)

    def _leave(self) -> None:
        if os.getpid() != self._process or ABANDONED.is_set():
            return  # a forked child is none of the ranks, and an aborted job has none left
        for watch in self._watches:
            watch.leave()
        for watch in self._watches:
            watch.wait_for_others()


_LEAVING = _Leaving()
