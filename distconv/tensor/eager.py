"""Keep torch's compilers, tracers and transforms out of distconv's computations.

These tools cannot follow messages. `torch.compile` breaks its graph at functions of distconv; all
others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from distconv.grid.calls import operator_name
from distconv.tensor.dispatch import SERIAL, refuse
from distconv.tensor.nested import tensors_in
from distconv.torch_private import (
    count_modes,
    innermost_transform,
    make_fx_before_dispatch,
    tracing_mode,
)


class SerialTrace:
    """The trace of the serial program by `compile`, in which hooks of the library stand back."""

    under_way = False


_own_modes = 0
"""The number of active modes below torch's functions that are the library's."""


@contextmanager
def own_mode(mode: AbstractContextManager[object]) -> Iterator[None]:
    """Enter a torch dispatch mode of the library, which `others_look_on` ignores."""
    global _own_modes
    with mode:
        _own_modes += 1
        try:
            yield
        finally:
            _own_modes -= 1


def others_look_on() -> bool:
    """Return whether the program has a torch dispatch mode active, which sees every kernel."""
    return count_modes() > _own_modes


def check_untraced(operator: Callable[..., Any] | str, *arguments: Any) -> None:
    """Raise UnsupportedOperation while a tool traces or transforms the program.

    A traced graph would hold this rank's blocks without the messages. All ranks raise, as all run
    the same program. `operator` and the tensors in `arguments` are named in the error.
    """
    tool = "torch.jit.trace" if torch.jit.is_tracing() else ""
    if innermost_transform() is not None:
        tool = "one of torch.func's transforms"
    if count_modes():
        tool = tracing_mode() or tool
    if make_fx_before_dispatch() is not None:
        tool = "make_fx"
    if tool:
        refuse(
            operator_name(operator),
            f"{tool}, or a tool that uses it, is tracing or transforming the program, and cannot "
            "follow messages between ranks",
            *tensors_in(*arguments),
            way_out=SERIAL,
        )
