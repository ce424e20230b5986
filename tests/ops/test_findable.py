"""Whoever looks for a function's rule finds it by searching for the function's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from distconv.tensor.dispatch import RULES

LIBRARY = Path(__file__).parents[2] / "distconv"

PREFIXES = re.compile(r"^(linalg|fft|special)_|^_(foreach|fused)_")
"""Of the names that functions of torch.linalg and other modules give themselves."""

OPERATOR = re.compile(r"^__([ir]?)(\w+?)__$")

INTERNAL = {"_sparse_mm": "mm", "_threshold": "threshold", "log_sigmoid": "logsigmoid"}
"""Names that torch gives functions in private, with those by which people call them."""


def names_of(function: Any) -> set[str]:
    """Return the names of which one has to be found."""
    name = function.__name__
    if name in ("__get__", "__set__"):
        name = function.__self__.__name__
    if operator := OPERATOR.match(name):
        return {"".join(operator.groups()), operator[2]}  # x += y and y + x are made of x + y
    name = INTERNAL.get(name, PREFIXES.sub("", name))
    # Functions in place, and those that copy what is a view, are made of those without the ending.
    return {name, name.rstrip("_"), name.removesuffix("_copy")}


def test_every_rule_is_found_by_the_name_of_its_function() -> None:
    text = "\n".join(path.read_text() for path in LIBRARY.rglob("*.py"))
    words = set(re.findall(r"\w+", text))
    lost = [function for function in RULES if not words & names_of(function)]
    assert not lost, lost
