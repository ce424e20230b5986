"""A record of the data moved between ranks, so that nobody is surprised by communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from distconv.geometry.layout import Layout
from distconv.geometry.plan import Plan
from distconv.grid.module_path import module_path


@dataclass
class Redistribution:
    """The redistributions on this rank between two layouts, for one operator in one module."""

    operator: str
    source: Layout
    target: Layout
    module: str
    """The name of the module that was called, as in `named_modules`; "" outside of any."""
    times: int = 0
    bytes: int = 0
    """Bytes received from other ranks."""


@dataclass(frozen=True)
class Movement:
    """One movement for an operator: a redistribution, a halo exchange, or a sum of results."""

    operator: str
    source: Layout
    target: Layout
    plan: Plan
    itemsize: int
    adjoint: bool = False
    """Whether the plan is run backwards, so that sums are scattered."""

    @property
    def redistributes(self) -> bool:
        """Return whether the layout changes."""
        return self.source != self.target

    @property
    def bytes(self) -> int:
        """Return the bytes received from other ranks."""
        routes = self.plan.sends if self.adjoint else self.plan.receives
        return self.itemsize * sum(route.size for route in routes)


_LEDGER: dict[tuple[Any, ...], Redistribution] = {}
_TRACE: ContextVar[list[Movement] | None] = ContextVar("distconv_trace", default=None)
_COUNTING: ContextVar[bool] = ContextVar("distconv_counting", default=True)


def tracing() -> bool:
    """Return whether every movement is recorded, not only redistributions."""
    return _TRACE.get() is not None


def record(movement: Movement) -> None:
    """Record a movement in the current trace, and as a redistribution if it is one."""
    trace = _TRACE.get()
    if trace is not None:
        trace.append(movement)
    if movement.redistributes and _COUNTING.get():
        operator, source, target = movement.operator, movement.source, movement.target
        module = module_path()
        key = operator, source.by_dimension, target.by_dimension, module
        entry = _LEDGER.get(key)
        if entry is None:
            entry = _LEDGER[key] = Redistribution(operator, source, target, module)
        entry.times += 1
        entry.bytes += movement.bytes


@contextmanager
def without_counting() -> Iterator[None]:
    """Keep movements that tools make within the context out of `redistributions`."""
    token = _COUNTING.set(False)
    try:
        yield
    finally:
        _COUNTING.reset(token)


@contextmanager
def trace_movements(movements: list[Movement] | None = None) -> Iterator[list[Movement]]:
    """Yield a list that records the movements of forward passes within the context, in order.

    The list is `movements` where given.
    """
    movements = [] if movements is None else movements
    token = _TRACE.set(movements)
    try:
        yield movements
    finally:
        _TRACE.reset(token)


def redistributions(*, reset: bool = False) -> list[Redistribution]:
    """Return the redistributions so far, implicit and explicit, in order of first appearance.

    Every rank counts the bytes that it received in forward passes. `reset` empties the list
    afterwards. No communication.
    """
    entries = [replace(entry) for entry in _LEDGER.values()]
    if reset:
        _LEDGER.clear()
    return entries
