"""The call of a parallelized module under way, if there is one."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import FrameType
from weakref import ref

from distconv.tensor.base import DistTensorBase


class ModuleCall:
    """A call of a parallelized module and all within, with the tensors redistributed in it.

    Attributes
    ----------
    of: whose call it is.
    outer: the call within which this one was begun, or None.
    """

    def __init__(self, of: object, frame: FrameType, outer: ModuleCall | None) -> None:
        self.of, self.outer = of, outer
        self._frame = frame
        self._handled = sys.exc_info()[1]
        self._holders: list[ref[DistTensorBase]] = []

    @property
    def under_way(self) -> bool:
        """Return whether the function that has begun the call has not ended yet.

        Who interrupts a call, or takes it apart as torch.export does, leaves it without a word.
        """
        try:
            self._frame.clear()
        except RuntimeError:  # it is executing
            return True
        return False

    @property
    def failed(self) -> bool:
        """Return whether the exception being handled has come up since the call was begun."""
        return sys.exc_info()[1] is not self._handled

    @property
    def outermost(self) -> bool:
        """Return whether the call is within no other call of the same."""
        call = self.outer
        while call is not None and call.of is not self.of:
            call = call.outer
        return call is None

    def note(self, x: DistTensorBase) -> None:
        """Remember, for as long as it lives, a tensor that keeps what was made of it."""
        self._holders.append(ref(x))

    def leave(self) -> None:
        """End the call, and those within it.

        Let go of what tensors keep for the rest of the call; inputs may live much longer.
        """
        _CALLS.set(self.outer)
        for each in self._holders:
            x = each()
            if x is not None:
                x._redistributed.clear()


_CALLS: ContextVar[ModuleCall | None] = ContextVar("distconv_in_module", default=None)
"""The innermost call that has been begun and not been left."""


def enter_call(of: object = None, depth: int = 1) -> ModuleCall:
    """Begin a call of a parallelized module, which ends with the function `depth` calls outwards.

    Parameters of the module get parts of their gradients within.
    """
    call = ModuleCall(of, sys._getframe(depth), innermost_call())
    _CALLS.set(call)
    return call


def innermost_call() -> ModuleCall | None:
    """Return the innermost call of a parallelized module under way, or None."""
    call = _CALLS.get()
    while call is not None and not call.under_way:
        call.leave()
        call = call.outer
    return call


def outermost_call() -> ModuleCall | None:
    """Return the outermost call of a parallelized module under way, or None."""
    call = innermost_call()
    while call is not None and call.outer is not None:
        call = call.outer
    return call
