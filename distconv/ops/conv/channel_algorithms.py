"""The division of channels and filters over ranks, for convolutions and fully connected layers.

One algorithm covers the three of Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN
Training" (SC'19). The channels of the weight are partitioned over some grid axes, and its filters
over other axes. Each rank gathers the inputs of its channels, halos included, and computes the
contribution of these channels to its filters. A reduce-scatter sums the contributions over the
ranks that have the same filters. If only channels are partitioned, only halos of the input are sent
(stationary-x). If only filters are partitioned, no output is reduced (stationary-y). Over several
axes both can be partitioned (stationary-w). A grouped layer whose groups each lie on one rank sends
no channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.geometry.index_maps import Grouped, IndexMap, Interval, Same
from distconv.geometry.layout import Axes, Box, Cuts, cutting_axes, idle_axes, rank_box, replaced_at
from distconv.geometry.plan import Slices, elements_moved
from distconv.geometry.topology import AXES, Topology
from distconv.grid.interface import Grid
from distconv.ops.support.operands import Placement
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.plain_copies import sliced
from distconv.tensor.redistribution import gather_inputs, reduce_scatter
from distconv.torch_private import ShardFunction

ALGORITHMS = ("x", "y", "w", "auto")
_CHOSEN: ContextVar[str] = ContextVar("distconv_parallel", default="auto")


@contextmanager
def parallel(algorithm: str) -> Iterator[None]:
    """Divide the channels and filters of layers that are called within the context by `algorithm`.

    `algorithm` is one of `ALGORITHMS`, the same on all ranks.
    """
    token = _CHOSEN.set(algorithm)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@dataclass(frozen=True)
class Division:
    """The grid axes over which the channels and the filters of a weight are partitioned."""

    channels: Axes = ()
    filters: Axes = ()

    @property
    def output(self) -> Axes:
        """Return the grid axes that partition the output's filters: `filters`, then `channels`.

        The ranks along `channels` compute contributions to the same filters. The reduce-scatter
        leaves each of these ranks a part of the filters.
        """
        return (*self.filters, *self.channels)

    @property
    def algorithm(self) -> str:
        """Return the operand that is not redistributed: "x" (input), "y" (output), "w" (weight).

        Return "" if neither channels nor filters are partitioned.
        """
        if self.channels and self.filters:
            return "w"
        return "x" if self.channels else "y" if self.filters else ""


@dataclass(frozen=True)
class _WeightBlock:
    """How a rank gets its block of a weight or bias.

    A DistTensor is gathered by `needs` and `cuts`; a plain tensor is indexed by `slices`.
    """

    needs: tuple[IndexMap, ...]
    """For each dimension the map from indices of the block to the elements to gather."""
    cuts: Cuts
    """For each dimension the grid axes that partition the gathered weight or bias."""
    slices: Slices | None
    """The block's index in the plain tensor; None if the block is the complete tensor."""

    def of(self, operand: Tensor, operator: str) -> Tensor:
        """Return this rank's block of `operand`, a weight or bias. Collective for a DistTensor.

        `operator` is the layer's name, under which communication is recorded.
        """
        if isinstance(operand, DistTensor):
            return gather_inputs(operand, self.needs, self.cuts, operator)
        return operand if self.slices is None else sliced(operand, self.slices)


@dataclass(frozen=True)
class LocalLayer:
    """One rank's share of a layer: inputs to gather, the local operator, and outputs.

    Attributes
    ----------
    operator: the layer's name and algorithm, under which communication is recorded.
    cuts, needs: for each dimension of the gathered input the grid axes that partition it, and the
        index map from outputs to the inputs that they need.
    stays: whether every rank has channels and filters, and receives no inputs except halos; the
        same on all ranks.
    blocks: the number of blocks into which the weight is partitioned.
    box: the global indices of the outputs that the local operator computes, with all filters of
        each group.
    groups: the argument `groups` of the local operator.
    """

    operator: str
    cuts: Cuts
    needs: tuple[IndexMap, ...]
    stays: bool
    blocks: int
    box: Box
    groups: int
    _summed: bool
    """Whether results must be summed over ranks that have other channels."""
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
        """Return this rank's weight, the bias for the local operator, and the bias for `output`.

        This rank's block of the bias is the third result if outputs are summed over ranks, as
        `output` must add the bias after the sum; otherwise it is the second. The other result is
        None, and both are None if `bias` is None. Collective.
        """
        own = self._weight.of(weight, self.operator)
        if bias is None:
            return own, None, None
        bias = self._bias.of(bias, self.operator)
        return (own, None, bias) if self._summed else (own, bias, None)

    def alone(self, x: Placement) -> tuple[tuple[int, ...], tuple[int, ...], Cuts]:
        """Return shape of input, shape of output and cuts of input for this rank's channels alone.

        The shapes are global, except that they have only this rank's channels and filters. The cuts
        (the grid axes that partition each dimension) leave channels unpartitioned. If `stays`,
        halos are exchanged only between ranks with the same channels, so the plan of the exchange
        can be made from the results.
        """
        d = self._dimension
        own = rank_box(x.shape, x.cuts, x.topology, x.rank).shape
        return (
            replaced_at(x.shape, d, own[d]),
            replaced_at(self._shape, d, self.box.shape[d]),
            replaced_at(x.cuts, d, ()),
        )

    def empty_result(self, buffer: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the local result for a weight without elements, which torch does not support.

        The result is zero plus the bias, in the type that autocast chooses for the operator. In the
        autograd graph the result depends on all operands.
        """
        zero = buffer[:0].reshape(1, 0) @ weight[:0].reshape(0, 1)
        saved: Tensor = _Zero.apply(buffer, weight, bias)
        block = (zero.squeeze() + saved.to(zero.dtype)).expand(self.box.shape)
        return block if bias is None else block + self._along(bias, block)

    def output(self, block: Tensor, bias: Tensor | None, grid: Grid) -> DistTensor:
        """Return the layer's output: the reduce-scatter of the ranks' `block`s, plus `bias`.

        `bias` is None if the local operator has already added the bias. Collective.
        """
        shape, made, operator = self._shape, self._made, self.operator
        y = block
        if self._computed != made:
            y = reduce_scatter(block, shape, self._computed, made, grid, operator)
        if bias is not None:
            y.add_(self._along(bias, y))
        if self._kept is not None:
            y = y[(*(slice(None),) * self._dimension, self._kept)]
        return DistTensor(y, shape, made, grid)

    def _along(self, bias: Tensor, block: Tensor) -> Tensor:
        """Return a view of `bias`, of shape (filters,), that broadcasts to the output `block`."""
        return bias.view(-1, *(1,) * (block.dim() - 1 - self._dimension))


class _Zero(ShardFunction):
    """An autograd function that returns 0 and saves `buffer` and `weight`, as a convolution does.

    Ranks without elements apply this function instead of the convolution. torch.utils.checkpoint
    recomputes activations when backward reads a saved tensor. As every rank saves the same tensors,
    either all ranks recompute, or none.
    """

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(buffer, weight)
        return buffer.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # makes a checkpoint recompute activations
        if not torch.is_grad_enabled():
            return None, None, None
        # A second backward pass reaches the operands from each gradient, as for a convolution.
        zero = sum(t.reshape(-1)[:0].sum() for t in saved)
        return *(zero.to(t.dtype).expand(t.shape) for t in saved), None


class WeightMeta(NamedTuple):
    """The metadata of a layer's weight and bias: global shapes, `cuts` of the weight, and types.

    `cuts` has for each dimension of the weight the grid axes that partition it. `bias` is the shape
    of the bias, or None.
    """

    shape: tuple[int, ...]
    cuts: Cuts
    bias: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> WeightMeta:
        """Return the metadata of a layer's weight and bias, DistTensors or plain tensors."""
        shape = tuple(weight.shape)
        cuts = weight.cuts if isinstance(weight, DistTensor) else ((),) * len(shape)
        if bias is None:
            return cls(shape, cuts, None, (weight.dtype,))
        return cls(shape, cuts, tuple(bias.shape), (weight.dtype, bias.dtype))


class LayerCall(NamedTuple):
    """One call of a layer on one rank, from which `local_layer` derives the rank's share.

    Attributes
    ----------
    operator: the layer's name, for records of communication.
    x: the placement of the input.
    outputs: the global shape of the output.
    needs: for each dimension the index map from outputs to inputs; `Same` for the channels.
    algorithm: one of `ALGORITHMS`, as `parallel` has set it.
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

    def weight_axes(self, dim: int) -> Axes:
        """Return the grid axes that partition dimension `dim` of the weight.

        Axes that partition samples or space of `x` are left out.
        """
        taken = cutting_axes(replaced_at(self.x.cuts, self.dimension, ()))
        return tuple(a for a in self.weights.cuts[dim] if a not in taken)

    def block(self, shape: tuple[int, ...], cuts: Cuts) -> _WeightBlock:
        """Return the indices by which this rank gets its block of a weight or bias of `shape`.

        `shape` is the global shape, `cuts` has for each dimension the grid axes that partition it.
        """
        box = rank_box(shape, cuts, self.x.topology, self.x.rank)
        return _WeightBlock(
            (Same(),) * len(shape), cuts, box.slices if cutting_axes(cuts) else None
        )


algorithm: Callable[[], str] = _CHOSEN.get
"""Return the algorithm that the context `parallel` has set; "auto" outside of such a context."""


@lru_cache(maxsize=4096)
def local_layer(layer: LayerCall) -> LocalLayer:
    """Return one rank's share of the call `layer`. No communication.

    Channels and filters are divided over the grid axes that partition the weight, if it is
    distributed. The algorithm set by `parallel` decides for the remaining axes, which partition
    the channels of the input but not the weight.
    """
    if layer.groups > 1:
        return _grouped_local_layer(layer)
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
    return LocalLayer(
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


def _grouped_local_layer(layer: LayerCall) -> LocalLayer:
    """Return one rank's share of a grouped layer: its filters, and the channels of their groups.

    If a group is partitioned over several ranks, each of these ranks gathers all channels of the
    group, computes all its filters, and keeps only its own filters.
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

    return LocalLayer(
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
    """Return the interval of inputs, [start, stop), that the interval `outputs` needs."""
    start, stop = outputs
    return next(iter(needs.intervals(0, start, stop))) if start < stop else (0, 0)


def _over_groups(layer: LayerCall) -> Axes:
    """Return the grid axes that partition the filters of a grouped layer, and so its groups.

    The result has all axes that partition dimension 0 of the weight or the channels of the input.
    """
    given, cut = layer.weight_axes(0), layer.x.cuts[layer.dimension]
    axes = (*given, *(a for a in cut if a not in given))
    return cut if len(axes) == len(cut) else axes


def _division(layer: LayerCall, of_filters: int, of_channels: int) -> Division:
    """Return the grid axes for channels and filters of a layer without groups.

    The result is the same on all ranks. `of_filters` and `of_channels` are the dimensions, 0 or 1,
    of filters and channels in the weight. Of several possible divisions, the one with the least
    communication is returned.
    """
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
        wanted[0] if len(wanted) == 1 else min(wanted, key=lambda d: _volume_of_a_block(layer, d))
    )


def _volume_of_a_block(layer: LayerCall, division: Division) -> int:
    """Return the number of elements that ranks in the middle of the grid receive, in both passes.

    These ranks share one block of samples and space, which has neighbours on all sides. Their
    coordinates differ only along the axes that partition channels or filters.
    """
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
    """Return the number of elements that `rank` receives in both passes of a layer without groups.

    Forward, the rank receives the inputs that it gathers, and contributions to its outputs.
    Backward, it receives gradients of its own inputs from ranks that gathered them, and gradients
    of the outputs to which it contributed.

    Parameters
    ----------
    inputs, outputs: the global shapes of input and output.
    cuts: for each dimension the grid axes that partition the input.
    needs: for each dimension the index map from outputs to inputs.
    dimension: the dimension of the channels in the input, and of the filters in the output.
    division: the grid axes that partition channels and filters of the weight.
    """
    d, same = dimension, (Same(),) * len(outputs)
    computed, made = replaced_at(cuts, d, division.filters), replaced_at(cuts, d, division.output)
    gathered = replaced_at(cuts, d, division.channels)
    return elements_moved(topology, rank, inputs, cuts, gathered, needs) + elements_moved(
        topology, rank, outputs, made, computed, same
    )
