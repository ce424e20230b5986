"""The ranks of a grid on their nodes, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distconv.geometry.topology import AXES, Topology
from distconv.tools.reports.document import COLOURS, section

MOST_NODES = 16
MOST_RANKS = 32
"""Of a node, or of a replica."""


def grid_section(grid: Mapping[str, int], ranks_per_node: int | None) -> str:
    """Return the ranks of a grid on their nodes."""
    topology = Topology(tuple(int(grid.get(axis, 1)) for axis in AXES))
    if topology.size == 1:
        return ""
    note = "A colour for each replica. Letters and numbers are the place of a rank along the axes."
    return section("The grid", _ranks_on_nodes(topology, ranks_per_node), note)


def _ranks_on_nodes(topology: Topology, ranks_per_node: int | None) -> str:
    """Return the ranks of a grid, node by node, with their coordinates; a colour for each replica.

    Where nobody knows how many ranks a node has, the ranks of each sample stand together.
    """
    axes = [axis for axis in AXES if topology.extent(axis) > 1]
    spatial = [axis for axis in axes if axis != "sample"]
    within = ranks_per_node or topology.size // topology.extent("sample")
    name = "node" if ranks_per_node else "replica"
    groups = -(-topology.size // within)
    drawn = []
    for group in range(min(groups, MOST_NODES)):
        ranks = range(group * within, min((group + 1) * within, topology.size))
        shown = ranks[:MOST_RANKS]
        columns = min(len(shown), _columns(topology, spatial))
        cells = []
        for place, rank in enumerate(shown):
            at = topology.coordinates(rank)
            x, y = 62 * (place % columns), 38 * (place // columns)
            short = " ".join(f"{axis[0]}{at[axis]}" for axis in spatial)
            words = ", ".join(f"{axis} {at[axis]}" for axis in axes)
            colour = COLOURS[at["sample"] % (len(COLOURS) - 1)]
            cells.append(
                f'<g><title>rank {rank}: {words}</title><rect x="{x}" y="{y}" width="58" '
                f'height="34" rx="4" fill="{colour}"/><text class="on" x="{x + 29}" y="{y + 15}" '
                f'text-anchor="middle">{rank}</text><text class="on" x="{x + 29}" y="{y + 28}" '
                f'text-anchor="middle">{short}</text></g>'
            )
        width, height = 62 * columns - 4, 38 * -(-len(shown) // columns) - 4
        more = f", {len(ranks) - len(shown)} more ranks" if len(ranks) > len(shown) else ""
        drawn.append(
            f'<figure><svg style="width:{width}px" viewBox="0 0 {width} {height}" role="img">'
            f"{''.join(cells)}</svg><figcaption>{name} {group}{more}</figcaption></figure>"
        )
    rest = f'<p class="quiet">and {groups - MOST_NODES} more</p>' if groups > MOST_NODES else ""
    return f'<div class="nodes">{"".join(drawn)}</div>{rest}'


def _columns(topology: Topology, axes: Sequence[str]) -> int:
    """Return the ranks in a row of a drawing: those along the last axis that is cut."""
    last = topology.extent(axes[-1]) if axes else topology.size
    return last if len(axes) > 1 and last <= 5 else min(4, topology.size)
