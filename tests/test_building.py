"""The walks of "How it is built" lead through code that is there."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "building.md"


def test_every_function_of_the_walks_is_in_its_file() -> None:
    # A line may end between file and function.
    steps = re.findall(r"`([\w/]+)\.py`,\s+`([\w.]+)`", PAGE.read_text())
    assert len(steps) > 30
    for path, name in steps:
        module = import_module("distconv." + path.replace("/", "."))
        reduce(getattr, name.split("."), module)
