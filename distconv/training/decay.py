"""Decays of a learning rate after its warm-up, as functions of the number of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import ClassVar

from distconv.training.checks import check_count


class Decay(ABC):
    """Base class of decays: a factor of the learning rate, 1 in the first step after the warm-up.

    Attributes
    ----------
    needs_end: whether the factor depends on the total number of steps.
    """

    needs_end: ClassVar[bool] = False

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor in `step`, from 0; if `needs_end`, it is constant from `steps` on.

        Other decays ignore `steps`, the number of steps after the warm-up.
        """


@dataclass(frozen=True)
class Constant(Decay):
    """Keep the learning rate."""

    def factor(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Step(Decay):
    """Multiply the learning rate by `gamma` after every `step_size` steps."""

    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_count("Step", "step_size", self.step_size, 1)
        _check_shrinking("Step", self.gamma)

    def factor(self, step: int, steps: int) -> float:
        return self.gamma ** (step // self.step_size)


@dataclass(frozen=True)
class Exponential(Decay):
    """Multiply the learning rate by `gamma` after every step."""

    gamma: float

    def __post_init__(self) -> None:
        _check_shrinking("Exponential", self.gamma)

    def factor(self, step: int, steps: int) -> float:
        return self.gamma**step


@dataclass(frozen=True)
class InverseTime(Decay):
    """Divide the learning rate by 1 + gamma * step."""

    gamma: float

    def __post_init__(self) -> None:
        _check_positive("InverseTime", "gamma", self.gamma)

    def factor(self, step: int, steps: int) -> float:
        return 1.0 / (1.0 + self.gamma * step)


@dataclass(frozen=True)
class Polynomial(Decay):
    """Let the learning rate fall to 0 in the last step, as (1 - step / steps) ** power.

    LARS was published with a power of 2 (You et al., arXiv:1708.03888).
    """

    power: float = 1.0
    needs_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_positive("Polynomial", "power", self.power)

    def factor(self, step: int, steps: int) -> float:
        return (1.0 - min(step, steps) / steps) ** self.power


@dataclass(frozen=True)
class Cosine(Decay):
    """Let the learning rate fall to 0 in the last step, along half a period of a cosine."""

    needs_end: ClassVar[bool] = True

    def factor(self, step: int, steps: int) -> float:
        return 0.5 * (1.0 + cos(pi * min(step, steps) / steps))


@dataclass(frozen=True)
class CosineRestarts(Decay):
    """Let the learning rate fall to a fraction `floor` along half a cosine, again and again.

    The first fall takes `period` steps, and each `growth` times as many as the one before
    (Loshchilov and Hutter, "SGDR", arXiv:1608.03983). `floor` is from 0 to 1.
    """

    period: int
    growth: int = 1
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_count("CosineRestarts", "period", self.period, 1)
        check_count("CosineRestarts", "growth", self.growth, 1)
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"CosineRestarts: floor={self.floor!r} is no share; give one from 0 up to 1"
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
        raise ValueError(f"{owner}: {name}={value!r} is not positive; give a number above 0")


def _check_shrinking(owner: str, gamma: float) -> None:
    if not 0 < gamma <= 1:
        raise ValueError(
            f"{owner}: gamma={gamma!r} is no factor of a decay; give one above 0 and up to 1"
        )
