"""Texts that say in what ranks agree or differ, for error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return numbers of ranks as text, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(runs) > 1 or runs[0][0] != runs[0][1] else ''} {words}"


def by_ranks(texts: Sequence[str], between: str) -> str:
    """Return all ranks' texts as one, ranks of equal texts together: "ranks 0-2: a; rank 3: b".

    `between` stands between ranks and text.
    """
    return "; ".join(
        f"{ranks_in_words(r for r, text in enumerate(texts) if text == said)}{between}{said}"
        for said in dict.fromkeys(texts)
    )


def errors_in_words(met: Sequence[str | None]) -> str:
    """Return the last error of each rank as a sentence; "" where all have met the same, or none."""
    if len(set(met)) < 2:
        return ""  # the ranks have caught it together
    return f"Errors differ. {by_ranks([error or 'no error' for error in met], ': ')}."


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each value that differs: "x is 1 on rank 0 and 2 on rank 1".

    `everyone` has the values of each rank by name; a name that a rank lacks is "missing" there.
    """
    found = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name, "missing") for theirs in everyone]
        if all(value == values[0] for value in values):
            continue
        distinct = [value for i, value in enumerate(values) if value not in values[:i]]
        where = (
            f"{one} on {ranks_in_words(r for r, value in enumerate(values) if value == one)}"
            for one in distinct
        )
        found.append(f"{name} is {' and '.join(where)}")
    return found
