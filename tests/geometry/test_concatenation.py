"""Plans that bring all ranks' rows to each of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distconv.geometry.requested import concatenation


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.sampled_from([(), (3,), (2, 0)]))
def test_each_rank_has_the_rows_of_all_in_order(lengths: list[int], row: tuple[int, ...]) -> None:
    ranks = [2 * i + 1 for i in range(len(lengths))]
    plans = {rank: concatenation(lengths, ranks, rank, row) for rank in ranks}
    numbers = np.arange(sum(lengths) * int(np.prod(row))).reshape(sum(lengths), *row)
    starts = np.cumsum([0, *lengths])
    blocks = {r: numbers[a : a + n] for r, a, n in zip(ranks, starts, lengths, strict=False)}
    for rank, plan in plans.items():
        assert plan.block_shape == blocks[rank].shape and plan.buffer_shape == numbers.shape
        buffer = np.full(numbers.shape, -1)
        for source, target in plan.own:
            buffer[target] = blocks[rank][source]
        for route in plan.receives:
            (sent,) = [s for s in plans[route.peer].sends if s.peer == rank]
            message = blocks[route.peer][sent.boxes[0]]
            assert route.size == sent.size == message.size > 0
            buffer[route.boxes[0]] = message
        assert (buffer == numbers).all()
        assert len(plan.sends) == sum(
            p is not plan and any(r.peer == rank for r in p.receives) for p in plans.values()
        )
