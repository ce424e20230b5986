"""The calls of parallelized modules that are now running, innermost first."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import FrameType
from weakref import ref

from distconv.tensor.base import DistTensorBase


class ModuleCall:
    """A running call of a parallelized module, and the tensors whose redistributed copies it keeps.

    Attributes
    ----------
    of: the object that began the call, such as the module's guard.
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

        A call that an exception, or torch.export, interrupted is over although `leave` was not
        called.
        """
        try:
            self._frame.clear()
        except RuntimeError:  # it is executing
            return True
        return False

    @property
    def failed(self) -> bool:
        """Return whether an exception that was raised during the call is being handled."""
        return sys.exc_info()[1] is not self._handled

    @property
    def outermost(self) -> bool:
        """Return whether the object `of` has begun no enclosing call."""
        call = self.outer
        while call is not None and call.of is not self.of:
            call = call.outer
        return call is None

    def note(self, x: DistTensorBase) -> None:
        """Remember, weakly, a tensor whose redistributed copies are freed when the call ends."""
        self._holders.append(ref(x))

    def leave(self) -> None:
        """End the call and calls within it, and free redistributed copies of its tensors."""
        _CALLS.set(self.outer)
        for each in self._holders:
            x = each()
            if x is not None:
                x._redistributed.clear()


_CALLS: ContextVar[ModuleCall | None] = ContextVar("distconv_in_module", default=None)
"""The innermost call that has begun and has not been left."""


def enter_call(of: object = None, depth: int = 1) -> ModuleCall:
    """Begin a call of a parallelized module on behalf of `of`.

    The call is over when the function `depth` frames outwards returns, at the latest.
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
