"""Templates for jinja2: the batch script of each scheduler, and the page of a report."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


@cache
def _environment() -> Environment:
    """Return jinja2's environment, in which a line with only a tag produces no line of output."""
    return Environment(
        loader=PackageLoader(__name__, "."),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """Return the text of a template in this folder, with `values` for its variables.

    Values are escaped in templates of HTML, and inserted unchanged in all others.
    """
    return _environment().get_template(template).render(values)
