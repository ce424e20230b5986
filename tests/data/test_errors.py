"""An error on one rank is raised on all of them, in the same words."""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

import distconv as dc
from distconv.data.errors import (
    DataError,
    bytes_of_rank_zero,
    check_alike,
    in_step,
    on_rank_zero,
    together,
)
from tests.support.everywhere import WORLD, fails_everywhere

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])
LAST = WORLD.size - 1
OTHERS = {2: "rank 0", 4: "ranks 0-2"}.get(WORLD.size, "")


def named(names: list[str]) -> Generator[tuple[str, int], None, None]:
    yield from ((name, place) for place, name in enumerate(names))


@every_size
def test_an_error_on_one_rank_is_raised_on_all() -> None:
    grid = dc.ProcessGrid(width=-1)

    def only_the_last_fails() -> None:
        if WORLD.rank == LAST:
            raise OSError("disk\non fire")

    fails_everywhere(lambda: together(grid, only_the_last_fails), "^disk on fire$")
    with pytest.raises(DataError) as caught:
        together(grid, only_the_last_fails)
    causes = WORLD.allgather(caught.value.__cause__ is not None)
    assert causes == [rank == LAST for rank in range(WORLD.size)]
    fails_everywhere(lambda: on_rank_zero(grid, lambda: {}["a"]), "^KeyError: 'a'$")
    assert on_rank_zero(grid, lambda: WORLD.rank) == 0


@every_size
def test_ranks_that_agree_go_on() -> None:
    grid = dc.ProcessGrid(width=-1)
    check_alike(grid, {"a": "1"}, "")
    assert list(in_step(grid, named(["a", "b"]))) == [0, 1]


@pytest.mark.parallel([4])
def test_what_differs_is_told_with_the_ranks_that_have_it() -> None:
    facts = {"a": "same", "b": "even" if WORLD.rank != 1 else "odd"}
    if WORLD.rank == 0:
        facts["c"] = "x"
    message = (
        "b is even on ranks 0, 2-3 and odd on rank 1; c is x on rank 0 and missing on ranks 1-3"
    )
    grid = dc.ProcessGrid(width=-1)
    fails_everywhere(lambda: check_alike(grid, facts, "Mend it."), f"{message}. Mend it.")


@several
@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (["a", "b"], f"mini-batch 3 is c on {OTHERS} and missing on rank {LAST}"),
        (["a", "c", "c"], f"mini-batch 2 is b on {OTHERS} and c on rank"),
        (["a", "b", "c", "d"], f"mini-batch 4 is missing on {OTHERS} and d on rank"),
        ([], f"mini-batch 1 is a on {OTHERS} and missing on rank {LAST}"),
    ],
)
def test_other_items_on_one_rank_are_an_error_on_all(mine: list[str], message: str) -> None:
    grid = dc.ProcessGrid(width=-1)
    names = mine if WORLD.rank == LAST else ["a", "b", "c"]
    fails_everywhere(lambda: list(in_step(grid, named(names))), re.escape(message))
    assert list(in_step(grid, named(["a"]))) == [0]


@every_size
def test_an_error_of_all_ranks_at_once_is_an_error() -> None:
    def failing() -> Generator[tuple[str, int], None, None]:
        yield "a", 1
        raise OSError(f"disk {WORLD.rank} on fire")

    grid = dc.ProcessGrid(width=-1)
    fails_everywhere(lambda: list(in_step(grid, failing())), "^disk 0 on fire$")


@every_size
def test_every_rank_gets_the_bytes_of_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distconv.data.errors._PIECE", 10)
    for size in (0, 9, 10, 35):
        content = bytes(range(size)) if WORLD.rank == 0 else b"other"
        assert bytes_of_rank_zero(dc.ProcessGrid(width=-1), content) == bytes(range(size))
