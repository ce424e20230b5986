"""Words that the documentation does not use, with the field's words for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

BANNED = {
    r"cuts?|cutting|uncut": "partition, partitioned, shard",
    r"(?:its|own|rank's|each|every) (?:boxes|box|pieces?|part of it)": "block, shard",
    r"(?:bring|brings|brought|bringing)": "gather, redistribute, fetch, include",
    r"(?:add|adds|added|adding)(?: \w+)? up": "sum, all-reduce",
    r"travel(?:s|ling|led)?": "are sent, are in flight",
    r"settle[sd]?": "reduce, complete",
    r"(?:go|goes|going|went) on|begins? (?:again|anew)|anew": "continue, resume, restart",
    r"is taken|are taken|stays? out|lets? go": "supported, unsupported, raises",
    r"refused?|refuses|refusals?": "raises, unsupported",
    r"(?:is|are|were|be|being) hidden|hides?|hiding": "overlap with computation",
    r"tells?|told|has been told": "returns, prints, shows",
    r"where nobody has chosen": "by default",
    r"so many|as many as|whoever|whichever": "count, n, all who",
    r"hands? out|handed out|hand it": "return",
    r"mended|mends?": "fixed",
    r"it is (?:that|those) of|such as lies?": "name the noun",
    r"(?:test|page|rule) (?:holds?|says) that": "a test checks that",
    r"stands? (?:beneath|beside|there|still)": "is",
    r"would not do|will not do|serves as well": "is too small, also works",
    r"never returns something": "never returns a wrong result",
    r"know nothing of": "independent",
    r"comes? about|came about": "was produced",
    r"what (?:the|a|its|this|it|they|is|are|was|has|ranks|another|nobody|only)": "name the noun",
}
"""Patterns of words, without regard to case, and words to use in their place."""

IN_MESSAGES = BANNED | {
    r"(?<!there )(?:is|are) no(?! longer)": "is not a",
    r"(?:has|have) to": "must",
    r"say(?=$|[;.,)])": "for example",
    r"in place of": "instead of",
    r"alike": "the same on every rank",
    r"lives? on": "is on",
}
"""The same for messages, which are shorter and hold fewer thoughts than pages."""

_CODE = re.compile(
    r"^---\n.*?^---\n|<!--.*?-->|^( *)(```+|~~~+|:::\{toctree)[^\n]*\n.*?^\1\2`* *$"
    r"|^ *>>> [^\n]*(?:\n *\.\.\. [^\n]*)*|`[^`\n]*(?:\n[^`\n]+)?`|\]\([^)]*\)|<[^>\n]*>"
    r"|^\[[^\]]*\]: .*$|https?://\S+",
    re.MULTILINE | re.DOTALL,
)
_QUESTION = re.compile(r"[^.!?|:]*\?")


def prose(text: str) -> str:
    """Return the text of a page without code, comments and addresses, line by line as before."""
    return _CODE.sub(lambda found: "`" + "\n" * found[0].count("\n"), text)


def banned(text: str, words: Mapping[str, str] = BANNED) -> list[str]:
    """Return the banned words of a page's prose, each with its line and the word to use.

    Questions may begin with "what".
    """
    text = prose(text)
    spans = [found.span() for found in _QUESTION.finditer(text)]
    return [
        f"{text.count(chr(10), 0, found.start()) + 1}: {' '.join(found[0].split())!r}; write {say}"
        for pattern, say in words.items()
        for found in re.finditer(rf"\b(?:{pattern})(?!\w)", text, re.IGNORECASE)
        if not (
            found[0].lower().startswith("what")
            and any(start <= found.start() < stop for start, stop in spans)
        )
    ]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string of a program that is not a docstring.

    A value within a string becomes `...`, as code does in a page.
    """
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "`...`" for p in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            waiting += ast.iter_child_nodes(node)
