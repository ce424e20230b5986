"""The learning rate of a large batch: scaled up, reached by a warm-up, and its decays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import ceil, cos, isfinite, pi, sqrt
from typing import ClassVar

from torch import optim
from torch.optim.lr_scheduler import LambdaLR

from distconv.training.checks import check_count

# Decays of a learning rate after its warm-up, as functions of the number of the step.


class Decay(ABC):
    """Base class of decays: a factor of the learning rate, 1 in the first step after the warm-up.

    Attributes
    ----------
    needs_end: whether the factor depends on the total number of steps.

    Examples
    --------
    >>> class Sawtooth(dc.training.Decay):
    ...     def factor(self, step, steps):
    ...         return 1 - (step % 10) / 10
    >>> recipe = dc.training.Recipe(batch_size=512, reference_batch_size=256, decay=Sawtooth())
    >>> [recipe.decay.factor(step, 100) for step in (0, 5, 10)]
    [1.0, 0.5, 1.0]
    """

    needs_end: ClassVar[bool] = False

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate in `step`, counted from 0 after the warm-up.

        `steps` is the number of steps after the warm-up. If `needs_end`, the factor is constant
        from `steps` on; other decays ignore `steps`.
        """


@dataclass(frozen=True)
class Constant(Decay):
    """Keep the learning rate constant.

    Examples
    --------
    >>> dc.training.Constant().factor(50, 100)
    1.0
    """

    def factor(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Step(Decay):
    """Multiply the learning rate by `gamma` after every `step_size` steps.

    Examples
    --------
    >>> decay = dc.training.Step(step_size=30, gamma=0.5)
    >>> [decay.factor(step, 100) for step in (0, 29, 30, 60)]
    [1.0, 1.0, 0.5, 0.25]
    """

    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_count("Step", "step_size", self.step_size, 1)
        _check_shrinking("Step", self.gamma)

    def factor(self, step: int, steps: int) -> float:
        return self.gamma ** (step // self.step_size)


@dataclass(frozen=True)
class Exponential(Decay):
    """Multiply the learning rate by `gamma` after every step.

    Examples
    --------
    >>> decay = dc.training.Exponential(gamma=0.5)
    >>> [decay.factor(step, 100) for step in (0, 1, 2)]
    [1.0, 0.5, 0.25]
    """

    gamma: float

    def __post_init__(self) -> None:
        _check_shrinking("Exponential", self.gamma)

    def factor(self, step: int, steps: int) -> float:
        return self.gamma**step


@dataclass(frozen=True)
class InverseTime(Decay):
    """Divide the learning rate by 1 + gamma * step.

    Examples
    --------
    >>> decay = dc.training.InverseTime(gamma=0.5)
    >>> [decay.factor(step, 100) for step in (0, 2, 6)]
    [1.0, 0.5, 0.25]
    """

    gamma: float

    def __post_init__(self) -> None:
        _check_positive("InverseTime", "gamma", self.gamma)

    def factor(self, step: int, steps: int) -> float:
        return 1.0 / (1.0 + self.gamma * step)


@dataclass(frozen=True)
class Polynomial(Decay):
    """Let the learning rate fall to 0 in the last step, as (1 - step / steps) ** power.

    LARS was published with a power of 2 (You et al., arXiv:1708.03888).

    Examples
    --------
    >>> decay = dc.training.Polynomial(power=2)
    >>> [decay.factor(step, 100) for step in (0, 50, 100)]
    [1.0, 0.25, 0.0]
    """

    power: float = 1.0
    needs_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_positive("Polynomial", "power", self.power)

    def factor(self, step: int, steps: int) -> float:
        return (1.0 - min(step, steps) / steps) ** self.power


@dataclass(frozen=True)
class Cosine(Decay):
    """Let the learning rate fall to 0 in the last step, along half a period of a cosine.

    Examples
    --------
    >>> decay = dc.training.Cosine()
    >>> [round(decay.factor(step, 100), 3) for step in (0, 25, 50, 100)]
    [1.0, 0.854, 0.5, 0.0]
    """

    needs_end: ClassVar[bool] = True

    def factor(self, step: int, steps: int) -> float:
        return 0.5 * (1.0 + cos(pi * min(step, steps) / steps))


@dataclass(frozen=True)
class CosineRestarts(Decay):
    """Let the learning rate fall to a fraction `floor` along half a cosine, with restarts.

    The first period has `period` steps, and each period `growth` times the steps of the previous
    (Loshchilov and Hutter, "SGDR", arXiv:1608.03983). `floor` is from 0 to 1.

    Examples
    --------
    >>> decay = dc.training.CosineRestarts(period=10, growth=2)
    >>> [round(decay.factor(step, 100), 3) for step in (0, 5, 10, 20)]
    [1.0, 0.5, 1.0, 0.5]
    """

    period: int
    growth: int = 1
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_count("CosineRestarts", "period", self.period, 1)
        check_count("CosineRestarts", "growth", self.growth, 1)
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"CosineRestarts: floor={self.floor!r} is not a fraction; choose a number from 0 "
                "to 1"
            )

    def factor(self, step: int, steps: int) -> float:
        period = self.period
        if self.growth == 1:
            step %= period
        while step >= period:
            step -= period
            period *= self.growth
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + cos(pi * step / period))


def _check_positive(owner: str, name: str, value: float) -> None:
    if not (value > 0 and isfinite(value)):
        raise ValueError(f"{owner}: {name}={value!r} is not positive; choose a number above 0")


def _check_shrinking(owner: str, gamma: float) -> None:
    if not 0 < gamma <= 1:
        raise ValueError(
            f"{owner}: gamma={gamma!r} is not a decay factor; choose a number above 0 and up to 1"
        )


# The learning rate of a large batch: scaled up, reached by a warm-up, and decaying.
#
# If a rate was found for batches of B0 samples, and a batch has B samples, the rate is multiplied
# by k = B / B0 (Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677) or by sqrt(k). The
# rate grows from the rate found to the scaled rate over some steps, and decays from there. On a
# grid B counts the samples of all replicas; the number of ranks that share a sample does not
# matter.


_BASE_RATES: dict[type[optim.Optimizer], float] = {
    optim.SGD: 1e-2,
    optim.Adam: 1e-3,
    optim.AdamW: 1e-3,
    optim.RMSprop: 1e-3,
    optim.Adagrad: 1e-2,
    optim.Adadelta: 1.0,
}

_SCALINGS = {"linear": lambda k: k, "sqrt": sqrt, "none": lambda k: 1.0}


def base_rate(optimizer: type[optim.Optimizer]) -> float:
    """Return a usual first learning rate for a class of torch's optimizers and a small batch.

    Raises ValueError for other classes of optimizers, for which the library has no usual rate.

    Examples
    --------
    >>> dc.training.base_rate(torch.optim.Adam)
    0.001
    """
    for kind in optimizer.__mro__:
        if kind in _BASE_RATES:
            return _BASE_RATES[kind]
    known = ", ".join(kind.__name__ for kind in _BASE_RATES)
    raise ValueError(
        f"base_rate: no rate is known for {optimizer.__name__}, only for {known}; find a learning "
        "rate for a small batch, and pass it to the optimizer"
    )


def number_of_steps(
    samples: int, epochs: int, batch_size: int, *, as_of_batch_size: int | None = None
) -> int:
    """Return the number of optimizer steps of a training, short last batches included.

    Parameters
    ----------
    samples, epochs: the samples of the training set, and the epochs.
    batch_size: the samples of a step, over all replicas.
    as_of_batch_size: a smaller batch size whose number of steps is kept, which means more epochs: a
        large batch generalizes as well in as many steps (Hoffer et al., "Train longer, generalize
        better", arXiv:1705.08741).

    Examples
    --------
    >>> dc.training.number_of_steps(samples=50_000, epochs=90, batch_size=1024)
    4410
    """
    size = batch_size if as_of_batch_size is None else as_of_batch_size
    for name, value in (("samples", samples), ("epochs", epochs), ("batch size", size)):
        check_count("number_of_steps", name, value, 1)
    return epochs * ceil(samples / size)


@dataclass(frozen=True)
class Recipe:
    """The learning rate of every step, for a larger batch than the optimizer's rate was found for.

    No communication: every rank makes the same recipe.

    Raises ValueError if a value is out of its range, or a decay needs `total_steps` and has none.

    Parameters
    ----------
    batch_size: the samples of a step, over all replicas.
    reference_batch_size: the batch size for which the optimizer's learning rate was found.
    scaling: the factor of the rate for the larger batch, with k = batch_size /
        reference_batch_size: "linear" (k, for SGD), "sqrt" (its root, usual for Adam) or "none".
    warmup_steps: the steps in which the rate grows linearly from the optimizer's rate to the scaled
        rate.
    decay: the decay of the scaled rate after the warm-up.
    total_steps: the steps of the whole training, for decays that depend on its end; see
        `number_of_steps`.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # found for 256 samples
    >>> recipe = dc.training.Recipe(batch_size=1024, reference_batch_size=256, warmup_steps=10)
    >>> schedule = recipe.schedule(optimizer)
    >>> for _ in range(20):
    ...     optimizer.step()
    ...     schedule.step()
    >>> round(optimizer.param_groups[0]["lr"], 6)
    0.4
    """

    batch_size: int
    reference_batch_size: int
    scaling: str = "linear"
    warmup_steps: int = 0
    decay: Decay = field(default_factory=Constant)
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("Recipe", "batch_size", self.batch_size, 1)
        check_count("Recipe", "reference_batch_size", self.reference_batch_size, 1)
        check_count("Recipe", "warmup_steps", self.warmup_steps, 0)
        if self.scaling not in _SCALINGS:
            raise ValueError(
                f"Recipe: scaling={self.scaling!r} is unknown; choose {', '.join(_SCALINGS)}"
            )
        if self.total_steps is not None:
            check_count("Recipe", "total_steps", self.total_steps, self.warmup_steps + 1)
        elif self.decay.needs_end:
            raise ValueError(
                f"Recipe: {self.decay} falls to 0 in the last step; pass total_steps=, which "
                "number_of_steps computes"
            )

    @property
    def scale(self) -> float:
        """Return the factor of the learning rate for the larger batch, before any decay."""
        return float(_SCALINGS[self.scaling](self.batch_size / self.reference_batch_size))

    def factor(self, step: int) -> float:
        """Return the factor of the optimizer's learning rate in `step`, counted from 0."""
        if step < self.warmup_steps:
            return 1.0 + (self.scale - 1.0) * step / self.warmup_steps
        left = (self.total_steps or 0) - self.warmup_steps
        return self.scale * self.decay.factor(step - self.warmup_steps, left)

    def schedule(self, optimizer: optim.Optimizer) -> LambdaLR:
        """Return torch's scheduler of the optimizer, to be stepped after every optimizer step.

        Each parameter group keeps its own learning rate as the base. The scheduler's state_dict
        holds the number of steps, and not the recipe.
        """
        return LambdaLR(optimizer, lambda step: self.factor(step))
