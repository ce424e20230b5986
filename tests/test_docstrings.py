"""Public functions, classes and methods have docstrings, which begin with what they do or are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.floors import is_private, read_sources

ROOT = Path(__file__).parents[1]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

RIDDLES = {"What", "Whose", "That", "Those", "Of"}
"""First words that point at a thing instead of naming it."""

POINTERS = re.compile(
    r"\A\w+ (what|whatever|how|those) |^ *\w+(, \w+)*: (of|what|that|those|which|whose) "
    r"|\b(so many|whoever)\b",
    re.MULTILINE,
)
"""Words that point: after the verb, in place of a parameter's noun, and anywhere."""

NOUN_PHRASES = {"A", "An", "The", "Whether"}
"""First words of noun phrases, which are for classes: functions begin with a verb."""

OF_TORCH = {"forward", "backward", "extra_repr"}
"""Methods that torch's own base classes document."""


def definitions(scope: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    """Yield the functions, classes and methods of a module or class, with their full names."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Definition):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, name)


def of_interfaces(sources: Mapping[str, ast.Module]) -> set[str]:
    """Return the names of all methods that an abstract class or protocol documents."""
    return {
        method.name
        for tree in sources.values()
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        and {ast.unparse(base) for base in owner.bases} & {"ABC", "Protocol"}
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }


def undocumented(sources: Mapping[str, ast.Module]) -> list[str]:
    """Return the public names without a docstring, besides methods that an interface documents."""
    known = of_interfaces(sources) | OF_TORCH
    found = []
    for module, tree in sources.items():
        for name, node in definitions(tree, module):
            decorators = (ast.unparse(d).rpartition(".")[2] for d in node.decorator_list)
            # torch documents a function that a rule implements, but for what the rule adds to it.
            again = not {"setter", "overload"}.isdisjoint(decorators) or implements(node)
            public = not again and not any(map(is_internal, name.split(".")))
            if public and node.name not in known and not ast.get_docstring(node):
                found.append(name)
    return found


def implements(node: Definition) -> bool:
    """Return whether a function is the rule of a function of torch, by its decorator."""
    return any(ast.unparse(d).startswith("implements(") for d in node.decorator_list)


def is_internal(name: str) -> bool:
    """Return whether a name is private, or one of Python's own."""
    return is_private(name) or name.startswith("__")


def riddles(sources: Mapping[str, ast.Module]) -> list[str]:
    """Return the names whose docstrings begin without a verb, or a class's noun, or point."""

    def is_riddle(node: Definition, text: str) -> bool:
        first = text.split()[0].rstrip(",.:;")
        nouns = set() if isinstance(node, ast.ClassDef) else NOUN_PHRASES
        return first in RIDDLES | nouns or POINTERS.search(text) is not None

    return [
        f"{name}: {text.splitlines()[0]}"
        for module, tree in sources.items()
        for name, node in definitions(tree, module)
        if (text := ast.get_docstring(node)) and is_riddle(node, text)
    ]


def borrowed(sources: Mapping[str, ast.Module]) -> list[str]:
    """Return the names whose docstrings explain them by a private name of the package."""
    private = {
        node.name if isinstance(node, Definition) else node.id
        for tree in sources.values()
        for node in ast.walk(tree)
        if isinstance(node, Definition) or isinstance(node, ast.Name)
        if is_private(node.name if isinstance(node, Definition) else node.id)
    }
    return [
        f"{name}: {word}"
        for module, tree in sources.items()
        for name, node in definitions(tree, module)
        for word in re.findall(r"`(?:\w+\.)?(_\w+)`", ast.get_docstring(node) or "")
        if word in private
    ]


BROKEN = re.compile(r"^Raises\n-+\n(?!\w+(?:, \w+)*\n {4}\S)|^[A-Z]\w+Error [A-Z]", re.MULTILINE)
"""A section of errors in which a type does not have a line of its own, above its condition."""


def test_sections_of_errors_list_types_and_conditions() -> None:
    assert [
        name
        for module, tree in read_sources(ROOT).items()
        for name, node in definitions(tree, module)
        if BROKEN.search(ast.get_docstring(node) or "")
    ] == []
    assert BROKEN.search("Raises\n------\nValueError If so.")
    assert not BROKEN.search("Raises\n------\nValueError\n    If so.\nOSError\n    If not.")


def test_docstrings_do_without_private_names() -> None:
    assert borrowed(read_sources(ROOT)) == []


def test_public_names_have_docstrings() -> None:
    assert undocumented(read_sources(ROOT)) == []


def test_docstrings_begin_with_a_verb_or_a_name_and_do_not_point() -> None:
    assert riddles(read_sources(ROOT)) == []


PLANTED = {
    "distconv.planted": ast.parse(
        '''
class Interface(Protocol):
    """An interface."""
    def documented(self): "Return a number."
    def bare(self): ...

class Kind(Base):
    """What is made."""
    def documented(self): ...
    def forward(self): ...
    def _own(self): "The number."
    def __len__(self): ...
    @size.setter
    def size(self, value): ...
    @implements(torch.add)
    def rule(self): ...

class _Private:
    def anything(self): "Return all."
    def nothing(self): ...

def whole(): "A number."
def part(): "Return a part."
def whats(): "Return what is there."
def parameter():
    """Return a sum.

    x, y: of the grid.
    """
def none(): ...
def same():
    """Return a sum as `_Private` and `_FillValue` have it."""
'''
    )
}


def test_planted_faults_are_found() -> None:
    assert borrowed(PLANTED) == ["distconv.planted.same: _Private"]
    missing = ["Interface.bare", "none"]
    assert undocumented(PLANTED) == [f"distconv.planted.{name}" for name in missing]
    assert riddles(PLANTED) == [
        "distconv.planted.Kind: What is made.",
        "distconv.planted.Kind._own: The number.",
        "distconv.planted.whole: A number.",
        "distconv.planted.whats: Return what is there.",
        "distconv.planted.parameter: Return a sum.",
    ]
