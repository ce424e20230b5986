"""The gradient noise scale: the batch size beyond which the gradient has hardly any noise left.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A. The
squared norm of the gradient of n samples has the mean |G|^2 + tr(Sigma) / n, with G the gradient
of all data, and Sigma the covariance of gradients of single samples. Two values of n give both: a
replica's samples and the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite, isqrt, nan, prod

import torch
from torch import Tensor, nn

from distconv.comm.collectives import all_reduce_
from distconv.geometry.layout import cutting_axes
from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.model.buckets import Bucket, PackedGradients
from distconv.model.gradient_reduction import required_reduction
from distconv.model.parallelize import no_sync
from distconv.tensor.dist_tensor import DistTensor
from distconv.training.checks import check_count
from distconv.transport.interface import SUM_TYPES


class NoiseScale:
    """Measure the gradient noise scale of a parallelized model as it trains.

    The noise scale, `value`, is a batch size: a batch of this size makes half the progress of a
    noise-free step, and takes twice the samples of a very small batch for the same result. The
    noise scale grows as the loss falls. It is computed from the gradients of units of samples: the
    units are the replicas, the micro-batches, or both. Samples must stay on their replicas
    throughout the model; layers that mix samples, such as batch normalisation, are treated as if
    they did not.

    Raises ValueError if the model is not parallelized, or weights are sharded over the replicas.

    Parameters
    ----------
    model: a parallelized module; the loss is a mean over samples.
    decay: the factor by which each measured step reduces the weight of earlier steps in averages.

    Attributes
    ----------
    signal, noise: running averages of |G|^2 and tr(Sigma). In the beginning both are too small by
        the same factor, which cancels in their ratio.

    Examples
    --------
    >>> grid = dc.ProcessGrid(sample=2)
    >>> model = dc.parallelize(nn.Linear(4, 1), grid)
    >>> noise = dc.training.NoiseScale(model)
    >>> for _ in range(10):
    ...     x = dc.distribute_tensor(torch.randn(8, 4), grid)
    ...     noise.backward((model(x) - x.sum(1, keepdim=True)).square().mean(), samples=8)
    >>> noise.value > 0
    True
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.95):
        reduction = required_reduction("NoiseScale", model)
        if not 0 <= decay < 1:
            raise ValueError(
                f"NoiseScale: decay={decay!r} is out of range; choose a number from 0 to 1, such "
                "as 0.95"
            )
        for name, p in model.named_parameters():
            if isinstance(p, DistTensor) and "sample" in cutting_axes(p.cuts):
                raise ValueError(
                    f"NoiseScale: {name} is partitioned over the axis sample, so replicas have no "
                    "gradient of the whole parameter; partition channels over other axes, without "
                    "shard="
                )
        self._model, self._reduction, self._grid = model, reduction, reduction.grid
        self.decay = decay
        self.signal = self.noise = 0.0

    @property
    def value(self) -> float:
        """Return the noise scale in samples, tr(Sigma) / |G|^2; NaN if it is not known."""
        return self.noise / self.signal if self.signal > 0 else nan

    def state_dict(self) -> dict[str, float]:
        """Return the running averages, `signal` and `noise`."""
        return {"signal": self.signal, "noise": self.noise}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load running averages that `state_dict` returned."""
        self.signal, self.noise = float(state["signal"]), float(state["noise"])

    def backward(self, losses: Tensor | Iterable[Tensor], samples: int) -> None:
        """Compute gradients, in place of `loss.backward()`, and update the noise scale.

        All ranks of the grid call it together. For each micro-batch, gradients are summed among the
        ranks that share a sample, after its backward pass, and then over the replicas. The sums do
        not overlap computation, so measure in some steps only. Gradients of earlier passes are
        dropped, as by `zero_grad()`. A step with a single unit, or with `samples` that is no
        multiple of the number of units, is not measured.

        Parameters
        ----------
        losses: the loss, or the losses of micro-batches of equal size, which are summed; a
            generator may compute them one by one.
        samples: the samples of the whole batch, over all replicas and micro-batches.
        """
        check_count("NoiseScale", "samples", samples, 1)
        packed: list[tuple[Bucket, PackedGradients]] = []
        sums: list[Tensor] = []
        """For each bucket this replica's gradients, summed over the micro-batches so far."""
        squares, count = self._zero(), 0
        with no_sync(self._model):
            for loss in [losses] if isinstance(losses, Tensor) else losses:
                self._model.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                packed = [(bucket, bucket.pack()) for bucket in self._reduction.buckets]
                unit = [self._of_replica(bucket, gradients.flat) for bucket, gradients in packed]
                squares = squares + self._squared(unit)
                for before, flat in zip(sums, unit, strict=False):
                    flat.add_(before)
                sums, count = unit, count + 1
        if not count:
            raise ValueError(
                "NoiseScale: there is no loss; pass a loss, or a list with a loss for each "
                "micro-batch"
            )
        for flat in sums:
            self._all_reduce(flat, ("sample",))
        whole = self._squared(sums) / self._grid.shape["sample"]
        for (bucket, gradients), flat in zip(packed, sums, strict=True):
            gradients.flat.copy_(flat)
            bucket.unpack(gradients)
        self._learn(squares, whole, samples, count * self._grid.shape["sample"])

    def _of_replica(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """Return packed gradients, summed over the ranks that share a sample. Collective.

        `flat` is the vector of the packed gradients of `bucket`. 16-bit types become float32.
        """
        wide = flat.to(SUM_TYPES.get(flat.dtype, flat.dtype))
        self._all_reduce(wide, _within(bucket))
        return wide

    def _all_reduce(self, flat: Tensor, axes: tuple[str, ...]) -> None:
        if self._grid.topology.parts(axes) > 1:
            all_reduce_(flat, self._grid, axes)

    def _squared(self, flats: list[Tensor]) -> Tensor:
        """Return this rank's share of the squared norm of the gradients `flats`, in float64.

        `flats` has the packed gradients of each bucket. The shares of the ranks that share a sample
        sum to the squared norm.
        """
        total = self._zero()
        for bucket, flat in zip(self._reduction.buckets, flats, strict=True):
            gradients = bucket.elements_of(flat)
            norm = torch.linalg.vector_norm(gradients, dtype=torch.float64)
            total = total + norm.square() / self._grid.topology.parts(_within(bucket))
        return total

    def _learn(self, squares: Tensor, whole: Tensor, samples: int, units: int) -> None:
        """Update the running averages with a step of `units` units. Collective.

        `squares` and `whole` are this rank's shares of the sum of the squared norms of the units'
        gradients, and of the squared norm of the gradient of the whole batch.
        """
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

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._grid.device)


def estimates(small: float, large: float, unit: int, batch: int) -> tuple[float, float]:
    """Return unbiased estimates of |G|^2 and tr(Sigma).

    `small` is the mean of the squared norms of gradients of `unit` samples each, `large` the
    squared norm of the gradient of all `batch` samples.
    """
    signal = (batch * large - unit * small) / (batch - unit)
    noise = (small - large) / (1 / unit - 1 / batch)
    return signal, noise


def _within(bucket: Bucket) -> tuple[str, ...]:
    """Return the axes, besides `sample`, over which a bucket's gradients are summed."""
    return tuple(axis for axis in bucket.axes if axis != "sample")


# Advice on how many replicas, and how large a batch, a training can use.
#
# Batches beyond the square root of the data set, or beyond the gradient noise scale, hardly make a
# step better than smaller ones do. Further ranks are then better used within a sample.


def max_batch(samples: int) -> int:
    """Return the largest batch size that still learns well, by a rule of thumb: sqrt(samples).

    Examples
    --------
    >>> dc.training.max_batch(samples=10_000)
    100
    """
    check_count("max_batch", "samples", samples, 1)
    return isqrt(samples)


def advise(
    grid: Grid | Mapping[str, int],
    batch_size: int,
    samples: int,
    *,
    noise_scale: float | None = None,
) -> list[str]:
    """Return warnings, one sentence each, about a grid and a batch size that use ranks badly.

    No communication. The grid need not exist yet.

    Parameters
    ----------
    grid: a grid, or the number of ranks along its axes, such as {"sample": 8, "height": 4}.
    batch_size: the samples of a step, over all replicas.
    samples: the number of samples of the training set.
    noise_scale: the gradient noise scale, if it was measured (see `NoiseScale`); None or NaN
        if it is not known.

    Examples
    --------
    >>> for warning in dc.training.advise({"sample": 64}, batch_size=512, samples=10_000):
    ...     print(warning)
    The batch size 512 is beyond sqrt(10000) = 100, the square root ...
    sample=8 with 8 ranks a sample uses the 64 ranks better than sample=64 with 1
    """
    check_count("advise", "batch_size", batch_size, 1)
    extents = grid.shape if isinstance(grid, Grid) else dict(grid)
    for axis, n in extents.items():
        if axis not in AXES:
            raise ValueError(
                f"advise: {axis!r} is not an axis of a grid; choose from {', '.join(AXES)}"
            )
        check_count("advise", axis, n, 1)
    replicas, ranks = extents.get("sample", 1), prod(extents.values())
    found = []
    most = max_batch(samples)
    limits = {f"sqrt({samples}) = {most}, the square root of the number of samples": most}
    if noise_scale is not None and noise_scale > 0:
        limits[f"{noise_scale:.4g}, the gradient noise scale"] = max(1, int(noise_scale))
    for words, limit in limits.items():
        if batch_size > limit:
            found.append(
                f"The batch size {batch_size} is beyond {words}: a larger batch hardly improves a "
                "step"
            )
    if batch_size < replicas:
        found.append(
            f"The batch size {batch_size} leaves {replicas - batch_size} of {replicas} replicas "
            "without a sample"
        )
    elif batch_size % replicas:
        found.append(
            f"The batch size {batch_size} is not a multiple of {replicas} replicas: replicas with "
            f"{batch_size // replicas} samples wait for replicas with one more"
        )
    # The number of replicas for a useful batch size, at the current number of samples per replica.
    each = max(1, batch_size // replicas)
    fewer = max(1, min(batch_size, *limits.values()) // each)
    while ranks % fewer:
        fewer -= 1
    if fewer < replicas:
        found.append(
            f"sample={fewer} with {ranks // fewer} ranks a sample uses the {ranks} ranks better "
            f"than sample={replicas} with {ranks // replicas}"
        )
    return found
