"""Plans of all ranks together, simulated in one process, move exactly what every buffer needs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import is_dataclass
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv import geometry
from distconv.geometry.index_maps import (
    AdaptiveWindow,
    Grouped,
    IndexMap,
    Interval,
    Pad,
    Reversed,
    Rolled,
    Rows,
    Same,
    Strided,
    TransposedWindow,
    Window,
    WrittenSlice,
)
from distconv.geometry.layout import Cuts, block, rank_box, replicating_axes
from distconv.geometry.plan import Plan, elements_moved, make_plan
from distconv.geometry.resampling import Resampled
from distconv.geometry.topology import Topology
from tests.support.geometry import OUTSIDE, cuts_of, needed, topologies


class Movement:
    """One movement of a tensor: its geometry, and the plans of all ranks."""

    def __init__(
        self,
        topology: Topology,
        shape: tuple[int, ...],
        source: Cuts,
        target: Cuts,
        needs: tuple[IndexMap, ...],
    ):
        self.topology, self.shape, self.source = topology, shape, source
        self.target, self.needs = target, needs
        self.plans = [
            make_plan(topology, rank, shape, source, target, needs) for rank in range(topology.size)
        ]

    def __repr__(self) -> str:
        return f"{self.topology} {self.shape} {self.source} -> {self.target} by {self.needs}"

    def blocks(self, whole: np.ndarray) -> list[np.ndarray]:
        """Return the block of every rank of an array of the global shape."""
        return [
            whole[rank_box(self.shape, self.source, self.topology, rank).slices]
            for rank in range(self.topology.size)
        ]

    def gather(self, blocks: list[np.ndarray], fill: int = OUTSIDE) -> list[np.ndarray]:
        """Return the buffers of all ranks, filled by sending and receiving along the plans."""
        posted = {}
        for rank, plan in enumerate(self.plans):
            for route in plan.sends:
                message = [blocks[rank][box].ravel() for box in route.boxes]
                posted[rank, route.peer] = np.concatenate(message)
        buffers = []
        for rank, plan in enumerate(self.plans):
            buffer = np.full(plan.buffer_shape, fill)
            for source, target in plan.own:
                buffer[target] = blocks[rank][source]
            for route in plan.receives:
                message = posted.pop((route.peer, rank))
                assert len(message) == route.size
                for box in route.boxes:
                    place = buffer[box]
                    place[...] = message[: place.size].reshape(place.shape)
                    message = message[place.size :]
                assert not len(message)
            buffers.append(buffer)
        assert not posted, f"sent but not received: {posted}"
        return buffers

    def accumulate(self, buffers: list[np.ndarray]) -> list[np.ndarray]:
        """Return the blocks to which the buffers add up: the adjoint of `gather`."""
        blocks = [np.zeros(plan.block_shape, int) for plan in self.plans]
        for rank, plan in enumerate(self.plans):
            for source, target in plan.own:
                blocks[rank][source] += buffers[rank][target]
            for route in plan.receives:
                (back,) = (r for r in self.plans[route.peer].sends if r.peer == rank)
                for there, here in zip(back.boxes, route.boxes, strict=True):
                    blocks[route.peer][there] += buffers[rank][here]
        return blocks

    def expected_buffer(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """Return the buffer of a rank by definition."""
        return needed(whole, self.topology, rank, self.target, self.needs)


SMALL = st.integers(0, 4)


def _any_window(draw: st.DrawFn, n: int) -> Window:
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (5, 4, 2))
    return Window(kernel, stride, dilation, (draw(SMALL), draw(SMALL)), draw(st.booleans()))


def _any_transposed_window(draw: st.DrawFn, n: int) -> TransposedWindow:
    sizes = [draw(st.integers(1, 4)) for _ in range(3)]
    return TransposedWindow(*sizes, draw(SMALL), draw(st.integers(0, 1)))


def _any_slice(draw: st.DrawFn, n: int) -> Strided:
    first, step = draw(SMALL), draw(st.integers(1, 4))
    return Strided(first, step, len(range(first, n, step)))


def _any_span(draw: st.DrawFn, n: int) -> WrittenSlice:
    return WrittenSlice(offset := draw(SMALL), offset + n + draw(SMALL))


def _any_rows(draw: st.DrawFn, n: int) -> Rows:
    row = draw(st.integers(1, 6))
    return Rows(row, draw(st.sampled_from([m for m in range(1, 40) if n * row % m == 0])))


def _any_padding(draw: st.DrawFn, n: int) -> IndexMap:
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    most = {"constant": 9, "reflect": n - 1, "replicate": 9 if n else 0, "circular": n}[mode]
    before, after = draw(st.integers(-2, max(most, 0))), draw(st.integers(-2, max(most, 0)))
    kept = n + min(before, 0) + min(after, 0)
    fits = kept > 0 and (mode != "circular" or kept >= max(before, after))
    return Pad(before, after, mode) if fits else Same()


def _any_resampling(draw: st.DrawFn, n: int) -> Resampled:
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "linear", "cubic"]))
    scale = draw(st.none() | st.floats(0.25, 4) | st.sampled_from([0.5, 2 / 3, 1.5, 2.0]))
    weighted = not mode.startswith("nearest")
    return Resampled(
        draw(st.integers(1, 2 * n + 1)) if scale is None else max(int(n * scale), 1),
        scale,
        mode,
        align_corners=weighted and draw(st.booleans()),
        antialias=weighted and draw(st.booleans()),
        precision=draw(st.sampled_from(["float32", "float64"])),
    )


MAPS: dict[type, Callable[[st.DrawFn, int], IndexMap]] = {
    Same: lambda draw, n: Same(),
    Window: _any_window,
    TransposedWindow: _any_transposed_window,
    AdaptiveWindow: lambda draw, n: AdaptiveWindow(draw(st.integers(0, 9))),
    Strided: _any_slice,
    WrittenSlice: _any_span,
    Grouped: lambda draw, n: Grouped(
        draw(st.integers(1, 3)), draw(st.sampled_from([m for m in range(1, 5) if n % m == 0]))
    ),
    Rows: _any_rows,
    Pad: _any_padding,
    Reversed: lambda draw, n: Reversed(),
    Rolled: lambda draw, n: Rolled(draw(st.integers(-9, 9))),
    Resampled: _any_resampling,
}
"""Every kind of index map, and how one for n inputs is drawn."""
OF_NO_INPUTS = (Same, Window, Strided, WrittenSlice, Grouped, Rows, Pad, Reversed)


@st.composite
def index_maps(draw: st.DrawFn, n: int, kind: type | None = None) -> IndexMap:
    """Draw any map along a dimension of n inputs whose number of outputs is not negative."""
    kind = kind or draw(st.sampled_from(list(MAPS if n else OF_NO_INPUTS)))
    drawn = MAPS[kind](draw, n)
    return drawn if drawn.output_size(n) >= 0 else Same()


def test_every_index_map_is_drawn() -> None:
    names = [m.name for m in pkgutil.walk_packages(geometry.__path__, "distconv.geometry.")]
    values = [x for name in names for x in vars(importlib.import_module(name)).values()]
    maps = {x for x in values if is_dataclass(x) and hasattr(x, "dependents")}
    assert maps == set(MAPS)


@pytest.mark.parametrize("kind", MAPS)
@settings(max_examples=4 * settings().max_examples)
@given(data=st.data())
def test_what_needs_an_input_meets_its_dependents(kind: type, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    m = data.draw(index_maps(n, kind))
    inputs, outputs = (parts_of(size) for size in (n, m.output_size(n)))
    dependents = {part: m.dependents(n, *part) for part in inputs}
    for first, last in outputs:
        needed = m.intervals(n, first, last)
        for start, stop in inputs:
            if any(a < stop and start < b for a, b in needed):
                assert any(a < last and first < b for a, b in dependents[start, stop])


def parts_of(size: int) -> set[Interval]:
    """Return the parts that have elements when `size` positions are cut into 1 to 5 parts."""
    every = {block(size, parts, part) for parts in range(1, 6) for part in range(parts)}
    return {(start, stop) for start, stop in every if start < stop}


@st.composite
def movements(draw: st.DrawFn, most: int = 12) -> Movement:
    topology = draw(topologies(most))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    return Movement(
        topology,
        shape,
        draw(cuts_of(topology, len(shape))),
        draw(cuts_of(topology, len(shape))),
        tuple(draw(index_maps(n)) for n in shape),
    )


def indices(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array that holds its global index."""
    return np.arange(prod(shape)).reshape(shape)


@given(movements())
def test_every_buffer_is_exactly_what_its_outputs_need(movement: Movement) -> None:
    whole = indices(movement.shape)
    buffers = movement.gather(movement.blocks(whole))
    for rank, buffer in enumerate(buffers):
        np.testing.assert_array_equal(buffer, movement.expected_buffer(whole, rank))


@given(movements())
def test_every_send_has_its_receive_of_the_same_boxes_in_the_same_order(movement: Movement) -> None:
    def extents(boxes: tuple) -> list:
        return [tuple(s.stop - s.start for s in box) for box in boxes]

    sent = {(a, r.peer): r for a, plan in enumerate(movement.plans) for r in plan.sends}
    received = {(r.peer, b): r for b, plan in enumerate(movement.plans) for r in plan.receives}
    assert sent.keys() == received.keys()
    assert len(sent) == sum(len(plan.sends) for plan in movement.plans), "two messages for one"
    assert all(a != b for a, b in sent), "a message to oneself"
    for pair, route in sent.items():
        assert extents(route.boxes) == extents(received[pair].boxes)
        assert route.size == received[pair].size == sum(map(prod, extents(route.boxes))) > 0


@given(movements())
def test_nothing_travels_but_what_the_intervals_reach(movement: Movement) -> None:
    whole = indices(movement.shape)
    for rank, plan in enumerate(movement.plans):
        needed = (movement.expected_buffer(whole, rank) != OUTSIDE).sum()
        own = sum(prod(s.stop - s.start for s in target) for _, target in plan.own)
        assert own + sum(r.size for r in plan.receives) == needed
        assert plan.covered == (needed == prod(plan.buffer_shape))


@given(movements())
def test_the_elements_of_all_routes_are_counted_without_making_them(movement: Movement) -> None:
    m = movement
    for rank, plan in enumerate(m.plans):
        routes = sum(route.size for route in (*plan.sends, *plan.receives))
        assert elements_moved(m.topology, rank, m.shape, m.source, m.target, m.needs) == routes


@given(movements())
def test_a_rank_takes_from_the_replica_that_shares_its_replicating_coordinates(
    movement: Movement,
) -> None:
    topology = movement.topology
    axes = replicating_axes(movement.source, topology)
    for rank, plan in enumerate(movement.plans):
        for route in (*plan.receives, *plan.sends):
            for axis in axes:
                assert topology.coordinate(route.peer, axis) == topology.coordinate(rank, axis)


@given(movements(), st.integers(0, 2**32 - 1))
def test_the_reverse_of_a_plan_is_its_transpose(movement: Movement, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = [rng.integers(-9, 10, plan.block_shape) for plan in movement.plans]
    y = [rng.integers(-9, 10, plan.buffer_shape) for plan in movement.plans]
    forward = sum((a * b).sum() for a, b in zip(movement.gather(x, 0), y, strict=True))
    backward = sum((a * b).sum() for a, b in zip(x, movement.accumulate(y), strict=True))
    assert forward == backward


@given(movements())
def test_the_first_own_box_and_the_box_beside_it_are_the_block(movement: Movement) -> None:
    for plan in movement.plans:
        found = np.zeros(plan.block_shape)
        found[plan.beside_own] = 1
        if plan.own:
            found[plan.own[0][0]] = 1
        assert found.all() or not found.size


def test_a_roll_leaves_its_last_rows_beside_the_own_box() -> None:
    first, second = of_width(2, 8, Rolled(1))
    assert [plan.beside_own for plan in (first, second)] == [(slice(3, 4),)] * 2


@given(movements())
def test_a_plan_knows_when_the_buffer_is_the_block(movement: Movement) -> None:
    blocks = movement.blocks(indices(movement.shape))
    for plan, mine, buffer in zip(movement.plans, blocks, movement.gather(blocks), strict=True):
        assert plan.block_shape == mine.shape
        assert plan.buffer_is_block == np.array_equal(buffer, mine)


@given(movements())
def test_all_ranks_know_alike_when_a_movement_moves_nothing(movement: Movement) -> None:
    (identity,) = {plan.identity for plan in movement.plans}
    if identity:
        assert all(plan.buffer_is_block and not plan.sends for plan in movement.plans)
    still = Movement(
        movement.topology,
        movement.shape,
        movement.source,
        movement.source,
        tuple(Window(1) if i % 2 else Same() for i in range(len(movement.shape))),
    )
    assert all(plan.identity for plan in still.plans)


def of_width(parts: int, size: int, needs: IndexMap) -> list[Plan]:
    cuts = (("width",),)
    return Movement(Topology((1, 1, 1, 1, 1, parts)), (size,), cuts, cuts, (needs,)).plans


def test_a_kernel_wider_than_a_shard_takes_from_several_owners() -> None:
    plan = of_width(8, 16, Window(9, padding=(4, 4)))[4]
    assert [(r.peer, r.size) for r in plan.receives] == [(2, 2), (3, 2), (5, 2), (6, 2)]


@pytest.mark.parametrize(
    ("size", "needs", "still"),
    [
        (16, Window(2, 2), True),
        (16, Window(2, 4), False),
        (12, Window(2, 2), False),
        (24, Window(3, 3), True),
        (16, Window(3, 2, padding=(1, 1)), False),
        (8, TransposedWindow(2, 2), True),
        (3, TransposedWindow(1), True),
        (10, TransposedWindow(2, 2), False),
        (8, TransposedWindow(4, 2, padding=1), False),
    ],
)
def test_windows_that_cover_each_part_move_nothing(size: int, needs: IndexMap, still: bool) -> None:
    assert [plan.identity for plan in of_width(4, size, needs)] == [still] * 4


def test_rows_that_a_stride_skips_beyond_the_last_window_are_not_sent() -> None:
    plans = of_width(4, 16, Strided(0, 8, 2))
    assert [[(r.peer, r.size) for r in plan.receives] for plan in plans] == [[], [(2, 1)], [], []]


def test_an_interval_next_door_needs_no_message_over_an_empty_part() -> None:
    plans = of_width(4, 2, Window(3, padding=(1, 1)))
    assert [[r.peer for r in plan.receives] for plan in plans] == [[1], [0], [], []]
    assert plans[3].buffer_is_block and not plans[3].identity


def test_a_halo_in_three_dimensions_has_26_neighbours_whatever_the_size_of_the_grid() -> None:
    topology = Topology((1, 1, 1, 16, 16, 16))
    cuts = ((), (), ("depth",), ("height",), ("width",))
    needs = (Same(), Same(), *(Window(3, padding=(1, 1)),) * 3)

    def neighbours(*place: int) -> int:
        rank = topology.rank(
            dict.fromkeys(("sample", "channel", "filter"), 0)
            | dict(zip(("depth", "height", "width"), place, strict=True))
        )
        plan = make_plan(topology, rank, (1, 4, 64, 64, 64), cuts, cuts, needs)
        assert {r.peer for r in plan.sends} == {r.peer for r in plan.receives}
        around = [range(max(i - 1, 0), min(i + 2, 16)) for i in place]
        expected = {(d * 16 + h) * 16 + w for d, h, w in product(*around)} - {rank}
        assert {r.peer for r in plan.receives} == expected
        return len(plan.receives)

    assert neighbours(7, 8, 9) == 26
    assert neighbours(0, 5, 5) == 17
    assert neighbours(15, 0, 15) == 7
