"""A record of the redistributions and other communication of operators, for users to inspect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from distconv.geometry.layout import Layout
from distconv.geometry.plan import Plan
from distconv.grid.words import module_path


@dataclass
class Redistribution:
    """A count of the redistributions of one operator in one module, from one layout to another.

    Each rank has its own counts.

    Examples
    --------
    >>> x = dc.distribute_tensor(torch.ones(1, 4, 8, 8), dc.ProcessGrid(height=2))
    >>> earlier = dc.redistributions(reset=True)
    >>> y = x.redistribute(dc.Layout(channel="height"))
    >>> [moved] = dc.redistributions()
    >>> moved.source, moved.target, moved.times, moved.bytes
    (Layout(height='height'), Layout(channel='height'), 1, 256)
    """

    operator: str
    source: Layout
    target: Layout
    module: str
    """The name of the module that was called, as in `named_modules`; "" outside of modules."""
    times: int = 0
    bytes: int = 0
    """Bytes received from other ranks."""


@dataclass(frozen=True)
class Movement:
    """One operator's use of a plan: a redistribution, a halo exchange, or a sum over ranks."""

    operator: str
    source: Layout
    target: Layout
    plan: Plan
    itemsize: int
    adjoint: bool = False
    """Whether the adjoint of the plan is run, which is a reduce-scatter."""

    @property
    def redistributes(self) -> bool:
        """Return whether source and target layout differ."""
        return self.source != self.target

    @property
    def bytes(self) -> int:
        """Return the number of bytes that this rank receives from other ranks."""
        routes = self.plan.sends if self.adjoint else self.plan.receives
        return self.itemsize * sum(route.size for route in routes)


_LEDGER: dict[tuple[Any, ...], Redistribution] = {}
_TRACE: ContextVar[list[Movement] | None] = ContextVar("distconv_trace", default=None)
_COUNTING: ContextVar[bool] = ContextVar("distconv_counting", default=True)


current_trace: Callable[[], list[Movement] | None] = _TRACE.get
"""Return the list to which the active `trace_movements` appends; None outside of such a context."""


def record(movement: Movement) -> None:
    """Append a movement to the active `trace_movements`, and count it if it is a redistribution."""
    trace = current_trace()
    if trace is not None:
        trace.append(movement)
    if movement.redistributes and _COUNTING.get():
        operator, source, target = movement.operator, movement.source, movement.target
        module = module_path()
        key = operator, source, target, module
        entry = _LEDGER.get(key)
        if entry is None:
            entry = _LEDGER[key] = Redistribution(operator, source, target, module)
        entry.times += 1
        entry.bytes += movement.bytes


@contextmanager
def without_counting() -> Iterator[None]:
    """Exclude redistributions within the context from the counts of `redistributions`."""
    token = _COUNTING.set(False)
    try:
        yield
    finally:
        _COUNTING.reset(token)


@contextmanager
def trace_movements(movements: list[Movement] | None = None) -> Iterator[list[Movement]]:
    """Yield a list to which forward passes within the context append all movements of data.

    Halo exchanges and sums are included. The list is `movements` if given.
    """
    movements = [] if movements is None else movements
    token = _TRACE.set(movements)
    try:
        yield movements
    finally:
        _TRACE.reset(token)


def redistributions(*, reset: bool = False) -> list[Redistribution]:
    """Return the counts of redistributions so far, in order of first appearance.

    Both calls of `redistribute` and redistributions by operators count. Each rank counts the bytes
    that it received in forward passes. `reset` empties the record. No communication.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 4, 4), grid)
    >>> earlier = dc.redistributions(reset=True)
    >>> y = x.sort(dim=2).values
    >>> [moved.operator for moved in dc.redistributions()]
    ['sort']
    """
    entries = [replace(entry) for entry in _LEDGER.values()]
    if reset:
        _LEDGER.clear()
    return entries
