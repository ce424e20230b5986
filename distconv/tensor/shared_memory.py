"""Which DistTensors share memory in serial torch, although here some of them are copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, WeakSet, WeakValueDictionary, ref


class SharedMemory:
    """The memory of a DistTensor and its views, or a copy for a view of elements on other ranks.

    In serial torch the copy and its source are one memory.

    Attributes
    ----------
    newest: whether this copy was written to, and the write has not reached its source yet.
    of_parameter: whether it belongs to a sharded parameter, or to `empty_like` of one.
    leaf: whether a leaf with gradients has this memory, and operators read the leaf through an
        alias. Autograd does not refuse writes to the alias.
    """

    newest = False
    of_parameter = False
    leaf = False
    _source: SharedMemory | None = None
    """For a copy, the memory that it was copied from."""
    _view: ReferenceType[Any] | None = None
    """For a copy, the tensor that it was made for."""
    _sharing: WeakValueDictionary[int, Any] | None = None
    """For a copy, the other tensors in it, by their identity."""
    _family: WeakSet[SharedMemory] | None = None
    """The memories in use that are, or may be, a single one in serial torch."""

    def fork(self) -> SharedMemory:
        """Return memory for a result that, in serial torch, is a view or a copy of this memory."""
        if self._family is None:
            self._family = WeakSet([self])
        twin = SharedMemory()
        twin._family, twin.of_parameter = self._family, self.of_parameter
        self._family.add(twin)
        return twin

    def copy(self, view: Any) -> SharedMemory:
        """Return memory for `view`, whose elements come from other ranks.

        A write to this memory outdates `view`.
        """
        twin = self.fork()
        twin._source, twin._view = self, ref(view)
        return twin

    def note(self, view: Any) -> None:
        """Remember `view` as another tensor in this memory, if this memory is a copy."""
        if self._view is not None:
            if self._sharing is None:
                self._sharing = WeakValueDictionary()
            self._sharing[id(view)] = view

    @property
    def alone(self) -> bool:
        """Return whether no fork of this memory is in use.

        Otherwise it is unknown whether serial torch would change the fork, too, in a write.
        """
        origin = self._origin()
        return all(memory._origin() is origin for memory in self._family or ())

    def _origin(self) -> SharedMemory:
        memory = self
        while memory._source is not None:
            memory = memory._source
        return memory

    def views(self) -> list[Any]:
        """Return the tensors in use that lie in this memory; [] unless it is a copy."""
        first = None if self._view is None else self._view()
        return [*([] if first is None else [first]), *(self._sharing or {}).values()]

    def followers(self) -> Iterator[Any]:
        """Yield the tensors in copies of this memory, which a write to this memory outdates."""
        for memory in list(self._family or ()):
            source: SharedMemory | None = memory
            while source is not None and source is not self and not source.newest:
                source = source._source
            if source is self and memory is not self:
                yield from memory.views()
