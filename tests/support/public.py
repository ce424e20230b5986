"""The public names, as the pages of the API list them, and the examples of their docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from tests.support.pages import ROOT

FOLDER = ROOT / "docs/reference/api"

_DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)


def listed() -> Iterator[tuple[str, Any]]:
    """Yield the full names and objects that the pages of the API document, members included."""
    for page in sorted(FOLDER.glob("*.md")):
        for _, name, options in _DIRECTIVE.findall(page.read_text()):
            owner = found(name)
            yield name, owner
            members = re.search(r":members: (.+)", options)
            for member in members[1].split(", ") if members else ():
                yield f"{name}.{member}", getattr(owner, member)


def found(name: str) -> Any:
    """Return the object of a full name, such as "distconv.data.Dataset"."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ValueError(f"{name} is not there")


def docstring(value: Any) -> str:
    """Return the docstring of a class or function, inherited ones included; "" for other values."""
    plain = not isinstance(value, type) and value.__doc__ == type(value).__doc__
    return "" if plain else inspect.getdoc(value) or ""


def examples() -> list[doctest.DocTest]:
    """Return the examples of docstrings, one for each name that has any."""
    parser = doctest.DocTestParser()
    return [
        parser.get_doctest(text, {}, name, None, 0)
        for name, value in listed()
        if ">>>" in (text := docstring(value))
    ]


def shown(example: doctest.DocTest) -> set[str]:
    """Return the names that occur in the code of an example, such as "parallelize"."""
    return set(re.findall(r"\w+", "".join(part.source for part in example.examples)))
