"""The names of the modules that are being called, read from Python's stack of frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

from torch import nn

from distconv.grid.program_lines import outwards
from distconv.torch_private import CODE_OF_MODULE_CALL

_BEHALF: ContextVar[list[nn.Module] | None] = ContextVar("distconv_behalf", default=None)
"""The calls of modules, innermost first, for which deferred work is done now."""


def module_calls() -> list[nn.Module]:
    """Return the modules that are being called, innermost first."""
    return [
        frame.f_locals["self"]
        for frame in outwards(sys._getframe(1))
        if frame.f_code is CODE_OF_MODULE_CALL
    ]


@contextmanager
def on_behalf_of(modules: list[nn.Module]) -> Iterator[None]:
    """Let `module_path` name these modules, innermost first, within the context.

    It is for work of these modules that is done only after their calls.
    """
    token = _BEHALF.set(modules)
    try:
        yield
    finally:
        _BEHALF.reset(token)


def module_path() -> str:
    """Return the name of the module that is being called, as the outermost module names it.

    "" for the outermost module itself, and outside of any call.
    """
    calls = _BEHALF.get()
    calls = module_calls() if calls is None else calls
    names = [_name_within(outer, inner) for inner, outer in pairwise(calls)]
    return ".".join(filter(None, reversed(names)))


def _name_within(outer: nn.Module, inner: nn.Module) -> str:
    """Return the name of `inner` within `outer`; its class name if `outer` does not contain it."""
    for modules in (outer.named_children(), outer.named_modules()):
        for name, part in modules:
            if part is inner:
                return name
    return type(inner).__name__
