"""The call of a parallelized module under way, if there is one."""

from __future__ import annotations

from contextvars import ContextVar, Token
from weakref import ref

from distconv.tensor.base import DistTensorBase


class ModuleCall:
    """A call of a parallelized module and all within, with the tensors redistributed in it."""

    def __init__(self) -> None:
        self._holders: list[ref[DistTensorBase]] = []

    def note(self, x: DistTensorBase) -> None:
        """Remember, for as long as it lives, a tensor that keeps what was made of it."""
        self._holders.append(ref(x))

    def end(self) -> None:
        """Let go of what tensors keep for the rest of the call; inputs may live much longer."""
        for each in self._holders:
            x = each()
            if x is not None:
                x._redistributed.clear()
        self._holders.clear()


CURRENT_CALL: ContextVar[ModuleCall | None] = ContextVar("distconv_in_module", default=None)
"""The present outermost call of a parallelized module, whose parameters get parts of their
gradients; None where no such module is computing."""


def enter_call() -> Token[ModuleCall | None]:
    """Begin a call of a parallelized module, or go deeper within the present one."""
    return CURRENT_CALL.set(CURRENT_CALL.get() or ModuleCall())


def leave_call(entered: Token[ModuleCall | None]) -> None:
    """Leave what `enter_call` has begun, from the innermost outwards."""
    call = CURRENT_CALL.get()
    CURRENT_CALL.reset(entered)
    if call is not None and CURRENT_CALL.get() is None:
        call.end()
