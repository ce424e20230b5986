"""Which tensors share memory, and which of them would in serial torch but do not here."""

from __future__ import annotations

from weakref import WeakSet


class SharedMemory:
    """What tensors that share memory share, to know which views of them have become copies."""

    __slots__ = ("__weakref__", "_family")

    def __init__(self) -> None:
        self._family: WeakSet[SharedMemory] | None = None
        """The memories in use of which serial torch would have made a single one."""

    def copy(self) -> SharedMemory:
        """The memory of a copy that serial torch would have made a view."""
        if self._family is None:
            self._family = WeakSet([self])
        twin = SharedMemory()
        twin._family = self._family
        self._family.add(twin)
        return twin

    @property
    def alone(self) -> bool:
        """Whether no tensor in use lies elsewhere that would share this memory in serial torch."""
        return all(memory is self for memory in self._family or ())
