"""Notes between ranks, while their programs wait for messages."""

from __future__ import annotations

from distconv.transport.torch_groups import Store


class Board:
    """Notes by name, in a store of torch.distributed that the first rank keeps.

    Without a store, or once it cannot be reached, reads return nothing, and notes are lost.
    """

    def __init__(self, store: Store = None):
        self._store = store

    def post(self, name: str, text: str) -> None:
        """Leave a note, which replaces the earlier one of that name."""
        try:
            if self._store is not None:
                self._store.set(name, text)
        except RuntimeError:
            self._store = None

    def read(self, name: str) -> str | None:
        """Return the note of that name; None where there is none."""
        try:
            if self._store is not None and self._store.check([name]):
                text: bytes = self._store.get(name)
                return text.decode()
        except RuntimeError:
            self._store = None
        return None

    def count(self, name: str, more: int = 1) -> int:
        """Add to the counter of that name; return its new value, or -1 without a store."""
        try:
            if self._store is not None:
                return int(self._store.add(name, more))
        except RuntimeError:
            self._store = None
        return -1
