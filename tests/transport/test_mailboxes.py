"""Slots carry what was sent, in whatever order ranks come to work; all of them in one process."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distconv.transport.mailboxes import Mailboxes, initial_semaphores, mailbox_bytes


class Steps:
    """A lane on which nothing happens before somebody takes its steps."""

    def __init__(self) -> None:
        self.left: deque[Callable[[], bool]] = deque()

    def acquire(self, semaphore: int) -> None:
        place = ctypes.c_uint32.from_address(semaphore)

        def step() -> bool:
            before, place.value = place.value, 0
            return bool(before)

        self.left.append(step)

    def release(self, semaphore: int) -> None:
        place = ctypes.c_uint32.from_address(semaphore)

        def step() -> bool:
            assert not place.value, "released twice"
            place.value = 1
            return True

        self.left.append(step)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.left.append(lambda: bool(ctypes.memmove(target, source, nbytes)) or True)


def work_off(lanes: list[Steps], rng: random.Random) -> None:
    """Take all steps, of any rank that can take one."""
    stuck: set[int] = set()
    while any(lane.left for lane in lanes):
        able = [i for i, lane in enumerate(lanes) if lane.left and i not in stuck]
        assert able, "all ranks wait"
        i = rng.choice(able)
        if lanes[i].left[0]():
            lanes[i].left.popleft()
            stuck.clear()
        else:
            stuck.add(i)


class Node:
    """The ranks of a node."""

    def __init__(self, ranks: int, slot: int):
        self.memory = [np.zeros(mailbox_bytes(ranks, slot), np.uint8) for _ in range(ranks)]
        for memory in self.memory:
            head = np.array(initial_semaphores(ranks), np.uint32)
            memory[: head.nbytes] = head.view(np.uint8)
        self.lanes = [Steps() for _ in range(ranks)]
        bases = [memory.ctypes.data for memory in self.memory]
        self.boxes = [Mailboxes(lane, bases, i, slot) for i, lane in enumerate(self.lanes)]


def exchange(
    node: Node, sizes: list[tuple[int, int, int]], seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Start (sender, receiver, bytes) messages on all ranks: what leaves, and where it lands."""
    generator = torch.Generator().manual_seed(seed)
    messages = []
    for sender, receiver, nbytes in sizes:
        value = torch.randint(1, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        messages.append((sender, receiver, value, torch.zeros_like(value)))
    for rank, boxes in enumerate(node.boxes):
        arriving = [(sender, landing) for sender, r, _, landing in messages if r == rank]
        leaving = [(receiver, value) for s, receiver, value, _ in messages if s == rank]
        boxes.exchange(arriving, leaving)
    return [(value, landing) for *_, value, landing in messages]


@pytest.mark.parallel([1])
@given(st.data())
def test_messages_arrive_in_every_order_of_work(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    rank = st.integers(0, ranks - 1)
    message = st.tuples(rank, rank, st.integers(0, 50))
    exchanges = data.draw(st.lists(st.lists(message, max_size=8), min_size=1, max_size=5))
    rng = random.Random(data.draw(st.integers(0, 2**30)))
    node = Node(ranks, slot=16)
    pairs = []
    for i, sizes in enumerate(exchanges):
        pairs += exchange(node, sizes, i)
        if rng.randrange(2):  # else the next exchange starts before this one is done
            work_off(node.lanes, rng)
    work_off(node.lanes, rng)
    for value, landing in pairs:
        assert torch.equal(value, landing)
    # As at the beginning: what was captured can be replayed.
    head = initial_semaphores(ranks)
    for memory in node.memory:
        assert memory[: 4 * len(head)].view(np.uint32).tolist() == head


@pytest.mark.parallel([1])
@pytest.mark.parametrize("times", [1, 3])
def test_what_was_recorded_once_can_be_replayed(times: int) -> None:
    node = Node(2, slot=16)
    # An odd number of pieces: the next exchange begins with the other slot.
    (value, landing), *_ = exchange(node, [(0, 1, 40), (1, 0, 5)], 0)
    recorded = [tuple(lane.left) for lane in node.lanes]
    work_off(node.lanes, random.Random(0))
    for i in range(times):
        value.fill_(i + 1)
        for lane, steps in zip(node.lanes, recorded, strict=True):
            lane.left.extend(steps)
        work_off(node.lanes, random.Random(i))
        assert torch.equal(value, landing)
    (value, landing), *_ = exchange(node, [(0, 1, 40), (1, 0, 5)], 1)
    work_off(node.lanes, random.Random(0))
    assert torch.equal(value, landing)


@pytest.mark.parallel([1])
def test_a_fast_sender_waits_until_its_messages_are_read() -> None:
    node = Node(2, slot=16)
    pairs = [pair for i in range(5) for pair in exchange(node, [(0, 1, 16)], i)]
    sender, receiver = node.lanes
    while sender.left and sender.left[0]():
        sender.left.popleft()
    assert len(sender.left) == 3 * 3  # two of five have left, by two slots
    work_off([sender, receiver], random.Random(0))
    assert all(torch.equal(value, landing) for value, landing in pairs)
