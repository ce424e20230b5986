"""The receptive field of a network along one dimension, measured by a dry run.

On a grid that partitions this dimension alone, a layer needs a halo where its outputs depend on
neighbouring inputs, and a collective where they depend on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm
from typing import Any, NamedTuple

import torch
from torch import nn

from distconv.comm.ledger import Movement, trace_movements, without_counting
from distconv.geometry.layout import dimension_names, replaced_at
from distconv.model.parallelize import parallelize
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.recorder import ModuleCalls, halo_of_movement
from distconv.planning.recording import Start
from distconv.tensor.base import tensors_in

_PARTS, _BLOCK = 4, 5760
"""The ranks of the dry run, and the extent of a rank's block, a multiple of common strides."""

_LENGTH = _PARTS * _BLOCK

_LARGEST_STRIDE = 512


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive field of a network along one dimension.

    Attributes
    ----------
    reach: an upper bound of the inputs on each side that an output depends on, in elements, rounded
        up to a multiple of `stride`.
    stride: the product of the strides on the way to the coarsest layer. What begins at a multiple
        of it is seen by all layers as in the whole.
    ratio: the number of inputs for each output.
    ratios: the number of inputs for each output of a layer, by the names of all calls in order.
    """

    reach: int
    stride: int
    ratio: Fraction
    ratios: Mapping[str, Fraction]


@dataclass(frozen=True)
class Slab:
    """A part of a volume along one dimension: what is read, and what is kept of its output.

    Attributes
    ----------
    start, stop: the input that is read.
    first, last: the output that is kept, from the first output of the slab on.
    place: where it lies in the whole output.
    """

    start: int
    stop: int
    first: int
    last: int
    place: int


def slabs_of(length: int, outputs: int, field: ReceptiveField, count: int) -> list[Slab]:
    """Return at most `count` slabs whose kept outputs are all `outputs` of an input of `length`."""
    stride, reach, ratio = field.stride, field.reach, field.ratio
    edges = sorted({length * k // count // stride * stride for k in range(count)})
    places = [min(int(edge / ratio), outputs) for edge in edges] + [outputs]
    slabs = []
    for edge, behind, place, end in zip(
        edges, [*edges[1:], length], places[:-1], places[1:], strict=True
    ):
        start, stop = max(0, edge - reach), min(length, behind + reach)
        origin = int(start / ratio)
        if place < end:
            slabs.append(Slab(start, stop, place - origin, end - origin, place))
    return slabs


class _Halo(NamedTuple):
    """A halo of the dry run: its layer, widths before and after, and the extent of the block."""

    layer: str
    before: int
    after: int
    block: int


class _Watch(ModuleCalls, list[Movement]):  # type: ignore[misc]
    """A trace of movements that knows the layer of each, and the extents of the layers' outputs."""

    def __init__(self, module: nn.Module, dim: int, ndim: int) -> None:
        super().__init__(module)
        self.halos: list[_Halo] = []
        self.extents: list[tuple[str, int]] = []
        self._dim, self._ndim = dim, ndim

    @property
    def layer(self) -> str:
        """Return the name and type of the layer that is active."""
        name, module = self.where
        return f"{name} ({type(module).__name__})"

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        for x in tensors_in(output):
            if x.dim() == self._ndim:
                self.extents.append((name, x.shape[self._dim]))

    def started(self, start: Start) -> None:
        """Raise for a collective, which needs the whole dimension: a sum over it, or a gather."""
        if start.collective is not None:
            raise _NeedsAll(self.layer)

    def append(self, movement: Movement) -> None:
        if movement.redistributes and movement.bytes:
            raise _NeedsAll(self.layer)
        if movement.plan.identity or movement.redistributes:
            return
        ndim = len(movement.plan.buffer_shape)
        for name, (before, after) in halo_of_movement(movement).widths.items():
            d = dimension_names(ndim).index(name)
            block = movement.plan.buffer_shape[d] - before - after
            self.halos.append(_Halo(self.layer, before, after, block))


class _NeedsAll(Exception):
    """A layer, named by the message, whose outputs depend on the whole dimension."""


def receptive_field(
    module: nn.Module, shape: Sequence[int], dim: int, dtype: torch.dtype
) -> ReceptiveField:
    """Return the receptive field of a network along dimension `dim` of its input. No communication.

    Parameters
    ----------
    module: the network, in evaluation mode, before `parallelize`.
    shape: the shape of its input (N, C, *spatial); any extent of `dim` will do.
    dtype: the type of the input.

    Raises ValueError, naming the layer, if outputs depend on the whole dimension, as of norms
    without running statistics and of attention, or if the network runs on its own extent only.
    """
    name = dimension_names(len(shape))[dim]
    try:
        small, large = (_watched(module, shape, dim, dtype, n * _LENGTH) for n in (1, 2))
    except _NeedsAll as error:
        raise _refused(str(error), name) from None
    if len(small.extents) != len(large.extents) or len(small.halos) != len(large.halos):
        raise ValueError(f"the network runs other layers on another {name}; {_WAY_OUT}")
    reach, ratios = Fraction(0), [Fraction(1)]
    for halo, again in zip(small.halos, large.halos, strict=True):
        if (halo.before, halo.after) != (again.before, again.after) or not halo.block:
            raise _refused(halo.layer, name)
        ratio = Fraction(_BLOCK, halo.block).limit_denominator(_LARGEST_STRIDE)
        reach += max(halo.before, halo.after) * ratio
        ratios.append(ratio)
    of_layers = {}
    for (layer, extent), (_, longer) in zip(small.extents, large.extents, strict=True):
        if extent == longer:
            raise ValueError(
                f"the network has a layer of {extent} elements along {name} whatever the {name} "
                f"of the input; {_WAY_OUT}"
            )
        ratio = Fraction(_LENGTH, longer - extent).limit_denominator(_LARGEST_STRIDE)
        of_layers[layer] = ratio
        ratios.append(ratio)
    # Without padding the output is smaller, and begins at another place than its blocks.
    reach += abs(small.extents[-1][1] * ratios[-1] - _LENGTH)
    stride = lcm(*(ratio.numerator for ratio in ratios))
    return ReceptiveField(ceil(reach / stride) * stride, stride, ratios[-1], of_layers)


_WAY_OUT = (
    "the volume cannot be processed in slabs. Use more ranks (--grid), or fewer bytes (--autocast "
    "bfloat16)"
)


def _refused(layer: str, dimension: str) -> ValueError:
    return ValueError(
        f"{layer} needs the whole {dimension} at once, so {_WAY_OUT}, or a network without such a "
        "layer, for example with batch norms that use running statistics"
    )


def _watched(
    module: nn.Module, shape: Sequence[int], dim: int, dtype: torch.dtype, length: int
) -> _Watch:
    """Return the movements of a forward pass on an input of this length along `dim`."""
    axis = dimension_names(len(shape))[dim]
    grid = DryRunGrid({axis: _PARTS})
    hollow = without_elements(module, "infer")
    watch = _Watch(hollow, dim, len(shape))
    with grid.all_alike():
        parallelize(hollow, grid)  # type: ignore[arg-type]
    grid.transport.started = watch.started
    x = grid.tensor(replaced_at(tuple(shape), dim, length), dtype=dtype)
    try:
        with torch.no_grad(), without_counting(), trace_movements(watch), torch.device("meta"):
            hollow(x)
    except _NeedsAll:
        raise
    except Exception as error:
        raise ValueError(
            f"{watch.layer} raised {type(error).__name__} on a longer {axis}: {error}; {_WAY_OUT}"
        ) from error
    finally:
        watch.remove()
    return watch
