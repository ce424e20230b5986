"""The code blocks of README and docs, as programs, with the output that stands beneath them.

A block of `python` continues the one before it on its page, unless it is shown as a file, which
starts with no names and may import the files before it. A block of `text` directly beneath it
is what it prints on rank 0: `...` stands for anything, and fractions may differ in their last
digits. HTML comments, which no reader sees, say what else is meant:

    <!-- runs on 1, 2, 4 ranks -->       a new program begins; without a comment, on 2 ranks
    <!-- hidden                          code that the program needs and the page does without
    ...
    -->
    <!-- raises -->                      the next block ends with an error, which is its output
    <!-- not run: why -->                the next block is compiled, and that is all
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_PART = re.compile(
    r"^<!-- (?P<comment>.*?) ?-->|"
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_FRACTION = r"-?\d+\.\d+(?:e[+-]?\d+)?"


@dataclass
class Block:
    """A piece of a program; `printed` is what it has to print, None where the page does not say."""

    line: int
    code: str
    printed: str | None = None
    raises: bool = False
    runs: bool = True
    file: str | None = None
    """The name under which the page shows it."""


@dataclass
class Program:
    """The blocks of a page that are run one after another."""

    page: Path
    ranks: tuple[int, ...] = (2,)
    blocks: list[Block] = field(default_factory=list)

    def __str__(self) -> str:
        line = self.blocks[0].line if self.blocks else 0
        return f"{self.page.relative_to(ROOT)}:{line}"


@dataclass
class Shell:
    """A block of commands: `sh` without their output, `console` with it."""

    page: Path
    line: int
    text: str
    shows_output: bool
    files: dict[str, str]
    """The files that the page shows before it."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return README and the pages of the site."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(page: Path) -> tuple[list[Program], list[Shell]]:
    """Return the programs of a page and its blocks of commands."""
    text = page.read_text()
    programs: list[Program] = []
    shells: list[Shell] = []
    files: dict[str, str] = {}
    last: Block | None = None
    raises, runs, ended = False, True, 0
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        comment, info = part["comment"], (part["info"] or "").strip()
        if comment is not None:
            word, _, rest = comment.partition(" ")
            if word == "runs":
                ranks = tuple(map(int, re.findall(r"\d+", rest)))
                programs.append(Program(page, ranks))
            elif comment.startswith("hidden\n"):
                programs = programs or [Program(page)]
                # The first line of the block is the second of the comment.
                programs[-1].blocks.append(Block(line + 1, comment.partition("\n")[2]))
            raises, runs = raises or comment == "raises", runs and not comment.startswith("not run")
            continue
        options = dict(re.findall(r"^:(\w+): *(.*)\n", part["code"], re.MULTILINE))
        code = re.sub(r"\A(:\w+:.*\n)+\n*", "", part["code"])
        code = re.sub(rf"^{part['indent']}", "", code, flags=re.MULTILINE)
        start = line + 1 + part["code"].count("\n") - code.count("\n")
        if info in ("python", "{code-block} python"):
            programs = programs or [Program(page)]
            last = Block(start, code, None, raises, runs, options.get("caption"))
            programs[-1].blocks.append(last)
            if last.file:
                files[last.file] = code
            raises, runs = False, True
        elif info in ("sh", "console"):
            shells.append(Shell(page, start, code, info == "console" and runs, dict(files)))
            last, runs = None, True
        elif info == "text" and last is not None and not text[ended : part.start()].strip():
            last.printed = code
            last = None
        elif info.startswith(("{tab", "{grid", "{admonition", "{note", "{dropdown")):
            raise ValueError(f"{page}:{line}: write blocks within {info} outside, to be tested")
        ended = part.end()
    return [p for p in programs if p.blocks], shells


def agrees(expected: str, printed: str) -> bool:
    """Return whether `printed` is what a page says, but for rounding and what it leaves out."""
    tokens = re.split(rf"({_FRACTION}|\.\.\.\n?|\s+)", expected.strip())
    pattern, numbers = "", list[str]()
    for token in tokens:
        if re.fullmatch(_FRACTION, token):
            numbers.append(token)
            pattern += f"({_FRACTION}|nan|inf)"
        elif token.startswith("..."):
            pattern += ".*?"
        else:
            # Columns are as wide as their widest number.
            pattern += r"\s+" if token.isspace() else re.escape(token)
    found = re.fullmatch(pattern, printed.strip(), re.DOTALL)
    return found is not None and all(map(_close, numbers, found.groups()))


def _close(expected: str, printed: str) -> bool:
    """Return whether a number agrees but for rounding."""
    a, b = float(expected), float(printed)
    if "e" in expected:
        # What rounding leaves: only its size says something.
        return abs(b) <= 100 * abs(a) + 1e-13
    return abs(a - b) <= 2.1 * 10.0 ** -len(expected.partition(".")[2]) + 1e-7 * abs(a)


def write_files(program: Program) -> None:
    """Write the blocks that the page shows as files into the current folder."""
    for block in program.blocks:
        if block.file:
            Path(block.file).write_text(block.code)


def _no_names() -> dict[str, Any]:
    return {"__name__": "__main__"}


def run(program: Program, first: bool) -> None:
    """Run a program in this process, in the current folder; on rank 0 compare what it prints.

    Parameters
    ----------
    first: whether this is rank 0.
    """
    names = _no_names()
    for block in program.blocks:
        # Tracebacks name page and line.
        compiled = compile("\n" * (block.line - 1) + block.code, str(program.page), "exec")
        if block.file:
            names = _no_names()
        if not block.runs:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compiled, names)
            except Exception as error:
                if not block.raises:
                    raise
                print(f"{type(error).__name__}: {error}")
            else:
                assert not block.raises, f"{program.page}:{block.line} raises nothing"
        if first and block.printed is not None:
            assert agrees(block.printed, printed.getvalue()), (
                f"{program.page}:{block.line} prints\n{printed.getvalue()}"
            )
