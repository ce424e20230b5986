"""The division of channels and filters over ranks, for convolutions and fully connected layers.

The three algorithms of Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN Training"
(SC'19), are cases of one. The weights are cut over some grid axes in channels and over others in
filters. Each rank gathers its channels of the input, together with the halos; computes their
contribution to its filters; and these sums over channels are reduced and scattered over the ranks
that share the filters. With only channels cut the input stays (stationary-x), with only filters
cut there is nothing to reduce (stationary-y), and over several axes the weights can be cut in both
(stationary-w). Groups of channels that lie on one rank receive nothing from other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from distconv.comm.shard_function import ShardFunction
from distconv.geometry.index_maps import Grouped, IndexMap, Interval, Same
from distconv.geometry.layout import Axes, Box, Cuts, cutting_axes, idle_axes, rank_box, replaced_at
from distconv.geometry.plan import Slices, elements_moved
from distconv.geometry.topology import AXES, Topology
from distconv.grid.interface import Grid
from distconv.ops.support.operands import Placement
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, reduce_scatter

ALGORITHMS = ("x", "y", "w", "auto")
_CHOSEN: ContextVar[str] = ContextVar("distconv_parallel", default="auto")


@contextmanager
def parallel(algorithm: str) -> Iterator[None]:
    """Divide the channels of layers within the context by one of `ALGORITHMS`, on all ranks."""
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
        """Return the axes over which the filters of the output are cut.

        Blocks of filters are cut further over the ranks that contributed to them.
        """
        return (*self.filters, *self.channels)

    @property
    def algorithm(self) -> str:
        """Return the operand that stays on its rank: "x", "y" or "w"; "" if nothing is divided."""
        if self.channels and self.filters:
            return "w"
        return "x" if self.channels else "y" if self.filters else ""


@dataclass(frozen=True)
class _WeightBlock:
    """A rank's block of a weight or bias: `slices` of a plain tensor, which all ranks hold."""

    needs: tuple[IndexMap, ...]
    cuts: Cuts
    slices: Slices | None
    """The block's index in the plain tensor; None for the whole of it."""

    def of(self, operand: Tensor, operator: str) -> Tensor:
        """Return this rank's block of the operand. All ranks call it; it may gather."""
        if isinstance(operand, DistTensor):
            return gather_inputs(operand, self.needs, self.cuts, operator)
        return operand if self.slices is None else operand[self.slices]


@dataclass(frozen=True)
class LayerPart:
    """A rank's part of a layer: the inputs it gathers, its local operator, and its outputs.

    Attributes
    ----------
    operator: the name under which movements are recorded.
    cuts, needs: the cuts and index maps with which inputs are gathered.
    stays: whether every rank receives halos of inputs at most, and has channels and filters; the
        same on all ranks.
    blocks: the number of blocks of the weights.
    box: the box of outputs to compute, with all filters of every group that it has some of.
    groups: the groups of the local operator.
    """

    operator: str
    cuts: Cuts
    needs: tuple[IndexMap, ...]
    stays: bool
    blocks: int
    box: Box
    groups: int
    _summed: bool
    """Whether results must be summed over ranks that hold other channels."""
    _weight: _WeightBlock
    _bias: _WeightBlock
    _shape: tuple[int, ...]
    _computed: Cuts
    _made: Cuts
    _dimension: int
    _kept: slice | None = None
    """The slice of the computed filters to keep; None for all."""

    def operands(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return this rank's weight, its bias for the local operator, and its bias for `finish`.

        One of the two biases is None. All ranks call it.
        """
        own = self._weight.of(weight, self.operator)
        if bias is None:
            return own, None, None
        bias = self._bias.of(bias, self.operator)
        return (own, None, bias) if self._summed else (own, bias, None)

    def alone(self, x: Placement) -> tuple[tuple[int, ...], tuple[int, ...], Cuts]:
        """Return shapes of input and output with this rank's channels, and cuts without channels.

        Where inputs stay, ranks that share a block of channels compute as if there were no others.
        """
        d = self._dimension
        own = rank_box(x.shape, x.cuts, x.topology, x.rank).shape
        return (
            replaced_at(x.shape, d, own[d]),
            replaced_at(self._shape, d, self.box.shape[d]),
            replaced_at(x.cuts, d, ()),
        )

    def empty_result(self, buffer: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result without channels or filters, which torch's operators refuse.

        It depends on all operands in the autograd graph, and has autocast's type.
        """
        zero = buffer[:0].reshape(1, 0) @ weight[:0].reshape(0, 1)
        saved: Tensor = _Zero.apply(buffer, weight, bias)
        block = (zero.squeeze() + saved.to(zero.dtype)).expand(self.box.shape)
        return block if bias is None else block + self._along(bias, block)

    def finish(self, block: Tensor, bias: Tensor | None, grid: Grid) -> DistTensor:
        """Return the layer's output from the `block` of every rank. All ranks call it.

        A bias is added after the sum over ranks, if there is one.
        """
        shape, made, operator = self._shape, self._made, self.operator
        y = reduce_scatter(block, shape, self._computed, made, grid, operator)
        if bias is not None:
            y.add_(self._along(bias, y))
        if self._kept is not None:
            y = y[(*(slice(None),) * self._dimension, self._kept)]
        return DistTensor(y, shape, made, grid)

    def _along(self, bias: Tensor, block: Tensor) -> Tensor:
        """Return a bias in a shape that broadcasts to `block`."""
        return bias.view(-1, *(1,) * (block.dim() - 1 - self._dimension))


class _Zero(ShardFunction):
    """A zero that saves operands for its gradient, as the operator does on ranks with elements.

    So all ranks recompute the tensors that a checkpoint has dropped, or none.
    """

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(buffer, weight)
        return buffer.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        _ = ctx.saved_tensors  # which makes a checkpoint compute again
        return None, None, None


class WeightMeta(NamedTuple):
    """The global shape and the cuts of a layer's weight, and the shape of its bias."""

    shape: tuple[int, ...]
    cuts: Cuts
    bias: tuple[int, ...] | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> WeightMeta:
        """Return the shapes and cuts of a layer's weight and bias, distributed or whole."""
        cuts = weight.cuts if isinstance(weight, DistTensor) else ((),) * weight.dim()
        return cls(tuple(weight.shape), cuts, None if bias is None else tuple(bias.shape))


class Layer(NamedTuple):
    """The global metadata, the rank and the algorithm by which a layer is divided.

    Attributes
    ----------
    x: the placement of its input.
    outputs: the global shape of its output.
    needs: the inputs that outputs need, for every dimension; `Same` for the channels.
    algorithm: the name that `parallel` has set.
    dimension: the dimension of channels in the input, and of filters in the output.
    transposed: whether the weight is (channel, filter, *kernel).
    """

    operator: str
    x: Placement
    weights: WeightMeta
    outputs: tuple[int, ...]
    needs: tuple[IndexMap, ...]
    algorithm: str
    dimension: int = 1
    groups: int = 1
    transposed: bool = False

    def weight_axes(self, of: int) -> Axes:
        """Return the axes that cut dimension `of` of the weight, but neither samples nor space."""
        taken = cutting_axes(replaced_at(self.x.cuts, self.dimension, ()))
        return tuple(a for a in self.weights.cuts[of] if a not in taken)

    def block(self, shape: tuple[int, ...], cuts: Cuts) -> _WeightBlock:
        """Return the block of a weight or bias of this shape."""
        box = rank_box(shape, cuts, self.x.topology, self.x.rank)
        return _WeightBlock(
            (Same(),) * len(shape), cuts, box.slices if cutting_axes(cuts) else None
        )


def algorithm() -> str:
    """Return the algorithm of `parallel`."""
    return _CHOSEN.get()


@lru_cache(maxsize=4096)
def layer_part(layer: Layer) -> LayerPart:
    """Return a rank's part of a layer.

    The cuts of a distributed weight decide how the layer is divided. Where the weight is whole, or
    not cut over all axes that cut the channels of the input, the algorithm set by `parallel`
    decides.
    """
    if layer.groups > 1:
        return _grouped_layer_part(layer)
    x, d, outputs, operator = layer.x, layer.dimension, layer.outputs, layer.operator
    of_filters, of_channels = (1, 0) if layer.transposed else (0, 1)
    division = _division(layer, of_filters, of_channels)
    if division.algorithm:
        operator = f"{operator}, stationary-{division.algorithm}"
    computed, made = (replaced_at(x.cuts, d, axes) for axes in (division.filters, division.output))
    cuts = replaced_at(((),) * len(layer.weights.shape), of_filters, division.filters)
    cuts = replaced_at(cuts, of_channels, division.channels)
    rows, columns = map(x.topology.parts, (division.filters, division.channels))
    own = x.cuts[d] == division.channels
    return LayerPart(
        operator=operator,
        cuts=replaced_at(x.cuts, d, division.channels),
        needs=layer.needs,
        stays=own and x.shape[d] >= columns and outputs[d] >= rows,
        blocks=rows * columns,
        box=rank_box(outputs, computed, x.topology, x.rank),
        groups=1,
        _summed=bool(division.channels),
        _weight=layer.block(layer.weights.shape, cuts),
        _bias=layer.block((outputs[d],), (division.output,)),
        _shape=outputs,
        _computed=computed,
        _made=made,
        _dimension=d,
    )


def _grouped_layer_part(layer: Layer) -> LayerPart:
    """Return a rank's part of a grouped layer: its own filters, and the channels of their groups.

    The channels of groups on several ranks are sent to all of these. Each computes all filters of
    the group, and keeps its own.
    """
    x, d, axes = layer.x, layer.dimension, _over_groups(layer)
    made = replaced_at(x.cuts, d, axes)
    inputs, outputs = x.shape[d] // layer.groups, layer.outputs[d] // layer.groups
    blocks = x.topology.parts(axes)
    aligned = layer.groups % blocks == 0 or inputs == outputs == 1
    together, same = Grouped(outputs, inputs), Grouped(outputs, outputs)
    own = rank_box(layer.outputs, made, x.topology, x.rank)
    filters = own.start[d], own.stop[d]
    first, last = _interval(same, filters)
    rest = len(layer.weights.shape) - 1

    def rows(needs: IndexMap, others: int) -> _WeightBlock:
        cuts = axes, *((),) * others
        taken = (slice(*_interval(needs, filters)),) if axes else None
        return _WeightBlock((needs, *(Same(),) * others), cuts, taken)

    return LayerPart(
        operator=layer.operator,
        cuts=made,
        needs=replaced_at(layer.needs, d, Same() if aligned else together),
        stays=aligned and x.cuts[d] == axes and layer.groups >= blocks,
        blocks=blocks,
        box=Box(replaced_at(own.start, d, first), replaced_at(own.stop, d, last)),
        groups=(last - first) // outputs,
        _summed=False,
        _weight=rows(together if layer.transposed else same, rest),
        _bias=rows(same, 0),
        _shape=layer.outputs,
        _computed=made,
        _made=made,
        _dimension=d,
        _kept=None if aligned else slice(filters[0] - first, filters[1] - first),
    )


def _interval(needs: IndexMap, outputs: Interval) -> Interval:
    """Return the shortest interval of inputs that an interval of outputs needs."""
    start, stop = outputs
    return next(iter(needs.intervals(0, start, stop))) if start < stop else (0, 0)


def _over_groups(layer: Layer) -> Axes:
    """Return the axes over which the filters of a grouped layer, and so its groups, are cut."""
    given, cut = layer.weight_axes(0), layer.x.cuts[layer.dimension]
    axes = (*given, *(a for a in cut if a not in given))
    return cut if len(axes) == len(cut) else axes


def _division(layer: Layer, of_filters: int, of_channels: int) -> Division:
    """Return the division of a layer without groups; the same on all ranks."""
    filters, channels = layer.weight_axes(of_filters), layer.weight_axes(of_channels)
    topology, cut = layer.x.topology, layer.x.cuts[layer.dimension]
    rest = tuple(a for a in cut if a not in (*filters, *channels))
    if not rest:
        return Division(channels, filters)
    n = len(rest)
    choices = {
        "x": [Division((*channels, *rest), filters)],
        "y": [Division(channels, (*filters, *rest))],
        "w": [Division((*channels, *rest[:i]), (*filters, *rest[i:])) for i in range(1, n)],
    }
    idle = idle_axes(cutting_axes(layer.x.cuts), topology)
    if idle and rest == cut and n == 1:
        choices["w"].append(Division(rest, idle))
    wanted = choices.get(layer.algorithm) or [c for some in choices.values() for c in some]
    return (
        wanted[0]
        if len(wanted) == 1
        else min(wanted, key=lambda d: _communication_in_the_middle(layer, d))
    )


def _communication_in_the_middle(layer: Layer, division: Division) -> int:
    """Return `communication_volume`, summed over the ranks in the middle of sample and space."""
    topology, d = layer.x.topology, layer.dimension
    middle = topology.rank({axis: topology.extent(axis) // 2 for axis in AXES})
    elsewhere = cutting_axes(replaced_at(layer.x.cuts, d, ()))
    among = [a for a in {*layer.x.cuts[d], "channel", "filter"} if a not in elsewhere]
    geometry = layer.x.shape, layer.x.cuts, layer.outputs, layer.needs, d, division
    return sum(
        communication_volume(topology, rank, *geometry) for rank in topology.peers(middle, among)
    )


def communication_volume(
    topology: Topology,
    rank: int,
    inputs: tuple[int, ...],
    cuts: Cuts,
    outputs: tuple[int, ...],
    needs: tuple[IndexMap, ...],
    dimension: int,
    division: Division,
) -> int:
    """Return the elements that `rank` receives in both passes of a layer without groups.

    Forward it receives the inputs it gathers; backward, the gradients of inputs that others
    gathered from it. The output is scattered by the adjoint of a gathering.

    Parameters
    ----------
    inputs, outputs: the global shapes of input and output.
    cuts: the cuts of the input.
    """
    d, same = dimension, (Same(),) * len(outputs)
    computed, made = replaced_at(cuts, d, division.filters), replaced_at(cuts, d, division.output)
    gathered = replaced_at(cuts, d, division.channels)
    return elements_moved(topology, rank, inputs, cuts, gathered, needs) + elements_moved(
        topology, rank, outputs, made, computed, same
    )
