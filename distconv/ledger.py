"""What has been redistributed on the way, so that nobody is surprised by hidden communication."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distconv.layout import Layout


@dataclass
class Redistribution:
    """The redistributions that one operator has asked for between two layouts, on this rank."""

    operator: str
    source: Layout
    target: Layout
    times: int = 0
    bytes: int = 0
    """Bytes received from other ranks."""


_LEDGER: dict[tuple[str, Layout, Layout], Redistribution] = {}


def record(operator: str, source: Layout, target: Layout, received: int) -> None:
    """Count one redistribution that brought this rank `received` bytes."""
    entry = _LEDGER.setdefault((operator, source, target), Redistribution(operator, source, target))
    entry.times += 1
    entry.bytes += received


def redistributions(*, reset: bool = False) -> list[Redistribution]:
    """The redistributions so far, implicit and explicit, in order of first appearance.

    Every rank keeps its own count of the bytes it has received in forward passes. `reset` empties
    the list after it has been read. No communication.
    """
    entries = [replace(entry) for entry in _LEDGER.values()]
    if reset:
        _LEDGER.clear()
    return entries
