"""Parameters of functions of any origin: Python's, pybind11's, Cython's and C's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Parameters: TypeAlias = dict[str, bool]
"""Names of parameters in order, `self` left out, and whether each has a default."""


def overloads(function: Callable[..., Any]) -> list[Parameters]:
    """Return the parameters of each overload of a function, read from its docstring if need be.

    The list is empty if neither the function nor its docstring says them.
    """
    try:
        return [_of_python(inspect.signature(function))]
    except (TypeError, ValueError):
        return list(_of_docstring(function.__name__, function.__doc__ or ""))


def accepts(overload: Parameters, given: Parameters) -> bool:
    """Return whether a call that gives all parameters of `given`, by position, fits an overload."""
    names = list(overload)
    left_out = names[len(given) :]
    return names[: len(given)] == list(given) and all(overload[name] for name in left_out)


def _of_python(signature: inspect.Signature) -> Parameters:
    parameters = (p for p in signature.parameters.values() if p.name != "self")
    return {p.name: p.default is not p.empty for p in parameters}


def _of_docstring(name: str, text: str) -> Iterator[Parameters]:
    for listed in re.findall(rf"^\s*(?:\d+\. )?(?:\w+\.)*{name}\((.*)\)(?: ->.*)?$", text, re.M):
        if listed != "*args, **kwargs":
            declared = (_declared(text) for text in _split(listed))
            yield {name: default for name, default in declared if name != "self"}


def _split(listed: str) -> Iterator[str]:
    """Yield the texts between commas that stand outside of brackets."""
    depth, begin = 0, 0
    for i, character in enumerate(listed):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and not depth:
            yield listed[begin:i]
            begin = i + 1
    if listed[begin:].strip():
        yield listed[begin:]


def _declared(text: str) -> tuple[str, bool]:
    """Return name and presence of a default of `name: type = default` or `type name=default`."""
    declaration, default, _ = text.partition("=")
    return declaration.partition(":")[0].split()[-1], bool(default)
