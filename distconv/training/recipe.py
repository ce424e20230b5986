"""The learning rate of a large batch: scaled up, reached by a warm-up, and decaying.

For B samples in a batch in place of the B0 for which a rate was found, k = B / B0, the rate is
multiplied by k (Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677) or by its square
root. It grows from the rate found to the scaled one over some steps, and decays from there. On a
grid B counts the samples of all replicas; the number of ranks that share a sample does not matter.
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
    """Return a usual first learning rate for a class of torch's optimizers and a small batch.

    Raises ValueError for other classes of optimizers, for which the library has no usual rate.
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
    """Return the number of optimizer steps of a training, short last batches included.

    Parameters
    ----------
    samples, epochs: the samples of the training set, and the epochs.
    batch_size: the samples of a step, over all replicas.
    as_of_batch_size: a smaller batch size whose number of steps is kept, which means more epochs: a
        large batch generalizes as well in as many steps (Hoffer et al., "Train longer, generalize
        better", arXiv:1705.08741).
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
    warmup_steps: the steps in which the rate grows linearly from the optimizer's to the scaled one.
    decay: the decay of the scaled rate after the warm-up.
    total_steps: the steps of the whole training, for decays that depend on its end; see
        `number_of_steps`.
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
