"""No file is passed over on a number of ranks for which it has tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.support.rank_numbers import rank_numbers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("@pytest.mark.parallel([2, 4])\ndef test(): ...\n", {1, 2, 4}),
        ("@pytest.mark.parallel(8)\ndef test(): ...\n", {1, 8}),
        ("RANKS = [2, 3]\nSIZE = 6\n@pytest.mark.parallel(RANKS)\n", {1, 2, 3}),
        ("R = 4\n\n@pytest.mark.parallel([R])\n", {1, 4}),
        ("GRIDS = {\n    2: [],\n    4: [],\n}\nmark.parallel(list(GRIDS))\n", {1, 2, 4}),
        ("G: dict[int, str] = {\n    2: [],\n}\nmark.parallel(list(G))\n", {1, 2}),
        ("def test(): ...\n", {1}),
        ("@on_any_grid(14, [3])\ndef test(): ...\n", None),
        ("from a import RANKS\n@pytest.mark.parallel(RANKS)\n", None),
    ],
)
def test_numbers_are_read_from_marks(text: str, numbers: set[int] | None) -> None:
    assert rank_numbers(text) == numbers


def test_every_number_of_ranks_is_read_that_a_mark_names() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        read = rank_numbers(path.read_text())
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, test in vars(module).items():
            for mark in getattr(test, "pytestmark", ()) if name.startswith("test_") else ():
                if mark.name == "parallel" and read is not None:
                    wanted = mark.args[0]
                    assert read.issuperset(wanted if isinstance(wanted, list) else [wanted]), path
