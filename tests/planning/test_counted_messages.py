"""Messages of a dry run are told when they start, and when somebody waits for them."""

from __future__ import annotations

import torch

from distconv.planning.counted_messages import CountedMessages
from distconv.planning.dry_run import DryGroup
from distconv.planning.recording import Start


def told() -> tuple[CountedMessages, list[Start], list[int]]:
    """A carrier, with the starts and the waits that it will tell."""
    carrier, starts, waits = CountedMessages(), list[Start](), list[int]()
    carrier.started, carrier.waited = starts.append, waits.append
    return carrier, starts, waits


def test_messages_are_told_with_their_bytes_and_waited_for_once() -> None:
    carrier, starts, waits = told()
    message = torch.empty(6, device="meta")
    request = carrier.exchange([(1, message)], [(2, message), (3, message)], 0)
    assert [(s.collective, s.arriving, s.leaving) for s in starts] == [
        (None, ((1, 24),), ((2, 24), (3, 24)))
    ]
    assert not waits
    request.wait()
    request.wait()
    assert waits == [starts[0].number]


def test_nothing_is_told_where_there_is_nobody_to_talk_to() -> None:
    carrier, starts, waits = told()
    carrier.exchange([], [], 0).wait()
    carrier.all_reduce(torch.empty(6, device="meta"), DryGroup(1, 0, (5,))).wait()
    assert not starts and not waits


def test_what_is_gathered_is_waited_for_at_once() -> None:
    carrier, starts, waits = told()
    gathered = carrier.all_gather(torch.empty(6, device="meta"), DryGroup(3, 1, (2, 5, 8)))
    assert gathered.shape == (3, 6)
    assert (starts[0].collective, starts[0].arriving) == ("all_gather", ((2, 24), (8, 24)))
    assert waits == [starts[0].number]
