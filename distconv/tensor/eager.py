"""Keep compilers, tracers and transforms of torch out of what distconv computes.

They cannot follow messages: `torch.compile` breaks its graph there, and all others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import _ops
from torch._C._dynamo import eval_frame

from distconv.grid.whereabouts import operator_name
from distconv.tensor.dispatch import SERIAL, refuse
from distconv.tensor.nested import tensors_in

Called = TypeVar("Called", bound=Callable[..., Any])


def run_eagerly(function: Called) -> Called:
    """Let torch.compile break its graph where `function` is called, and run that as it is.

    The same is true of all that `function` calls. `torch.compiler.disable` does it, too, and would
    import the compiler into every program.
    """
    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "distconv runs eagerly, between the graphs of the rest"
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(marks.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


_TOOLS = {
    torch._C._TorchDispatchModeKey.PROXY: "make_fx",
    torch._C._TorchDispatchModeKey.FAKE: "FakeTensorMode, or torch.export",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "AOTAutograd",
}
"""The tools that put a mode of such a kind beneath torch's functions; users' own modes look on."""

_PROXY = 0
"""The place of make_fx among the modes before dispatch."""

_is_tracing, _count_modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack
_mode_before_dispatch = _ops._mode_stack_state_for_pre_dispatch.get


_own_modes = 0
"""How many modes beneath torch's functions are the library's."""


@contextmanager
def own_mode(mode: AbstractContextManager[object]) -> Iterator[None]:
    """Enter a mode beneath torch's functions that takes whatever kernels are chosen."""
    global _own_modes
    with mode:
        _own_modes += 1
        try:
            yield
        finally:
            _own_modes -= 1


def others_look_on() -> bool:
    """Return whether a mode of the program looks at torch's functions from beneath."""
    return _count_modes() > _own_modes


def maybe_traced() -> bool:
    """Return whether anything looks beneath torch's functions; `check_untraced` then finds out."""
    return (
        _count_modes() != 0
        or _is_tracing()
        or _innermost_transform() is not None
        or _mode_before_dispatch(_PROXY) is not None
    )


def check_untraced(operator: Callable[..., Any] | str, *arguments: Any) -> None:
    """Raise where a tool records or transforms the program, without its messages.

    All ranks run the same program, and so do all or none of them. A graph would hold this rank's
    blocks, and no sum over ranks would be among its gradients.
    """
    tool = "torch.jit.trace" if _is_tracing() else ""
    if _innermost_transform() is not None:
        tool = "one of torch.func's transforms"
    for mode, name in _TOOLS.items() if _count_modes() else ():
        if torch._C._get_dispatch_mode(mode) is not None:
            tool = name
    if _mode_before_dispatch(_PROXY) is not None:
        tool = "make_fx"
    if tool:
        refuse(
            operator_name(operator),
            f"{tool}, or a tool that uses it, is tracing or transforming the program, and cannot "
            "follow messages between ranks",
            *tensors_in(*arguments),
            way_out=SERIAL,
        )
