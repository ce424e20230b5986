"""Which tensors share memory, and which would in serial torch but do not here."""

from __future__ import annotations

from weakref import WeakSet


class SharedMemory:
    """The memory of some tensors, and the copies of it that serial torch would have made views."""

    __slots__ = ("__weakref__", "_family")

    def __init__(self) -> None:
        self._family: WeakSet[SharedMemory] | None = None
        """The memories in use of which serial torch would have made a single one."""

    def copy(self) -> SharedMemory:
        """Return the memory of a copy that serial torch would have made a view."""
        if self._family is None:
            self._family = WeakSet([self])
        twin = SharedMemory()
        twin._family = self._family
        self._family.add(twin)
        return twin

    @property
    def alone(self) -> bool:
        """Return whether no tensor in use lies elsewhere that serial torch would keep here."""
        return all(memory is self for memory in self._family or ())
