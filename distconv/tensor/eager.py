"""Keep torch.compile out of what distconv computes: its compiler cannot follow messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

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
