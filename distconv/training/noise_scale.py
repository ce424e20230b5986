"""The gradient noise scale: how large a batch may be before its gradient has hardly any noise left.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A. The
gradient of n samples has a squared norm of |G|^2 + tr(Sigma) / n in the mean, with G the gradient
of all data, and Sigma the covariance of those of single samples. Two sizes give both: a replica's
part of the batch and the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite, nan

import torch
from torch import Tensor, nn

from distconv.comm.collectives import all_reduce_, all_reduce_coalesced
from distconv.geometry.layout import cutting_axes
from distconv.geometry.topology import AXES
from distconv.model.gradient_reduction import axes_of_sum, required_reduction
from distconv.model.parallelize import no_sync
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import shards_of
from distconv.training.checks import check_count


class NoiseScale:
    """Measure the gradient noise scale of a parallelized model as it trains.

    At this many samples a batch makes half the progress in a step of one without noise, and takes
    twice the samples of a very small one. It grows as the loss falls. The units compared are the
    replicas, or micro-batches, or both; samples have to stay on their replicas throughout the
    model, and layers that mix them, such as batch normalisation, are seen as if they did not.

    Parameters
    ----------
    model: has been parallelized; the loss is a mean over samples.
    decay: of the running averages of both estimates, for each step that is measured.

    Attributes
    ----------
    signal, noise: running averages of |G|^2 and tr(Sigma), both too small by the same factor in the
        beginning, which their ratio is not.

    Raises
    ------
    ValueError
        Where the model is not parallelized, or weights are cut over the replicas.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.95):
        reduction = required_reduction("NoiseScale", model)
        if not 0 <= decay < 1:
            raise ValueError(f"NoiseScale: decay={decay!r} is none; give 0.95, say, at least 0")
        for name, p in model.named_parameters():
            if isinstance(p, DistTensor) and "sample" in cutting_axes(p.cuts):
                raise ValueError(
                    f"NoiseScale: {name} is cut over the replicas, which have no gradients of "
                    "their own then; cut channels over other axes than sample"
                )
        self._model, self._reduction, self._grid = model, reduction, reduction.grid
        self.decay = decay
        self.signal = self.noise = 0.0

    @property
    def value(self) -> float:
        """Return the noise scale in samples, tr(Sigma) / |G|^2; NaN where it is not known."""
        return self.noise / self.signal if self.signal > 0 else nan

    def state_dict(self) -> dict[str, float]:
        """Return the running averages."""
        return {"signal": self.signal, "noise": self.noise}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up running averages."""
        self.signal, self.noise = float(state["signal"]), float(state["noise"])

    def backward(self, losses: Tensor | Iterable[Tensor], samples: int) -> None:
        """Compute the gradients of a step, and measure, in place of `loss.backward()`.

        All ranks of the grid call it together. It sends the gradients once more among the ranks
        that share a sample, and nothing of it is hidden behind the backward pass; so use it every
        so often. Gradients of earlier passes are dropped, as by `zero_grad()`. With one unit in
        all, or where `samples` is no multiple of their number, nothing is learned from the step.

        Parameters
        ----------
        losses: the loss, or those of micro-batches of equal size, which are added up; they may be
            computed one by one, by a generator.
        samples: in the whole batch, those of all replicas and micro-batches together.
        """
        check_count("NoiseScale", "samples", samples, 1)
        leaves = [p for p in shards_of(self._model.parameters()) if p.requires_grad]
        totals: list[Tensor | None] = []
        squares, count = self._zero(), 0
        with no_sync(self._model):
            for loss in [losses] if isinstance(losses, Tensor) else losses:
                self._model.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                squares = squares + self._squared_parts()
                parts = [p.grad for p in leaves]
                totals = list(map(_added, totals, parts)) if count else parts
                count += 1
        if not count:
            raise ValueError("NoiseScale: there is no loss; pass one, or one for each micro-batch")
        for p, total in zip(leaves, totals, strict=True):
            p.grad = total
        self._reduction.reduce()
        self._learn(squares, samples, count * self._grid.shape["sample"])

    def _squared_parts(self) -> Tensor:
        """Return this rank's share of the sum over replicas of the squares of their gradients."""
        groups: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for p, axes in self._parameters():
            within = tuple(axis for axis in axes if axis != "sample")
            groups[within].append(torch.zeros_like(p) if p.grad is None else p.grad)
        shares = self._zero()
        for within, parts in groups.items():
            for gradient in all_reduce_coalesced(parts, self._grid, within):
                shares = shares + self._share(gradient, within)
        return shares

    def _learn(self, squares: Tensor, samples: int, units: int) -> None:
        """Take up the estimates of a step from units of samples / units samples each."""
        whole = self._zero()
        for p, axes in self._parameters():
            if p.grad is not None:
                whole = whole + self._share(p.grad, axes)
        # A unit's part of the mean is 1 / units of its own gradient.
        both = torch.stack((units * squares, whole))
        if self._grid.size > 1:
            all_reduce_(both, self._grid, AXES)
        small, large = both.tolist()
        if units == 1 or samples % units or not (isfinite(small) and isfinite(large)):
            return
        signal, noise = estimates(small, large, samples // units, samples)
        self.signal += (1 - self.decay) * (signal - self.signal)
        self.noise += (1 - self.decay) * (noise - self.noise)

    def _parameters(self) -> Iterable[tuple[Tensor, tuple[str, ...]]]:
        """Yield what is trained of each parameter here, and the axes along which others hold it."""
        for p in self._model.parameters():
            if p.requires_grad:
                yield shards_of(p)[0], axes_of_sum(p, self._grid)

    def _share(self, gradient: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return a squared norm, shared out among the ranks along `axes`, which all have it."""
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return norm.square() / self._grid.topology.parts(axes)

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._grid.device)


def estimates(small: float, large: float, unit: int, batch: int) -> tuple[float, float]:
    """Return unbiased estimates of |G|^2 and tr(Sigma).

    Parameters
    ----------
    small: the mean of the squared norms of gradients of `unit` samples each.
    large: the squared norm of their mean, over `batch` samples.
    """
    signal = (batch * large - unit * small) / (batch - unit)
    noise = (small - large) / (1 / unit - 1 / batch)
    return signal, noise


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)
