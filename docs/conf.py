"""The site of the documentation, built by Sphinx: `make docs`."""

from __future__ import annotations

import re
from typing import Any

from distconv.tools.version import __version__

project = "distconv"
copyright = "the authors of distconv; Apache License 2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
# Code in docstrings stands between single backticks.
default_role = "code"
add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"distconv {release}"
html_static_path = ["_static"]
html_css_files = ["figures.css"]
html_theme_options = {"navigation_with_keys": True, "footer_icons": []}
# Pages refer to files of the repository, which need no copy of their source beside them.
html_copy_source = False
html_show_sourcelink = False

_PARAMETERS = re.compile(r"(Parameters|Attributes|Returns|Raises)$")
_NAMED = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")


_MARKUP = re.compile(r"(`[^`]*`)(\w?)|([*|\\])|(?<=\w)(_)(?!\w)")
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:benchmarks|CONTRIBUTING)[^)#]*\.md)\)")


def _escaped(found: re.Match[str]) -> str:
    """Return code as it is, apart from a letter that follows it, and other markup escaped."""
    code, letter, *others = found.groups()
    if code is not None:
        return f"{code}\\ {letter}" if letter else code
    return f"\\{others[0] or others[1]}"


def plain_docstrings(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Write a docstring of plain text as reStructuredText.

    `name: text` beneath "Parameters" becomes name and text on two lines, indented lines beneath a
    sentence become code, and asterisks and bars are themselves.
    """
    written: list[str] = []
    within, code, example = False, False, False
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if following.startswith("---"):
            within = _PARAMETERS.match(line) is not None
        example = line.startswith(">>>") or (example and line != "")
        indented = line.startswith("    ") and not example
        if not within and indented and not code and not written[-1:] == [""]:
            written.append("")
        code = not within and (indented or (code and not line))
        if code and line and not any(w.startswith("    ") for w in written[-2:]):
            before = len(written) - 1
            written.insert(before + 1, "::")
            written.insert(before + 2, "")
        named = _NAMED.match(line) if within else None
        if code or example:
            written.append(line)
            continue
        texts = [named[1], f"    {named[2]}"] if named else [line]
        if within and line.startswith("     "):
            texts = [f"    {line.strip()}"]
        written += [_MARKUP.sub(_escaped, text) for text in texts]
    lines[:] = written


_TYPE = re.compile(r"~(?:\w+\.)*(\w+)")
_DEFAULT = re.compile(r"<class '(?:\w+\.)*(\w+)'>|<function [^=]*?>(?=[,)])")


def short_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """Return a signature with types and classes by their own names, and functions as `...`."""
    if not signature:
        return None
    signature = _DEFAULT.sub(lambda found: found[1] or "...", signature)
    return _TYPE.sub(r"\1", signature), _TYPE.sub(r"\1", returned or "")


def files_to_download(app: Any, page: str, source: list[str]) -> None:
    """Let links to pages of the repository that are none of the site download them."""
    source[0] = _ELSEWHERE.sub(r"{download}`\1 <\2>`", source[0])


def setup(app: Any) -> None:
    """Read docstrings before napoleon does, and sources before they are parsed."""
    app.connect("autodoc-process-docstring", plain_docstrings, priority=400)
    app.connect("autodoc-process-signature", short_signature)
    app.connect("source-read", files_to_download)
