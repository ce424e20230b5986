"""The active call of a parallelized module, if there is one."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import FrameType
from weakref import ref

from distconv.tensor.base import DistTensorBase


class ModuleCall:
    """A call of a parallelized module, with the tensors redistributed in it.

    Attributes
    ----------
    of: the object that made the call.
    outer: the call that was active when this one began, or None.
    """

    def __init__(self, of: object, frame: FrameType, outer: ModuleCall | None) -> None:
        self.of, self.outer = of, outer
        self._frame = frame
        self._handled = sys.exc_info()[1]
        self._holders: list[ref[DistTensorBase]] = []

    @property
    def under_way(self) -> bool:
        """Return whether the function that began the call is still running.

        A call that was interrupted, or taken apart as by torch.export, is never ended explicitly.
        """
        try:
            self._frame.clear()
        except RuntimeError:  # it is executing
            return True
        return False

    @property
    def failed(self) -> bool:
        """Return whether the exception being handled was raised after the call began."""
        return sys.exc_info()[1] is not self._handled

    @property
    def outermost(self) -> bool:
        """Return whether no enclosing call has the same `of`."""
        call = self.outer
        while call is not None and call.of is not self.of:
            call = call.outer
        return call is None

    def note(self, x: DistTensorBase) -> None:
        """Remember, for as long as it lives, a tensor that keeps redistributed copies."""
        self._holders.append(ref(x))

    def leave(self) -> None:
        """End the call, and those within it.

        Free the redistributed copies of tensors; inputs may live much longer.
        """
        _CALLS.set(self.outer)
        for each in self._holders:
            x = each()
            if x is not None:
                x._redistributed.clear()


_CALLS: ContextVar[ModuleCall | None] = ContextVar("distconv_in_module", default=None)
"""The innermost call that has begun and has not been left."""


def enter_call(of: object = None, depth: int = 1) -> ModuleCall:
    """Begin a call of a parallelized module, which ends with the function `depth` frames outwards.

    Within it, parameters of the module get this rank's part of their gradients.
    """
    call = ModuleCall(of, sys._getframe(depth), innermost_call())
    _CALLS.set(call)
    return call


def innermost_call() -> ModuleCall | None:
    """Return the innermost active call of a parallelized module, or None."""
    call = _CALLS.get()
    while call is not None and not call.under_way:
        call.leave()
        call = call.outer
    return call


def outermost_call() -> ModuleCall | None:
    """Return the outermost active call of a parallelized module, or None."""
    call = innermost_call()
    while call is not None and call.outer is not None:
        call = call.outer
    return call
