"""The learning rate of a large batch: scaled, warmed up and let down again.

With B samples in a batch in place of the B0 for which a rate was found, k = B / B0, the rate is
multiplied by k (Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677) or by its square
root, is approached over some steps from the rate found, and decays from there. On a grid B counts
the samples of all replicas; how many ranks share a sample appears nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, sqrt

from torch import optim
from torch.optim.lr_scheduler import LambdaLR

from distconv.training.checks import check_count
from distconv.training.decay import Constant, Decay

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
    """Return a learning rate to begin with, for a class of optimizers and a usual batch size.

    Raises
    ------
    ValueError
        For a class without one.
    """
    for kind in optimizer.__mro__:
        if kind in _BASE_RATES:
            return _BASE_RATES[kind]
    known = ", ".join(kind.__name__ for kind in _BASE_RATES)
    raise ValueError(
        f"base_rate: there is none for {optimizer.__name__}, only for {known}; find one for a "
        "small batch, and give it to the optimizer"
    )


def number_of_steps(
    samples: int, epochs: int, batch_size: int, *, as_of_batch_size: int | None = None
) -> int:
    """Return how many optimizer steps a training takes; the last batch of an epoch may be smaller.

    Parameters
    ----------
    samples, epochs, batch_size: of the training; a batch holds the samples of all replicas.
    as_of_batch_size: a smaller batch size whose number of steps is kept, which means more epochs: a
        large batch generalizes as well where it takes as many steps (Hoffer et al., "Train longer,
        generalize better", arXiv:1705.08741).
    """
    size = batch_size if as_of_batch_size is None else as_of_batch_size
    for name, value in (("samples", samples), ("epochs", epochs), ("batch size", size)):
        check_count("number_of_steps", name, value, 1)
    return epochs * ceil(samples / size)


@dataclass(frozen=True)
class Recipe:
    """The learning rate of every step, from that of an optimizer made for a reference batch size.

    Needs no communication: every rank makes the same one.

    Parameters
    ----------
    batch_size: the samples of a step, those of all replicas together: b * P_N.
    reference_batch_size: the batch size for which the optimizer's learning rate was found.
    scaling: by what the rate is multiplied for the larger batch, k = batch_size /
        reference_batch_size: "linear" (k, for SGD), "sqrt" (its root, usual for Adam) or "none".
    warmup_steps: over how many steps the rate goes linearly from the optimizer's to the scaled one.
    decay: what becomes of the scaled rate after the warm-up.
    total_steps: the steps of the whole training, for decays that depend on its end; see
        `number_of_steps`.

    Raises
    ------
    ValueError
        Where a value is out of its range, or a decay wants to know the end and is not told.
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
                f"Recipe: {self.decay} falls to 0 in the last step; say which that is by "
                "total_steps=, for which there is number_of_steps"
            )

    @property
    def scale(self) -> float:
        """Return by what the rate is multiplied for the larger batch."""
        return float(_SCALINGS[self.scaling](self.batch_size / self.reference_batch_size))

    def factor(self, step: int) -> float:
        """Return by what the optimizer's learning rate is multiplied in a step, counted from 0."""
        if step < self.warmup_steps:
            return 1.0 + (self.scale - 1.0) * step / self.warmup_steps
        left = (self.total_steps or 0) - self.warmup_steps
        return self.scale * self.decay.factor(step - self.warmup_steps, left)

    def schedule(self, optimizer: optim.Optimizer) -> LambdaLR:
        """Return torch's scheduler of an optimizer, to be stepped after every optimizer step.

        Each parameter group keeps its own learning rate as the base. The scheduler's state_dict
        holds how far it has come; the recipe itself comes from the program again.
        """
        return LambdaLR(optimizer, lambda step: self.factor(step))
