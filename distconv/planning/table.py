"""Tables of text, and sizes in them."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of equal length as aligned columns; columns in `right` are right-aligned.

    Columns that are empty but for their heading, the first row, are left out.
    """
    columns = [
        (i in right, max(map(len, column)), column)
        for i, column in enumerate(zip(*rows, strict=True))
        if any(column[1:])
    ]
    lines = (
        "  ".join(c[r].rjust(width) if end else c[r].ljust(width) for end, width, c in columns)
        for r in range(len(rows))
    )
    return "\n".join(line.rstrip() for line in lines)


def byte_size(count: int) -> str:
    """Return a number of bytes with its unit, powers of 1024."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.3g} {units[0]}"
