"""The board: notes reach all ranks over the tree, and nobody waits for a rank that has stopped."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from distconv.grid import board
from distconv.grid.board import ALARM, LEFT, Board, above, below
from distconv.transport.link import Link, message


@pytest.mark.parametrize("size", [1, 2, 64, 65, 129, 4097, 65_536])
def test_the_tree_reaches_every_rank_once_in_three_steps_with_few_links(size: int) -> None:
    reached = {0: 0}
    most = 0
    for rank in range(size):
        assert rank in reached
        under = [*below(rank, size)]
        most = max(most, len(under))
        for other in under:
            assert above(other) == rank and other not in reached
            reached[other] = reached[rank] + 1
    assert len(reached) == size and max(reached.values()) <= 3 and most <= 141


@contextmanager
def boards(size: int, fanout: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    """Make the boards of ranks that are threads; they are closed at the end."""
    monkeypatch.setattr(board, "_FANOUT", fanout)
    links: list[dict[int, Link]] = [{} for _ in range(size)]
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        links[rank][above(rank)] = Link(above(rank), ours)
        links[above(rank)][rank] = Link(rank, theirs)
    made = [Board(rank, size, links[rank]) for rank in range(size)]
    yield made
    for one in made:
        for link in (*one._links(), one._woken, one._waker):
            link.close()


def in_threads(made: list[Board], act: Callable[[int, Board], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(act, range(len(made)), made))


@pytest.mark.parametrize("fanout", [2, 3, 64])
def test_notes_counters_and_announcements_reach_all_ranks(
    fanout: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 9
    keys = [f"note/{rank}" for rank in range(size)]

    def act(rank: int, one: Board) -> Any:
        one.post(keys[rank], [rank, str(rank)])
        while None in (notes := one.read(keys)):
            one.serve(0.01)
        first = one.add(ALARM) if rank in (4, 8) else None
        while ALARM not in one.announced:
            one.serve(1)
        one.add(LEFT)
        one.close()
        return notes, first, one.announced

    with boards(size, fanout, monkeypatch) as made:
        found = in_threads(made, act)
    assert [notes for notes, _, _ in found] == [[[r, str(r)] for r in range(size)]] * size
    assert sorted(first for _, first, _ in found if first is not None) == [1, 2]
    assert all(announced == {ALARM, LEFT} for _, _, announced in found)


def test_a_rank_does_not_wait_for_one_above_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "_ANSWER", 0.2)
    with boards(3, 64, monkeypatch) as made:  # rank 0 never serves
        made[1].post("note", 1)
        assert made[1].add(ALARM) is None and not made[1].reaches
        assert made[1].read(["note", "other"]) == [None, None]
        made[1].close()


def test_all_ranks_end_after_one_has_lost_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distconv.grid.board._FAREWELL", 0.2)
    with boards(3, 2, monkeypatch) as made:
        # Rank 0 does not answer in time, and rank 1 closes its link.
        monkeypatch.setattr("distconv.grid.board._ANSWER", 0.1)
        assert made[1].read([LEFT]) == [None] and not made[1].reaches
        monkeypatch.setattr("distconv.grid.board._ANSWER", 5.0)

        def end(one: Board) -> None:
            one.add(LEFT)
            one.close()

        threads = [threading.Thread(target=end, args=(one,), daemon=True) for one in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)


def test_ranks_below_one_that_ends_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with boards(4, 2, monkeypatch) as made:  # 3 is below 2
        made[0]._down[2].close()
        made[3].post("note", 1)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(made[3].read, ["note"])
            while not asked.done():
                made[2].serve(0.01)
        assert asked.result() == [None] and not made[2].reaches


@pytest.mark.parametrize(
    "text",
    ["", "{", "1", "[]", '["add"]', '["read", 3, null]', '["add", [], null]', '["read", [[]], 0]'],
)
def test_messages_that_do_not_parse_are_ignored(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with boards(2, 64, monkeypatch) as (root, other):
        other._up.send(message((), torch.tensor(list(text.encode()), dtype=torch.uint8)))
        other._up.send(message((), torch.tensor([255, 0], dtype=torch.uint8)))
        other.post("left", "many")
        other._up.send(
            message((), torch.tensor(list(json.dumps(["add", LEFT, None]).encode())).byte())
        )
        other.post("note", 7)
        until = time.monotonic() + 60
        while root.read(["note"]) != [7]:
            assert time.monotonic() < until
            root.serve(0.1)
        assert not root.announced
