"""Plans of what ranks ask for, simulated in one process, fill the buffer of every rank with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distconv.geometry.layout import Box, cutting_axes, rank_box
from distconv.geometry.plan import Plan
from distconv.geometry.requested import boxes_plan, rows_plan
from distconv.geometry.topology import Topology
from tests.support.geometry import OUTSIDE, cuts_of, topologies


def gathered(plans: Mapping[int, Plan], blocks: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return the buffers of all ranks, filled by sending and receiving along their plans."""
    posted = {
        (rank, route.peer): np.concatenate([blocks[rank][box].ravel() for box in route.boxes])
        for rank, plan in plans.items()
        for route in plan.sends
    }
    buffers = {}
    for rank, plan in plans.items():
        assert blocks[rank].shape == plan.block_shape
        buffer = buffers[rank] = np.full(plan.buffer_shape, OUTSIDE)
        for source, target in plan.own:
            buffer[target] = blocks[rank][source]
        for route in plan.receives:
            (box,) = route.boxes
            buffer[box] = posted.pop((route.peer, rank)).reshape(buffer[box].shape)
    assert not posted, "messages that nobody receives"
    return buffers


@given(st.data(), topologies(12))
def test_each_rank_gets_the_box_for_which_it_asks(data: st.DataObject, topology: Topology) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cuts = data.draw(cuts_of(topology, len(shape)))
    whole = np.arange(np.prod(shape)).reshape(shape)
    ranks = topology.peers(0, cutting_axes(cuts))
    bounds = [
        [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape] for _ in ranks
    ]
    boxes = tuple(Box(*zip(*each, strict=True)) for each in bounds)
    plans = {r: boxes_plan(topology, r, shape, cuts, ranks, boxes) for r in ranks}
    blocks = {r: whole[rank_box(shape, cuts, topology, r).slices] for r in ranks}
    found = gathered(plans, blocks)
    for rank, box in zip(ranks, boxes, strict=True):
        assert np.array_equal(found[rank], whole[box.slices])


@given(st.data(), st.integers(1, 5), st.integers(0, 2))
def test_each_rank_gets_the_rows_that_others_send(data: st.DataObject, n: int, d: int) -> None:
    ranks = data.draw(st.permutations(range(n)))
    counts = [[data.draw(st.integers(0, 3)) for _ in ranks] for _ in ranks]
    row = tuple(data.draw(st.integers(0, 3)) for _ in range(3))
    received = [list(column) for column in zip(*counts, strict=True)]
    plans = {
        rank: rows_plan(counts[i], received[i], ranks, rank, row, d) for i, rank in enumerate(ranks)
    }

    def rows(pairs: list[tuple[int, int, int]]) -> np.ndarray:
        """Return rows of numbers of sender, receiver and message."""
        numbers = [100 * i + 10 * j + k for i, j, m in pairs for k in range(m)]
        lengths = (*row[:d], len(numbers), *row[d + 1 :])
        along = np.array(numbers, dtype=int).reshape(-1, *(1,) * (2 - d))
        return np.broadcast_to(along, lengths)

    blocks = {r: rows([(i, j, counts[i][j]) for j in range(n)]) for i, r in enumerate(ranks)}
    for j, (rank, buffer) in enumerate(gathered(plans, blocks).items()):
        assert np.array_equal(buffer, rows([(i, j, counts[i][j]) for i in range(n)])), rank
