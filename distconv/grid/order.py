"""The collective steps of the ranks, compared: all ranks take the same ones in the same order.

Every exchange and every reduction outside a backward pass is a step. Each rank folds the operator,
its arguments, shapes and layouts into one running number, after the first steps of an operator its
name alone in most; and of each function on cut tensors, also of those that send nothing, the first
calls. The numbers are compared by a reduction of 16 bytes before each of the first steps of an
operator, and from time to time without waiting; with DISTCONV_DEBUG=1 before every step, with all
calls since the one before. In the first steps, tensors count with the step after which they were
made. Where the numbers differ, the ranks exchange the last steps they have taken, and every rank
raises the same error.
"""

from __future__ import annotations

import threading
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakSet
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from distconv.geometry.layout import Layout
from distconv.geometry.topology import Topology
from distconv.grid.whereabouts import (
    CURRENT,
    Call,
    is_parked,
    operator_name,
    place_of,
    user_line,
)
from distconv.transport.interface import Comparison, Tags
from distconv.transport.launch import switched_on
from distconv.transport.watched import Wait, Waiting

_VARIABLE = "DISTCONV_DEBUG"
_PERIOD = 256
"""Steps from one comparison that nobody waits for to the next."""
_LATER = 16
"""Steps from the beginning of such a comparison to a look at its result."""
_FIRST, _EVERY = 64, 64
"""How many steps of each operator count with its arguments, and one in how many after those; the
first calls of each function that count at all."""
_KEPT = 1024
"""How many steps and calls are kept, to be named where ranks differ."""
_NUMBERED = 512
"""Tensors made up to this step or call keep its number; with DISTCONV_DEBUG=1 all of them do."""


class DivergenceError(RuntimeError):
    """The ranks of a grid run different operators, or the same ones with different arguments.

    It is raised on all ranks. A program that catches it, on all ranks, may go on.
    """


def debugging() -> bool:
    """Return whether DISTCONV_DEBUG asks for a comparison before every step."""
    return switched_on(_VARIABLE)


SETTLED: set[Any] = set()
"""Functions of which no call counts any more, in a process whose tensors are cut over one set of
ranks."""


PARAMETERS: Any = WeakIdKeyDictionary()
"""The parameters of parallelized modules, each with its place among those of its module."""


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
        self.differences = 0
        """How often the ranks were found to differ; what they have counted before does not fit
        together."""
        self._since = 0
        """How many steps there have been since the last comparison began."""
        self._tags = Tags()
        self.next_tag = self._tags.next
        self._folded = 0
        self._last: deque[tuple[Any, int, str | None]] = deque(maxlen=_KEPT)
        self._counts: dict[Any, int] = {}
        self._calls: dict[Any, int] = {}
        self._tells_apart = True
        """Whether tensors of one shape are told apart by the steps after which they were made."""
        self._thread = threading.get_ident()
        self._under_way: Comparison | None = None
        if comm is not None:
            _ORDERS.add(self)
            SETTLED.clear()

    @property
    def thread(self) -> int:
        """Return the thread that takes the steps."""
        return self._thread

    @property
    def operator(self) -> Any:
        """Return the function on DistTensors that this rank is in; None outside of any."""
        return CURRENT.call[0]

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
        function, arguments, _ = call = CURRENT.call
        outside = function is None or function in _BACKWARD
        if outside and kind == "all_reduce":
            # Gradients are reduced as they become ready, which is not everywhere in one order.
            return
        # The count alone decides, which is the same on all ranks: what is new to one rank may be
        # known to another, which would send its messages while the first waits to compare.
        count = self._counts[function] = self._counts.get(function, 0) + 1
        compared = self.debug or count <= _FIRST
        if not outside and (compared or not count % _EVERY):
            key = _with_arguments(kind, call, self._tells_apart)
        else:
            # Blocks of the ranks' own may be among the arguments of autograd's functions.
            key = kind, function, _extents_of(arguments)
            backward = function is not None or torch._C._current_graph_task_id() != -1
            compared = self.debug or (compared and not (outside and backward))
        self._note(key, tag, user_line() if self.debug else None)
        self._since += 1
        if compared:
            self.compare()
        elif self._since == _PERIOD:
            self._start()
        elif self._since == _LATER:
            self._settle()

    def latest(self) -> int | None:
        """Return the number of the step or call before now; None where ranks may be at different
        ones, on other threads and in a backward pass, and where no tensor keeps it any more."""
        if threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1:
            return None
        return self._compared if self.numbers_tensors else None

    @property
    def numbers_tensors(self) -> bool:
        """Return whether tensors keep the number of the step or call after which they are made."""
        return self.debug or (self._compared < _NUMBERED and self._tells_apart)

    def count_call(self) -> None:
        """Count the function that this rank is in, whatever it sends: its first calls, or all where
        steps are compared one by one.

        Calls go with the steps that follow. What a backward pass calls may be in another order on
        each rank, and so may what other threads do.
        """
        function, _, _ = call = CURRENT.call
        count = self._calls.get(function, 0)
        if count == _FIRST and not self.debug:
            if len(_ORDERS) == 1:
                SETTLED.add(function)
            return
        if self._comm is None or threading.get_ident() != self._thread:
            return
        if function in _BACKWARD or torch._C._current_graph_task_id() != -1:
            return
        self._calls[function] = min(count + 1, _FIRST)
        self._note(_with_arguments("call", call, self._tells_apart), 0, user_line())

    def compare(self) -> None:
        """Compare all steps and calls up to now, and wait for the result. Collective."""
        self._settle()
        self._start()
        self._settle()

    def _note(self, key: Any, tag: int, line: str | None) -> None:
        """Give a step or a call the next place in the order."""
        if self._compared - self._counted == _KEPT:
            self._fold()
        self._last.append((key, tag, line))
        self._compared += 1

    def latest_numbers(self, most: int = _KEPT, told_apart: bool = True) -> tuple[int, list[int]]:
        """Return which number the first of the latest steps and calls has, and what stands for each
        of them; the watching thread asks, too.

        Parameters
        ----------
        told_apart: whether calls on tensors that were made after different steps differ.
        """
        last = list(self._last)[max(0, len(self._last) - most) :]
        first = self._compared - len(last) + 1
        return first, [_code(key if told_apart else _alike(key)) + tag for key, tag, _ in last]

    def in_words(self, number: int | None) -> str:
        """Return a step or a call, or with None the latest one, as a user would write it."""
        last = list(self._last)
        index = len(last) - 1 if number is None else number - 1 - self._compared + len(last)
        return _in_words(*last[index]) if 0 <= index < len(last) else "nothing yet"

    def _fold(self) -> None:
        """Count what has been taken since the last time into the number that ranks compare."""
        count = self._compared - self._counted
        _, numbers = self.latest_numbers(count)
        self._folded = crc32(array("q", numbers).tobytes(), self._folded)
        self._counted = self._compared

    def _start(self) -> None:
        """Start to compare the folded steps of all ranks."""
        self._fold()
        self._since = 0
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
        """Raise on all ranks, naming the first step in which they differ.

        Only warn where they call the same on tensors of one shape that they have made after
        different steps: a program may have made one tensor later on one rank. With DISTCONV_DEBUG=1
        that is an error, too.
        """
        here = place_of(self._thread)
        with Wait(self.waiting):
            both = self._comm.allgather((self.latest_numbers(), self.latest_numbers(_KEPT, False)))
            ranks, alike = zip(*both, strict=True)
            number = first_difference(ranks)
            told = self._comm.allgather((self.in_words(number), here, self._tags.last))
        # A program that catches the error goes on with the same numbers on all ranks.
        self._tags.last = max(tag for _, _, tag in told)
        self._folded = self._since = 0
        self.differences += 1
        # Tensors made since the ranks differ keep numbers that differ.
        self._tells_apart = self.debug
        for known in (self._counts, self._calls, self._last, SETTLED):
            known.clear()
        self._compared = self._counted = max(begin + len(own) - 1 for begin, own in ranks)
        begin = max(begin for begin, _ in ranks)
        found = (
            f"before collective step {begin}; their last ones are"
            if number is None
            else f"in collective step {number}"
        )
        steps, places, _ = zip(*told, strict=True)
        if not self.debug and number is not None and first_difference(alike) is None:
            warnings.warn(
                f"{found}, the ranks call one function on tensors that were made after different "
                f"steps: {by_ranks(steps, ': ')}. If these are different tensors, the numbers are "
                f"wrong: let all ranks take them in one order. {_VARIABLE}=1 makes this an error. "
                "There will be no more such warnings in this run",
                stacklevel=2,
            )
            return
        raise DivergenceError(_difference(found, steps, places, self.debug))

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


_ORDERS: WeakSet[Order] = WeakSet()
"""All orders of this process in which there are other ranks."""


def _in_words(key: Any, tag: int, line: str | None) -> str:
    """Return a step or a call as a user would write it."""
    kind, function, what, *keywords = key
    within = ""
    if keywords:
        named = (f"{name}={_word(value)}" for name, value in keywords[0])
        within = f" in {operator_name(function)}({', '.join((*map(_word, what), *named))})"
    elif function is not None:
        on = f" on ProcessGrid({Topology(what)})" if what else ""
        within = f" in {operator_name(function)}{on}"
    return f"{kind}{f' {tag}' if tag else ''}{within}" + (f", at {line}" if line else "")


_BACKWARD = {"backward", torch.autograd.backward, torch.autograd.grad}


class _Tensor(NamedTuple):
    """A tensor as all ranks have to see it, without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[tuple[str, ...], ...] | None
    extents: tuple[int, ...] | None
    number: int | None
    """Of a parameter of a parallelized module, its place among them."""
    made_after: int | None
    """Of another tensor on a grid, the step after which it was made, where tensors keep it."""


def _extents_of(arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the shape of the grid of a function's first argument; None where that has none."""
    grid = getattr(arguments[0], "grid", None) if arguments else None
    extents: tuple[int, ...] | None = None if grid is None else grid.topology.extents
    return extents


def _with_arguments(kind: str, call: Call, told_apart: bool) -> tuple[Any, ...]:
    """Return the key of a kind of step in the function that this rank is in, with its arguments.

    Parameters
    ----------
    told_apart: whether tensors are known by the step after which they were made.
    """
    function, arguments, keywords = call
    named = _kept(keywords or ())
    if torch._C._is_any_autocast_enabled():
        named = *named, ("autocast", _autocast_types())
    key = kind, function, _kept(arguments), named
    return key if told_apart else _alike(key)


def _autocast_types() -> tuple[torch.dtype, ...]:
    """Return the types into which autocast converts, on each kind of device where it is on."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple(torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k))


def _alike(key: Any) -> Any:
    """Return what a key would be if tensors did not know after which step they were made."""
    if isinstance(key, _Tensor):
        return key._replace(made_after=None)
    return tuple(map(_alike, key)) if type(key) is tuple else key


def _kept(argument: Any) -> Any:
    """Return what has to be the same of an argument on all ranks, in a form that can be hashed."""
    kind = type(argument)
    if kind in _SIMPLE:
        return argument
    if kind in _SPELLED:
        return repr(argument)
    if isinstance(argument, Tensor):
        cuts, grid = getattr(argument, "cuts", None), getattr(argument, "grid", None)
        extents = None if grid is None else grid.topology.extents
        number = PARAMETERS.get(argument)
        made_after = getattr(argument, "made_after", None) if number is None else None
        return _Tensor(argument.shape, argument.dtype, cuts, extents, number, made_after)
    if isinstance(argument, (tuple, list)):
        return tuple(map(_kept, argument))
    if isinstance(argument, dict):
        return tuple((str(name), _kept(value)) for name, value in argument.items())
    if kind is str:
        return argument.partition(":")[0]  # a device has another number on each rank
    if kind is slice:
        return "slice", _kept(argument.start), _kept(argument.stop), _kept(argument.step)
    if isinstance(argument, np.generic):
        value = argument.item()
        return repr(value) if isinstance(value, np.generic) else _kept(value)
    return kind.__name__


_SIMPLE = {int, type(None), torch.dtype, torch.memory_format, Layout}
_SPELLED = {bool, float, complex}
"""Types of numbers that may equal an integer, and are not the same argument."""


@lru_cache(maxsize=8192)
def _code(key: Any) -> int:
    """Return a number that stands for a step or a call, the same on all ranks."""
    kind, function, *arguments = key
    spelled = f"{kind} {'' if function is None else operator_name(function)} {arguments!r}"
    return crc32(spelled.encode())


def _word(value: Any) -> str:
    if isinstance(value, _Tensor):
        layout = "" if value.cuts is None else f" {Layout.of(value.cuts)}"
        name = "" if value.number is None else f"parameter {value.number}, "
        if value.made_after is not None:
            name = f"made after step {value.made_after}, "
        return f"{name}{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{layout}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_word, value))})"
    return str(value)


def first_difference(ranks: Sequence[tuple[int, Sequence[int]]]) -> int | None:
    """Return the first step in which ranks differ; None where that is longer ago than they know.

    Parameters
    ----------
    ranks: for each rank the number of its first remembered step, and what stands for each of them.
    """
    begin = max(first for first, _ in ranks)
    end = max(first + len(steps) for first, steps in ranks)
    for number in range(begin, end):
        if len({tuple(steps[number - first :][:1]) for first, steps in ranks}) > 1:
            return number
    return None


def _difference(found: str, steps: Sequence[str], places: Sequence[str], debug: bool) -> str:
    """Return the message about a step in which ranks differ.

    Parameters
    ----------
    found: which step it is.
    steps, places: for each rank what it has done in that step, and where it is now.
    """
    doing, now = by_ranks(steps, ": "), by_ranks(places, " at ")
    hint = "" if debug else f" {_VARIABLE}=1 compares before every step, and names its line."
    return (
        f"the ranks differ {found}. {doing}. They are now: {now}. All ranks have to run the same "
        f"operators with the same arguments in the same order; look for a condition on the rank, "
        f"or on data that the ranks do not share.{hint}"
    )


def by_ranks(texts: Sequence[str], between: str) -> str:
    """Return what each rank says, with ranks that say the same together."""
    return "; ".join(
        f"{ranks_in_words(r for r, text in enumerate(texts) if text == said)}{between}{said}"
        for said in dict.fromkeys(texts)
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
