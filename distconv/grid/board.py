"""Notes between ranks, while their programs wait for messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distconv.transport.torch_groups import Store


class Board:
    """Notes by name, in a store of torch.distributed that the first rank keeps.

    Without a store, or once it cannot be reached, reads return nothing, and notes are lost.
    """

    def __init__(self, store: Store = None):
        self._store = store

    def post(self, name: str, text: str) -> None:
        """Leave a note, which replaces the earlier one of that name."""
        self._ask(lambda store: store.set(name, text))

    def read(self, name: str) -> str | None:
        """Return the note of that name; None where there is none."""
        note = self._ask(lambda store: store.get(name) if store.check([name]) else None)
        return None if note is None else note.decode()

    def count(self, name: str, more: int = 1) -> int:
        """Add to the counter of that name; return its new value, or -1 without a store."""
        value = self._ask(lambda store: store.add(name, more))
        return -1 if value is None else int(value)

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        try:
            return None if self._store is None else question(self._store)
        except RuntimeError:
            self._store = None
