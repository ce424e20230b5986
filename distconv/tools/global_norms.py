"""Norms over a whole volume, in networks that go through it in slabs.

Instance and group norms take mean and variance of each sample over the whole volume. For each norm,
in the order in which the network calls them, a pass over the slabs computes these statistics, while
earlier norms use theirs. With all statistics, the norms are affine functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.planning.receptive_field import ReceptiveField, Slab, slabs_of
from distconv.tensor.autocast import result_type
from distconv.tensor.dist_tensor import DistTensor

_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)

_MOST = 64
"""The most norms, each of which takes a pass of its own over the volume."""

Statistics = list[list[list[float]]]
"""Mean and variance of a norm, each as (samples, channels)."""


class _Observed(Exception):
    """Ends a forward pass at the norm whose statistics are taken."""


class GlobalNorm(nn.Module):
    """An instance or group norm that may be given its statistics.

    Attributes
    ----------
    norm: the torch module.
    mean, variance: the statistics to use, (samples, channels, 1, ...); None for those of the input.
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
        """Use these statistics, (samples, channels), from now on; None for those of the input."""
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
        """Return the type of the norm of `x`, which autocast chooses otherwise on CPUs and GPUs."""
        own = self.norm.weight, self.norm.bias
        if isinstance(self.norm, nn.GroupNorm):
            return result_type(F.group_norm, x, self.norm.num_groups, *own)
        return result_type(F.instance_norm, x, None, None, *own)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each sample and channel of an input, in float64. Collective.

        Channels of a group have the same ones.
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
    """The norms of a network that take statistics over the whole volume.

    Attributes
    ----------
    found: the norms by name, in the order in which the network calls them.
    """

    def __init__(self) -> None:
        self.found: dict[str, GlobalNorm] = {}
        self._field: ReceptiveField | None = None
        self._dim = 0

    def replace_in(self, net: nn.Module, dims: int) -> None:
        """Replace the norms of a network, whose input has `dims` dimensions."""
        for name, part in list(net.named_modules(remove_duplicate=False)):
            # Subclasses may compute other functions.
            if name and type(part) in _NORMS and not getattr(part, "track_running_stats", False):
                known = (own for own in self.found.values() if own.norm is part)
                norm = next(known, None)
                if norm is None:
                    norm = self.found[name] = GlobalNorm(part, dims)
                net.set_submodule(name, norm)

    def measured(self, field: ReceptiveField, dim: int) -> None:
        """Keep the receptive field of the network along `dim`, and forget norms it does not call.

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
        """Yield a dictionary of the extents of the norms' inputs in the calls of a `with` block."""
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
        """Let every norm take the statistics of its input."""
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
        """Take the statistics of all norms, one after the other, and yield each. Collective.

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
            # As Chan, Golub and LeVeque combine parts.
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
