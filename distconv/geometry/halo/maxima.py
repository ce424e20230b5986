"""The strips of inputs around a block from which max pooling computes the outputs at its boundary.

A maximum is not a sum over own inputs and halos: outputs whose windows reach beyond the block are
computed once more, from halos and the own inputs next to them. An output at a corner
belongs to the first of its dimensions.

Index arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from distconv.geometry.halo.convolution import outputs_without_halo, own_padding
from distconv.geometry.halo.slabs import (
    CutDimension,
    MessagePart,
    intersection,
    message_parts,
    plan_with_dimensions,
)
from distconv.geometry.index_maps import Interval, Window
from distconv.geometry.layout import Cuts
from distconv.geometry.plan import Plan, Slices
from distconv.geometry.topology import Topology


@dataclass(frozen=True)
class BoundaryStrip:
    """Some outputs, and where the inputs that they need come from."""

    outputs: Slices
    place: Slices
    """Where in the plan's buffer the inputs lie."""
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Where in the plane the inputs begin; before it, where windows do."""
    padding: tuple[int, ...]
    own: tuple[tuple[Slices, Slices], ...]
    """Pairs of a box of the own block, and its place in the strip."""
    halo: tuple[MessagePart, ...]


@dataclass(frozen=True)
class MaximaBoundary:
    """The plan of a rank, how max pooling runs on its block, and the outputs it computes again."""

    plan: Plan
    padding: tuple[int, ...]
    starts: tuple[int, ...]
    strips: tuple[BoundaryStrip, ...]


@lru_cache(maxsize=4096)
def maxima_boundary(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    made: tuple[int, ...],
    cuts: Cuts,
    windows: tuple[Window, ...],
) -> MaximaBoundary:
    """Return the strips of one rank's block, where `needs_halo` is not None.

    Parameters
    ----------
    shape, made: the global shapes of input and output, both cut by `cuts`.
    windows: one for each spatial dimension.
    """
    plan, rows = plan_with_dimensions(topology, rank, shape, made, cuts, windows)
    every = [(0, outputs[1] - outputs[0]) for *_, outputs, _ in rows]
    within = [
        outputs_without_halo(w, n, held, outputs) if c else count
        for (w, n, held, outputs, c), count in zip(rows, every, strict=True)
    ]
    found = []
    for d, ((low, high), (_, count)) in enumerate(zip(within, every, strict=True)):
        for side in ((0, low), (high, count)):
            outputs = [*within[:d], side, *every[d + 1 :]]
            if all(a < b for a, b in outputs):
                found.append(_boundary_strip(plan, rows, outputs))
    return MaximaBoundary(
        plan,
        padding=tuple(
            own_padding(w, held, outputs) if c else w.padding[0] for w, _, held, outputs, c in rows
        ),
        starts=tuple(held[0] for _, _, held, _, _ in rows),
        strips=tuple(found),
    )


def _boundary_strip(plan: Plan, rows: list[CutDimension], outputs: list[Interval]) -> BoundaryStrip:
    inputs, starts = [], []
    for (w, n, _, made, c), (a, b) in zip(rows, outputs, strict=True):
        inputs.append((a * w.stride, (b - 1) * w.stride + w.extent) if c else (0, n))
        starts.append((made[0] + a) * w.stride - w.padding[0] if c else 0)
    own = []
    for source, target in plan.own:
        meeting = intersection(target, inputs, inputs)
        if meeting is not None:
            box, place = meeting
            shifted = (
                slice(s.start + b.start, s.start + b.stop) for s, b in zip(source, box, strict=True)
            )
            own.append((tuple(shifted), place))
    everything = (slice(None), slice(None))
    return BoundaryStrip(
        outputs=(*everything, *(slice(a, b) for a, b in outputs)),
        place=(*everything, *(slice(a, b) for a, b in inputs)),
        shape=(*plan.buffer_shape[:2], *(b - a for a, b in inputs)),
        starts=tuple(starts),
        padding=tuple(0 if c else w.padding[0] for w, _, _, _, c in rows),
        own=tuple(own),
        halo=message_parts(plan, inputs, inputs),
    )
