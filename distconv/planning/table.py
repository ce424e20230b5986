"""Tables of text and numbers, formatted for terminals, Markdown and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Cell: TypeAlias = "str | tuple[str, float]"
"""A cell of a table: its text, or its text and the number by which reports sort."""


def text_of(cell: Cell) -> str:
    """Return the text of a cell, without its number."""
    return cell if isinstance(cell, str) else cell[0]


def numeric(rows: Sequence[Sequence[Cell]]) -> set[int]:
    """Return the indices of the columns in which a cell has a number."""
    return {i for row in rows for i, cell in enumerate(row) if not isinstance(cell, str)}


def filled(rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Return the indices of the columns that have text below their heading."""
    return sorted({i for row in rows[1:] for i, cell in enumerate(row) if text_of(cell)})


def table(rows: Sequence[Sequence[Cell]], right: Sequence[int] = ()) -> str:
    """Return rows as aligned text, headings first, without columns that have a heading only.

    Columns of numbers, and columns with an index in `right`, are aligned to the right.
    """
    ends = numeric(rows).union(right)
    columns = []
    for i in filled(rows):
        column = [text_of(row[i]) for row in rows]
        width = max(map(len, column))
        columns.append([text.rjust(width) if i in ends else text.ljust(width) for text in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def markdown(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows as a table of Markdown, headings first.

    Columns with an index in `right` are aligned to the right.
    """
    ends = ["---:" if i in right else "---" for i in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], ends, *rows[1:]))


def byte_size(count: float) -> str:
    """Return a number of bytes with a unit, such as "1.5 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def milliseconds(seconds: float) -> str:
    """Return seconds in milliseconds, such as "12.5 ms"."""
    return f"{seconds * 1e3:.4g} ms"


def size_cell(count: int) -> Cell:
    """Return a cell that shows a number of bytes with its unit; an empty cell for 0."""
    return (byte_size(count), count) if count else ""


def time_cell(seconds: float) -> Cell:
    """Return a cell that shows seconds in milliseconds without the unit; an empty cell for 0."""
    return (f"{seconds * 1e3:.4g}", seconds) if seconds else ""
