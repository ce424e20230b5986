"""Division of volumes into slabs: the receptive field, and norms over the whole volume.

Slabs overlap by the receptive field of the network along one dimension, which is measured by a dry
run. On a grid that partitions this dimension alone, a layer needs a halo if its outputs depend on
neighbouring inputs, and a collective if its outputs depend on all inputs.

Instance and group norms use mean and variance of each sample over the whole volume. For each norm,
in the order of the calls, a pass over the slabs computes these statistics, while earlier norms use
their own statistics. With all statistics, the norms are affine functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, lcm
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.comm.ledger import Movement, trace_movements, without_counting
from distconv.geometry.layout import dimension_names, replaced_at
from distconv.model.parallelize import parallelize
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.recorder import ModuleCalls, halo_of_movement
from distconv.planning.recording import Start
from distconv.tensor.autocast import result_type
from distconv.tensor.base import tensors_in
from distconv.tensor.dist_tensor import DistTensor

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
    stride: the product of the strides up to the coarsest layer, in elements. In a slab that begins
        at a multiple of `stride`, the windows of all layers begin at the same elements as in the
        whole volume.
    ratio: the number of inputs for each output of the network.
    ratios: the number of inputs for each output of a layer, by the names of all calls in order.
    """

    reach: int
    stride: int
    ratio: Fraction
    ratios: Mapping[str, Fraction]


@dataclass(frozen=True)
class Slab:
    """An interval of a volume along one dimension: the input to read, and the output to keep.

    Attributes
    ----------
    start, stop: the interval of the input that is read.
    first, last: the interval that is kept of the slab's output.
    place: the position of the kept output in the output of the whole volume.
    """

    start: int
    stop: int
    first: int
    last: int
    place: int


def slabs_of(length: int, outputs: int, field: ReceptiveField, count: int) -> list[Slab]:
    """Return at most `count` slabs whose kept outputs are all `outputs` of an input of `length`.

    `field` is the receptive field, by which the slabs overlap.
    """
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
    """A halo of the dry run: its layer, its widths before and after, and the block's extent."""

    layer: str
    before: int
    after: int
    block: int


class _HaloTrace(ModuleCalls, list[Movement]):  # type: ignore[misc]
    """A list for `trace_movements` that records layers' halos, and the extents of their outputs."""

    def __init__(self, module: nn.Module, dim: int, ndim: int) -> None:
        super().__init__(module)
        self.halos: list[_Halo] = []
        self.extents: list[tuple[str, int]] = []
        self._dim, self._ndim = dim, ndim

    @property
    def layer(self) -> str:
        """Return the name and type of the active layer, for messages."""
        name, module = self.where
        return f"{name} ({type(module).__name__})"

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        for x in tensors_in(output):
            if x.dim() == self._ndim:
                self.extents.append((name, x.shape[self._dim]))

    def started(self, start: Start) -> None:
        """Raise if a collective starts, as outputs then depend on the whole dimension."""
        if start.collective is not None:
            raise _NeedsWholeDimension(self.layer)

    def append(self, movement: Movement) -> None:
        if movement.redistributes and movement.bytes:
            raise _NeedsWholeDimension(self.layer)
        if movement.plan.identity or movement.redistributes:
            return
        ndim = len(movement.plan.buffer_shape)
        for name, (before, after) in halo_of_movement(movement).widths.items():
            d = dimension_names(ndim).index(name)
            block = movement.plan.buffer_shape[d] - before - after
            self.halos.append(_Halo(self.layer, before, after, block))


class _NeedsWholeDimension(Exception):
    """An error for a layer, named by the message, whose outputs depend on the whole dimension."""


def receptive_field(
    module: nn.Module, shape: Sequence[int], dim: int, dtype: torch.dtype
) -> ReceptiveField:
    """Return the receptive field of a network along dimension `dim` of its input. No communication.

    Parameters
    ----------
    module: the network, in evaluation mode, before `parallelize`.
    shape: the shape of its input (N, C, *spatial); the extent of `dim` does not matter.
    dtype: the type of the input.

    Raises ValueError, naming the layer, if outputs depend on the whole dimension, as with norms
    without running statistics and with attention, or if the network supports only one extent.
    """
    name = dimension_names(len(shape))[dim]
    try:
        small, large = (_watched(module, shape, dim, dtype, n * _LENGTH) for n in (1, 2))
    except _NeedsWholeDimension as error:
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
) -> _HaloTrace:
    """Return halos and output extents of a dry run on an input of extent `length` along `dim`."""
    axis = dimension_names(len(shape))[dim]
    grid = DryRunGrid({axis: _PARTS})
    hollow = without_elements(module, "infer")
    watch = _HaloTrace(hollow, dim, len(shape))
    with grid.all_alike():
        parallelize(hollow, grid)  # type: ignore[arg-type]
    grid.transport.started = watch.started
    x = grid.tensor(replaced_at(tuple(shape), dim, length), dtype=dtype)
    try:
        with torch.no_grad(), without_counting(), trace_movements(watch), torch.device("meta"):
            hollow(x)
    except _NeedsWholeDimension:
        raise
    except Exception as error:
        raise ValueError(
            f"{watch.layer} raised {type(error).__name__} on a longer {axis}: {error}; {_WAY_OUT}"
        ) from error
    finally:
        watch.remove()
    return watch


# Norms over a whole volume.


_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)

_MOST = 64
"""The largest number of norms; each takes a pass of its own over the volume."""

Statistics = list[list[list[float]]]
"""Mean and variance of a norm, each as (samples, channels)."""


class _Observed(Exception):
    """An exception that ends a forward pass at the norm whose statistics are computed."""


class GlobalNorm(nn.Module):
    """An instance or group norm that can use statistics of a whole volume instead of its input's.

    Attributes
    ----------
    norm: the torch module.
    mean, variance: the statistics to use, (samples, channels, 1, ...); None for the input's.
    observe: called with the input, if not None.
    """

    def __init__(self, norm: Any, dims: int) -> None:
        super().__init__()
        self.norm: Any = norm
        self._dims = dims
        self.observe: Callable[[Tensor], None] | None = None
        channels = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
        # In dry runs only the shape counts.
        self.give(torch.zeros(1, channels), torch.ones(1, channels))

    def give(self, mean: Tensor | None, variance: Tensor | None) -> None:
        """Use these statistics, (samples, channels), from now on; None for the input's own."""
        space = (1,) * (self._dims - 2)
        self.mean, self.variance = (
            None if t is None else t.view(*t.shape, *space) for t in (mean, variance)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.observe is not None:
            self.observe(x)
        if self.mean is None or self.variance is None:
            return self.norm(x)  # type: ignore[no-any-return]
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance = (t.to(x.device, dtype) for t in (self.mean, self.variance))
        scale, shift = torch.rsqrt(variance + self.norm.eps), None
        if self.norm.weight is not None:
            own = (1, -1, *(1,) * (x.dim() - 2))
            scale = scale * self.norm.weight.to(dtype).view(own)
            shift = self.norm.bias.to(dtype).view(own)
        y = (x.to(dtype) - mean).mul_(scale)
        return (y if shift is None else y.add_(shift)).to(self._type_of_result(x))

    def _type_of_result(self, x: Tensor) -> torch.dtype:
        """Return the type of the norm's result; autocast has different rules on CPUs and GPUs."""
        own = self.norm.weight, self.norm.bias
        if isinstance(self.norm, nn.GroupNorm):
            return result_type(F.group_norm, x, self.norm.num_groups, *own)
        return result_type(F.instance_norm, x, None, None, *own)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each sample and channel of an input, in float64. Collective.

        Channels of one group have the same mean and variance.
        """
        over = tuple(range(2, x.dim()))
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        found = torch.var_mean(exact, over, correction=0)
        variance, mean = (t.full_tensor().cpu().double() for t in found)  # type: ignore[attr-defined]
        if not isinstance(self.norm, nn.GroupNorm):
            return mean, variance
        groups = mean.shape[0], self.norm.num_groups, -1
        means, variances = mean.view(groups), variance.view(groups)
        between, mean = torch.var_mean(means, 2, correction=0, keepdim=True)
        variance = between + variances.mean(2, keepdim=True)
        return tuple(t.expand_as(means).flatten(1) for t in (mean, variance))  # type: ignore[return-value]


class GlobalNorms:
    """The norms of a network that use statistics of the whole volume.

    Attributes
    ----------
    found: the norms by name, in the order in which the network calls them.
    """

    def __init__(self) -> None:
        self.found: dict[str, GlobalNorm] = {}
        self._field: ReceptiveField | None = None
        self._dim = 0

    def replace_in(self, net: nn.Module, dims: int) -> None:
        """Replace the norms of `net` by `GlobalNorm`s; the input of `net` has `dims` dimensions."""
        for name, part in list(net.named_modules(remove_duplicate=False)):
            # Subclasses may compute other functions.
            if name and type(part) in _NORMS and not getattr(part, "track_running_stats", False):
                known = (own for own in self.found.values() if own.norm is part)
                norm = next(known, None)
                if norm is None:
                    norm = self.found[name] = GlobalNorm(part, dims)
                net.set_submodule(name, norm)

    def measured(self, field: ReceptiveField, dim: int) -> None:
        """Set the receptive field of the network along `dim`; remove norms that are not called.

        Raises ValueError for a norm that is called several times, and for too many norms.
        """
        again = next((n for n in self.found if f"{n} (call 2)" in field.ratios), None)
        if again is not None:
            raise ValueError(
                f"infer: the network calls {again} ({type(self.found[again].norm).__name__}) "
                "several times, each time with other statistics, so it cannot go through a volume "
                "in slabs. Use more ranks (--grid), or a module for each call"
            )
        # In the order of the calls.
        self.found = {name: self.found[name] for name in field.ratios if name in self.found}
        if len(self.found) > _MOST:
            name, norm = list(self.found.items())[_MOST]
            raise ValueError(
                f"infer: {name} ({type(norm.norm).__name__}) is norm {_MOST + 1} of "
                f"{len(self.found)} over the whole volume; in slabs, each takes a pass of its own, "
                f"and at most {_MOST} are supported. Use more ranks (--grid)"
            )
        self._field, self._dim = field, dim

    @contextmanager
    def noting(self) -> Iterator[dict[str, int]]:
        """Yield a dictionary to which calls in a `with` block add the extents of norms' inputs."""
        extents: dict[str, int] = {}
        hooks = []
        for name, norm in self.found.items():

            def note(module: nn.Module, given: Any, y: Tensor, name: str = name) -> None:
                extents[name] = y.shape[self._dim]

            hooks.append(norm.register_forward_hook(note))
        try:
            yield extents
        finally:
            for hook in hooks:
                hook.remove()

    def own(self) -> None:
        """Let every norm use the statistics of its input."""
        for norm in self.found.values():
            norm.give(None, None)

    def gather(
        self,
        extents: Mapping[str, int],
        length: int,
        count: int,
        compute: Callable[[Slab], object],
        known: Sequence[Statistics] = (),
    ) -> Iterator[Statistics]:
        """Compute the statistics of all norms, one after the other, and yield each. Collective.

        Parameters
        ----------
        extents: the extents of the inputs of the norms, by name, along the slabs' dimension.
        length: the extent of the volume.
        count: the number of slabs.
        compute: runs the network on a slab.
        known: the statistics of the first norms, from an earlier run.
        """
        self.own()
        for place, (name, norm) in enumerate(self.found.items()):
            if place < len(known):
                norm.give(*torch.tensor(known[place], dtype=torch.float64))
                continue
            assert self._field is not None
            field = replace(self._field, ratio=self._field.ratios[name])
            cut = slabs_of(length, extents[name], field, count)
            parts = [self._of_slab(norm, slab, compute) for slab in cut]
            weights = torch.tensor([slab.last - slab.first for slab in cut], dtype=torch.float64)
            weights = (weights / weights.sum()).view(-1, 1, 1)
            means, variances = (torch.stack(t) for t in zip(*parts, strict=True))
            mean = (weights * means).sum(0)
            # The formula of Chan, Golub and LeVeque for a variance of parts.
            variance = (weights * (variances + (means - mean).square())).sum(0)
            norm.give(mean, variance)
            yield [mean.tolist(), variance.tolist()]

    def _of_slab(
        self, norm: GlobalNorm, slab: Slab, compute: Callable[[Slab], object]
    ) -> tuple[Tensor, Tensor]:
        found: list[Any] = []

        def observe(x: Tensor) -> None:
            assert isinstance(x, DistTensor)
            found.append(norm.moments(x.narrow(self._dim, slab.first, slab.last - slab.first)))
            raise _Observed

        norm.observe = observe
        try:
            with suppress(_Observed):
                compute(slab)
        finally:
            norm.observe = None
        mean, variance = found[0]
        return mean, variance
