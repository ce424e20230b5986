"""The numbers of ranks on which the tests of a file run, read from its text."""

from __future__ import annotations

import re

_ARGUMENT = re.compile(r"\bmark\.parallel\((?:list\()?\[?([\w, ]*)")


def rank_numbers(text: str) -> set[int] | None:
    """Return numbers that hold all those of a test file, or None where only importing it tells.

    To import a file takes every rank longer than to read it.
    """
    if "on_any_grid" in text:
        return None
    numbers = {1}
    for argument in set(_ARGUMENT.findall(text)):
        if argument.isidentifier():
            # A name stands for all numbers in the statement that gives it a value.
            value = re.search(rf"^{argument}\b[^=\n]*= (.*?)\n(?![ \])}}])", text, re.M | re.S)
            if value is None:
                return None
            argument = value[1]
        numbers |= {int(number) for number in re.findall(r"\d+", argument)}
    return numbers
