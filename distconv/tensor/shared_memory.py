"""Tensors that share memory, and tensors that share memory in serial torch but not here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, WeakSet, WeakValueDictionary, ref


class SharedMemory:
    """The memory of some tensors, and the copies of it that would be views in serial torch.

    Attributes
    ----------
    newest: whether a write to this copy is on its way to its source.
    of_parameter: whether it is the memory of a sharded parameter, or of a tensor to initialize one.
    """

    newest = False
    of_parameter = False
    _source: SharedMemory | None = None
    """For a copy, the memory that it was copied from."""
    _view: ReferenceType[Any] | None = None
    """For a copy, the tensor that it was made for."""
    _sharing: WeakValueDictionary[int, Any] | None = None
    """For a copy, the other tensors in it, by their identity."""
    _family: WeakSet[SharedMemory] | None = None
    """The memories in use that are, or may be, a single one in serial torch."""

    def fork(self) -> SharedMemory:
        """Return the memory of a result that is a view or a copy in serial torch."""
        if self._family is None:
            self._family = WeakSet([self])
        twin = SharedMemory()
        twin._family, twin.of_parameter = self._family, self.of_parameter
        self._family.add(twin)
        return twin

    def copy(self, view: Any) -> SharedMemory:
        """Return new memory for a view with elements elsewhere; it follows writes to this one."""
        twin = self.fork()
        twin._source, twin._view = self, ref(view)
        return twin

    def note(self, view: Any) -> None:
        """Remember another tensor in this memory, if it is a copy."""
        if self._view is not None:
            if self._sharing is None:
                self._sharing = WeakValueDictionary()
            self._sharing[id(view)] = view

    @property
    def alone(self) -> bool:
        """Return whether no other tensor in use may share this memory in serial torch."""
        origin = self._origin()
        return all(memory._origin() is origin for memory in self._family or ())

    def _origin(self) -> SharedMemory:
        memory = self
        while memory._source is not None:
            memory = memory._source
        return memory

    def views(self) -> list[Any]:
        """Return the tensors in this memory, if it is a copy."""
        first = None if self._view is None else self._view()
        return [*([] if first is None else [first]), *(self._sharing or {}).values()]

    def followers(self) -> Iterator[Any]:
        """Yield the tensors in copies of this memory, and in copies of those, except the newest."""
        for memory in list(self._family or ()):
            source: SharedMemory | None = memory
            while source is not None and source is not self and not source.newest:
                source = source._source
            if source is self and memory is not self:
                yield from memory.views()
