"""The division of a layer's channels and filters over ranks: convolutions and fully connected ones.

The three algorithms of Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN Training"
(SC'19), are cases of one. The weights are cut over some grid axes in channels and over others in
filters. Each rank gathers its channels of the input, together with the halos; computes what they
contribute to its filters; and these sums over channels are reduced and scattered over the ranks
that share the filters. With only channels cut the input stays (stationary-x), with only filters
cut there is nothing to reduce (stationary-y), and over several axes the weights can be cut in both
(stationary-w). Groups of channels that lie on one rank take nothing from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from torch import Tensor

from distconv.layout import Box, Cuts, cutting_axes
from distconv.ops.align import block_of, box_of
from distconv.plan import make_plan
from distconv.tensor import DistTensor, gathered, reduce_scattered
from distconv.topology import AXES, Topology
from distconv.window import Grouped, IndexMap, Interval, Same

Axes = tuple[str, ...]
T = TypeVar("T")

ALGORITHMS = ("x", "y", "w", "auto")
_CHOSEN: ContextVar[str] = ContextVar("distconv_parallel", default="auto")


@contextmanager
def parallel(algorithm: str) -> Iterator[None]:
    """Divide the channels of layers within by one of `ALGORITHMS`. All ranks choose alike."""
    token = _CHOSEN.set(algorithm)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@dataclass(frozen=True)
class Division:
    """The grid axes over which a layer's weights are cut in channels and in filters."""

    channels: Axes = ()
    filters: Axes = ()

    @property
    def output(self) -> Axes:
        """The axes over which the filters of the output are cut.

        Blocks of filters are cut further over the ranks that have contributed to them.
        """
        return (*self.filters, *self.channels)

    @property
    def algorithm(self) -> str:
        """What stays on its rank: x, y or w; empty where nothing is divided."""
        if self.channels and self.filters:
            return "w"
        return "x" if self.channels else "y" if self.filters else ""


@dataclass(frozen=True)
class Part:
    """This rank's part of a layer: what it gathers and computes, and where the result goes.

    Attributes
    ----------
    cuts, needs: how its inputs are gathered.
    stays: whether they are its own, with halos at most, and no rank is without channels or filters;
        the same on all ranks.
    blocks: into how many blocks the weights are cut.
    box: the box of outputs to compute; with all filters of groups of which it has some.
    weight, bias, groups: for the local operator; without bias where the result is not final.
    operator: the name under which movements are recorded.
    """

    cuts: Cuts
    needs: tuple[IndexMap, ...]
    stays: bool
    blocks: int
    box: Box
    weight: Tensor
    bias: Tensor | None
    groups: int
    operator: str
    _finish: Callable[[Tensor], DistTensor]
    _dimension: int

    def nothing(self, buffer: Tensor) -> Tensor:
        """The result without channels or filters, which torch's operators refuse.

        It hangs on all operands in the autograd graph and has the type that autocast gives it.
        """
        zero = buffer[:0].reshape(1, 0) @ self.weight[:0].reshape(0, 1)
        block = zero.squeeze().expand(self.box.shape)
        return block if self.bias is None else block + _along(self._dimension, self.bias, block)

    def alone(self, x: DistTensor, shape: tuple[int, ...]) -> tuple[DistTensor, tuple[int, ...]]:
        """This rank's channels of `x`, if they stay, as a tensor of their own; and its outputs.

        Ranks that share a block of channels compute it as if there were no others.
        """
        d = self._dimension
        own = at(tuple(x.shape), d, x.shard.shape[d])
        block = DistTensor(x.shard, own, at(x.cuts, d, ()), x.grid)
        return block, at(shape, d, self.box.shape[d])

    def finish(self, block: Tensor) -> DistTensor:
        """The layer's output, to which this rank contributes `block`; all ranks call it."""
        return self._finish(block)


def part_of(
    operator: str,
    x: DistTensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: tuple[int, ...],
    needs: Sequence[IndexMap],
    *,
    dimension: int = 1,
    groups: int = 1,
    transposed: bool = False,
) -> Part:
    """This rank's part of a layer that makes of `x` an output of global `shape`; all ranks call it.

    The cuts of a distributed weight say how the layer is divided. Where it is whole, or is not cut
    over all axes that cut the channels of `x`, that is as `parallel` says.

    Parameters
    ----------
    needs: the inputs that outputs need, for every dimension of `x`; `Same` for the channels.
    dimension: that of channels in `x`, and of filters in the output.
    transposed: whether the weight is (channel, filter, *kernel).
    """
    if groups > 1:
        return _part_of_groups(
            operator, x, weight, bias, shape, needs, dimension, groups, transposed
        )
    grid, d = x.grid, dimension
    of_filters, of_channels = (1, 0) if transposed else (0, 1)
    division = _division(x, weight, of_filters, of_channels, shape, tuple(needs), d)
    if division.algorithm:
        operator = f"{operator}, stationary-{division.algorithm}"
    computed, made = (at(x.cuts, d, axes) for axes in (division.filters, division.output))
    cuts = at(((),) * weight.dim(), of_filters, division.filters)
    cuts = at(cuts, of_channels, division.channels)
    weight = block_of(weight, tuple(weight.shape), cuts, grid, operator)
    bias = block_of(bias, (shape[d],), (division.output,), grid, operator)
    rows, columns = map(grid.topology.parts, (division.filters, division.channels))

    def finish(block: Tensor) -> DistTensor:
        y = reduce_scattered(block, shape, computed, made, grid, operator)
        if bias is not None and division.channels:
            y.add_(_along(d, bias, y))
        return DistTensor(y, shape, made, grid)

    return Part(
        cuts=at(x.cuts, d, division.channels),
        needs=tuple(needs),
        stays=x.cuts[d] == division.channels and x.shape[d] >= columns and shape[d] >= rows,
        blocks=rows * columns,
        box=box_of(shape, computed, grid),
        weight=weight,
        bias=None if division.channels else bias,
        groups=1,
        operator=operator,
        _finish=finish,
        _dimension=d,
    )


def _part_of_groups(
    operator: str,
    x: DistTensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: tuple[int, ...],
    needs: Sequence[IndexMap],
    d: int,
    groups: int,
    transposed: bool,
) -> Part:
    """Own filters take the channels of their groups; those of groups on several ranks travel.

    Each of these ranks then computes all filters of the group, and keeps its own.
    """
    grid, axes = x.grid, _over_groups(x, weight, d)
    made = at(x.cuts, d, axes)
    inputs, outputs = x.shape[d] // groups, shape[d] // groups
    blocks = grid.topology.parts(axes)
    aligned = groups % blocks == 0 or inputs == outputs == 1
    together, own = Grouped(outputs, inputs), box_of(shape, made, grid)
    needed = at(tuple(needs), d, Same() if aligned else together)
    filters = own.start[d], own.stop[d]
    same = Grouped(outputs, outputs)
    first, last = same.intervals(shape[d], *filters)[0] if own.shape[d] else filters

    def finish(block: Tensor) -> DistTensor:
        kept = block if aligned else block.narrow(d, filters[0] - first, own.shape[d])
        return DistTensor(kept, shape, made, grid)

    return Part(
        cuts=made,
        needs=needed,
        stays=aligned and x.cuts[d] == axes and groups >= blocks,
        blocks=blocks,
        box=Box(at(own.start, d, first), at(own.stop, d, last)),
        weight=_rows(weight, together if transposed else same, axes, filters, operator),
        bias=None if bias is None else _rows(bias, same, axes, filters, operator),
        groups=(last - first) // outputs,
        operator=operator,
        _finish=finish,
        _dimension=d,
    )


def _rows(weight: Tensor, rows: IndexMap, axes: Axes, filters: Interval, operator: str) -> Tensor:
    """The rows of a weight that this rank's `filters`, of those cut over `axes`, need."""
    if isinstance(weight, DistTensor):
        rest = weight.dim() - 1
        return gathered(weight, (rows, *(Same(),) * rest), (axes, *((),) * rest), operator)
    (start, stop), *_ = (
        rows.intervals(weight.shape[0], *filters) if filters[0] < filters[1] else [(0, 0)]
    )
    return weight[start:stop]


def _along(dimension: int, bias: Tensor, block: Tensor) -> Tensor:
    """A bias as it is broadcast to `block` along this dimension."""
    return bias.view(-1, *(1,) * (block.dim() - 1 - dimension))


def at(values: tuple[T, ...], dimension: int, value: T) -> tuple[T, ...]:
    """`values` with another one for this dimension."""
    return (*values[:dimension], value, *values[dimension + 1 :])


def _weight_axes(x: DistTensor, weight: Tensor, of: int, d: int) -> Axes:
    """The axes that cut the weight along its dimension `of`, and nothing but channels in `x`."""
    taken = cutting_axes(at(x.cuts, d, ()))
    cuts = weight.cuts[of] if isinstance(weight, DistTensor) else ()
    return tuple(a for a in cuts if a not in taken)


def _over_groups(x: DistTensor, weight: Tensor, d: int) -> Axes:
    """The axes over which the filters of a grouped layer are cut, and its groups with them."""
    given = _weight_axes(x, weight, 0, d)
    axes = (*given, *(a for a in x.cuts[d] if a not in given))
    return x.cuts[d] if len(axes) == len(x.cuts[d]) else axes


def _division(
    x: DistTensor,
    weight: Tensor,
    of_filters: int,
    of_channels: int,
    shape: tuple[int, ...],
    needs: tuple[IndexMap, ...],
    d: int,
) -> Division:
    """How a layer without groups is divided; follows from global metadata alone."""
    filters = _weight_axes(x, weight, of_filters, d)
    channels = _weight_axes(x, weight, of_channels, d)
    rest = tuple(a for a in x.cuts[d] if a not in (*filters, *channels))
    if not rest:
        return Division(channels, filters)
    topology, n = x.grid.topology, len(rest)
    choices = {
        "x": [Division((*channels, *rest), filters)],
        "y": [Division(channels, (*filters, *rest))],
        "w": [Division((*channels, *rest[:i]), (*filters, *rest[i:])) for i in range(1, n)],
    }
    idle = idle_axes(cutting_axes(x.cuts), topology)
    if idle and rest == x.cuts[d] and n == 1:
        choices["w"].append(Division(rest, idle))
    wanted = choices.get(_CHOSEN.get()) or [c for some in choices.values() for c in some]
    if len(wanted) == 1:
        return wanted[0]
    geometry = topology, tuple(x.shape), x.cuts, shape, needs, d
    return min(wanted, key=lambda division: _moved(*geometry, division))


def idle_axes(used: Axes, topology: Topology) -> Axes:
    """The axes for channels and filters that cut nothing yet."""
    return tuple(a for a in ("channel", "filter") if a not in used and topology.extent(a) > 1)


@lru_cache(maxsize=4096)
def _moved(
    topology: Topology,
    inputs: tuple[int, ...],
    cuts: Cuts,
    outputs: tuple[int, ...],
    needs: tuple[IndexMap, ...],
    d: int,
    division: Division,
) -> int:
    """`volume` of all ranks that share one place in the batch and in space, in the middle."""
    middle = topology.rank({axis: topology.extent(axis) // 2 for axis in AXES})
    elsewhere = cutting_axes(at(cuts, d, ()))
    among = [a for a in {*cuts[d], "channel", "filter"} if a not in elsewhere]
    return sum(
        volume(topology, rank, inputs, cuts, outputs, needs, d, division)
        for rank in topology.peers(middle, among)
    )


def volume(
    topology: Topology,
    rank: int,
    inputs: tuple[int, ...],
    cuts: Cuts,
    outputs: tuple[int, ...],
    needs: tuple[IndexMap, ...],
    dimension: int,
    division: Division,
) -> int:
    """Elements that `rank` receives in the forward and backward pass of a layer without groups.

    What it gathers it gets forward; what others have gathered of it comes back as gradients. The
    output is scattered by the adjoint of a gathering.

    Parameters
    ----------
    inputs, cuts, outputs: global shapes of input and output, and how the input is cut.
    """
    d, same = dimension, (Same(),) * len(outputs)
    computed, made = at(cuts, d, division.filters), at(cuts, d, division.output)
    plans = (
        make_plan(topology, rank, inputs, cuts, at(cuts, d, division.channels), needs),
        make_plan(topology, rank, outputs, made, computed, same),
    )
    return sum(route.size for plan in plans for route in (*plan.sends, *plan.receives))
