"""The collective steps of the ranks, compared: all ranks take the same ones in the same order.

Every exchange and every reduction outside a backward pass is a step. Each rank folds the operator,
its arguments, shapes and layouts into one running number, after the first steps of an operator its
name alone in most. The numbers are compared by a reduction of 16 bytes whenever a rank meets an
operator with arguments that are new to it, and from time to time without waiting; with
DISTCONV_DEBUG=1 before every step, with all functions on cut tensors since the one before, also
those that send nothing. Where they differ, the ranks exchange the last steps they have
taken, and every rank raises the same error.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from distconv.geometry.layout import Layout
from distconv.grid.whereabouts import CURRENT, is_parked, operator_name, place_of, user_line
from distconv.transport.communicator import Comparison
from distconv.transport.watched import Wait, Waiting

_VARIABLE = "DISTCONV_DEBUG"
_PERIOD = 256
"""Steps from one comparison that nobody waits for to the next."""
_FIRST, _EVERY = 64, 16
"""How many steps of each operator count with its arguments, and one in how many after those."""
_REMEMBERED = 4096
"""How many operators with their arguments are known; beyond, all are forgotten, on all ranks alike.
"""
_TAGS = 32767
"""How many tags there are before they begin again; every MPI has as many."""


class Step(NamedTuple):
    """A collective step, as it has to be the same on all ranks."""

    kind: str
    operator: Any
    """The operator with its arguments; None outside operators."""
    tag: int
    line: str | None
    """The line of the user's program, where steps are compared one by one."""

    @classmethod
    def of(cls, key: Any, tag: int, line: str | None) -> Step:
        """Return the step of a kind and an operator, of which the arguments may be left out."""
        kind, function, *arguments = key
        operator = None if function is None else (function, *(arguments or (None, ())))
        return cls(kind, operator, tag, line)

    def __str__(self) -> str:
        number = f" {self.tag}" if self.tag else ""
        within = "" if self.operator is None else f" in {described(self.operator)}"
        return f"{self.kind}{number}{within}" + (f", at {self.line}" if self.line else "")


class DivergenceError(RuntimeError):
    """The ranks of a grid run different operators, or the same ones with different arguments.

    It is raised on all ranks. A program that catches it, on all ranks, may go on.
    """


def debugging() -> bool:
    """Return whether DISTCONV_DEBUG asks for a comparison before every step."""
    return os.environ.get(_VARIABLE, "0") not in ("", "0")


COUNT_CALLS = debugging()
"""Whether functions that send nothing are counted, too."""


class Order:
    """The steps of this rank, which the other ranks of `comm` take as well.

    Parameters
    ----------
    comm: a `Communicator` that nothing else uses; None for a rank alone, which compares nothing.
    waiting: shows the waits of comparisons to the watching thread.
    """

    def __init__(self, comm: Any, waiting: Waiting):
        self._comm, self.waiting = comm, waiting
        self.debug = debugging()
        self.number = 0
        """How many steps this rank has taken, reductions of gradients among them."""
        self._compared = 0
        """How many of these steps have their place in the order."""
        self._counted = 0
        """How many of those are folded into the number that is compared."""
        self._tag = 0
        self._folded = 0
        self._codes: dict[Any, int] = {}
        self._last: deque[tuple[Any, int, str | None]] = deque(maxlen=_PERIOD)
        self._counts: dict[Any, int] = {}
        self._thread = threading.get_ident()
        self._under_way: Comparison | None = None

    @property
    def thread(self) -> int:
        """Return the thread that takes the steps."""
        return self._thread

    @property
    def operator(self) -> Any:
        """Return the function on DistTensors that this rank is in; None outside of any."""
        return CURRENT.function

    def next_tag(self) -> int:
        """Return the number of the next exchange, the same on all ranks."""
        self._tag = self._tag % _TAGS + 1
        return self._tag

    def take(self, kind: str, tag: int = 0) -> None:
        """Begin the next step.

        Raises
        ------
        DivergenceError
            On every rank, where the ranks are found to differ.
        RuntimeError
            Where two threads use the grid at once.
        """
        if threading.get_ident() != self._thread:
            self._change_thread()
        self.number += 1
        function = CURRENT.function
        outside = function is None or function in _BACKWARD
        if outside and kind == "all_reduce":
            # Gradients are reduced as they become ready, which is not everywhere in one order.
            return
        key: Any = kind, function
        # Blocks of the ranks' own may be among the arguments of autograd's functions.
        if not outside and self._counts_in_full(function):
            key = _with_arguments(kind)
        known = self._codes.get(key)
        new = known is None and self._meet(key)
        self._last.append((key, tag, user_line() if self.debug else None))
        self._compared += 1
        if new or self.debug:
            self._settle()
            self._start()
            self._settle()
        elif self._compared % _PERIOD == 0:
            self._settle()
            self._start()

    def count_call(self) -> None:
        """Count the function that this rank is in, whatever it sends, and compare it with the next
        step; nothing where steps are not compared one by one."""
        function = CURRENT.function
        if not self.debug or function in _BACKWARD:
            return
        key = _with_arguments("call")
        if key not in self._codes:
            self._meet(key)
        if self._compared - self._counted == _PERIOD:
            self._fold()
        self._last.append((key, 0, user_line()))
        self._compared += 1

    def _counts_in_full(self, function: Any) -> bool:
        """Return whether the next step of an operator counts with its arguments, not by its name
        alone."""
        count = self._counts[function] = self._counts.get(function, 0) + 1
        return count <= _FIRST or not count % _EVERY or self.debug

    def _meet(self, key: Any) -> bool:
        """Remember a kind of step; return whether to compare it with other ranks at once.

        A name alone may come first at other steps on ranks that differ already.
        """
        if len(self._codes) >= _REMEMBERED:
            self._fold()
            self._codes.clear()
        self._codes[key] = crc32(_spelled(key).encode())
        return len(key) > 2 or key[1] is None

    def _fold(self) -> None:
        """Count what has been taken since the last time into the number that ranks compare."""
        count = self._compared - self._counted
        latest = list(self._last)[len(self._last) - count :] if count else []
        numbers = array("q", [self._codes[key] + tag for key, tag, _ in latest])
        self._folded = crc32(numbers.tobytes(), self._folded)
        self._counted = self._compared

    def _start(self) -> None:
        """Start to compare the folded steps of all ranks."""
        self._fold()
        self._under_way = self._comm.compare([self._folded])

    def _settle(self) -> None:
        """Wait for the comparison under way, if there is one, and raise where the ranks differ."""
        if self._under_way is None:
            return
        comparison, self._under_way = self._under_way, None
        with Wait(self.waiting):
            alike = all(comparison.wait())
        if not alike:
            self._explain()

    def _explain(self) -> None:
        """Raise on all ranks, naming the first step in which they differ."""
        here = place_of(self._thread)
        first = self._compared - len(self._last) + 1
        steps = [str(Step.of(*step)) for step in self._last]
        with Wait(self.waiting):
            ranks = self._comm.allgather((first, steps, here))
            # A program that catches the error goes on with the same numbers on all ranks.
            self._tag = max(self._comm.allgather(self._tag))
        self._folded = 0
        self._codes.clear()
        self._counts.clear()
        self._last.clear()
        self._compared = self._counted = max(begin + len(steps) - 1 for begin, steps, _ in ranks)
        raise DivergenceError(_difference(ranks, self.debug))

    def _change_thread(self) -> None:
        """Let the calling thread take the steps from now on, if no other one is about to."""
        if torch._C._current_graph_task_id() != -1:
            return  # autograd computes for the thread that has called backward()
        if not is_parked(self._thread):
            raise RuntimeError(
                f"two threads use one grid, or grids over the same ranks, at once: one is at "
                f"{place_of(self._thread)}, the other at {user_line()}. Their messages would be "
                "taken for each other's; let one thread do all that communicates, and hand it "
                "work by a queue, or let one thread end before the other goes on"
            )
        self._thread = threading.get_ident()


def described(operator: Any) -> str:
    """Return an operator with its arguments in words, as a user would write the call."""
    function, arguments, keywords = operator
    if arguments is None:
        return operator_name(function)
    named = (f"{name}={_word(value)}" for name, value in keywords)
    return f"{operator_name(function)}({', '.join((*map(_word, arguments), *named))})"


_BACKWARD = {"backward", torch.autograd.backward, torch.autograd.grad}


class _Tensor(NamedTuple):
    """A tensor as all ranks have to see it, without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[tuple[str, ...], ...] | None
    extents: tuple[int, ...] | None


def _with_arguments(kind: str) -> tuple[Any, ...]:
    """Return the key of a kind of step in the function that this rank is in, and its arguments."""
    return kind, CURRENT.function, _kept(CURRENT.arguments), _kept(CURRENT.keywords or ())


def _kept(argument: Any) -> Any:
    """Return what has to be the same of an argument on all ranks, in a form that can be hashed."""
    kind = type(argument)
    if kind in _SIMPLE:
        return argument
    if kind is Tensor or kind is Parameter:
        return _Tensor(argument.shape, argument.dtype, None, None)
    if isinstance(argument, Tensor):
        cuts, grid = getattr(argument, "cuts", None), getattr(argument, "grid", None)
        extents = None if grid is None else grid.topology.extents
        return _Tensor(argument.shape, argument.dtype, cuts, extents)
    if isinstance(argument, (tuple, list)):
        return tuple(map(_kept, argument))
    if isinstance(argument, dict):
        return tuple((str(name), _kept(value)) for name, value in argument.items())
    if kind is slice:
        return "slice", _kept(argument.start), _kept(argument.stop), _kept(argument.step)
    if isinstance(argument, np.generic):
        return argument.item()
    return kind.__name__


_SIMPLE = {int, float, bool, str, type(None), torch.dtype, torch.memory_format, Layout}


def _spelled(key: Any) -> str:
    kind, function, *arguments = key
    return f"{kind} {'' if function is None else operator_name(function)} {arguments!r}"


def _word(value: Any) -> str:
    if isinstance(value, _Tensor):
        if value.cuts is None:
            return str(tuple(value.shape))
        return f"{tuple(value.shape)} {Layout.of(value.cuts)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_word, value))})"
    return str(value)


def _difference(ranks: list[tuple[int, list[str], str]], debug: bool) -> str:
    """Return the message about the first step in which ranks differ.

    Parameters
    ----------
    ranks: for each rank the number of its first remembered step, these steps, and where it is.
    """
    begin = max(first for first, _, _ in ranks)
    end = max(first + len(steps) for first, steps, _ in ranks)
    for number in range(begin, end):
        each = [
            steps[number - first] if number - first < len(steps) else "nothing yet"
            for first, steps, _ in ranks
        ]
        if len(set(each)) > 1:
            found = f"in collective step {number}"
            break
    else:
        each = [steps[-1] if steps else "nothing yet" for _, steps, _ in ranks]
        found = f"before collective step {begin}; their last ones are"
    doing = "; ".join(
        f"{ranks_in_words(r for r, text in enumerate(each) if text == what)}: {what}"
        for what in dict.fromkeys(each)
    )
    places = [where for _, _, where in ranks]
    now = "; ".join(
        f"{ranks_in_words(r for r, text in enumerate(places) if text == where)} at {where}"
        for where in dict.fromkeys(places)
    )
    hint = "" if debug else f" {_VARIABLE}=1 compares before every step, and names its line."
    return (
        f"the ranks differ {found}. {doing}. They are now: {now}. All ranks have to run the same "
        f"operators with the same arguments in the same order; look for a condition on the rank, "
        f"or on data that the ranks do not share.{hint}"
    )


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return numbers of ranks in words, as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(runs) > 1 or runs[0][0] != runs[0][1] else ''} {words}"
