"""Learning rates follow their closed forms, survive a checkpoint, and count samples, not ranks."""

from __future__ import annotations

import io
from math import cos, isclose, pi, sqrt
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

import distconv as dc
from distconv.training import (
    Constant,
    Cosine,
    CosineRestarts,
    Decay,
    Exponential,
    InverseTime,
    Polynomial,
    Recipe,
    Step,
    advise,
    base_rate,
    max_batch,
    number_of_steps,
)


def optimizer(rate: float = 0.1) -> SGD:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    return SGD([{"params": [first]}, {"params": [second], "lr": 3 * rate}], lr=rate)


def test_base_rates_are_those_of_the_class_or_of_its_base() -> None:
    class Own(SGD):
        """An optimizer of a user's own class."""

    rates = {SGD: 1e-2, Adam: 1e-3, AdamW: 1e-3, RMSprop: 1e-3, Adagrad: 1e-2, Adadelta: 1.0}
    assert {kind: base_rate(kind) for kind in rates} == rates
    assert base_rate(Own) == 1e-2
    with pytest.raises(ValueError, match="no rate is known for LBFGS, only for SGD, Adam"):
        base_rate(torch.optim.LBFGS)


@pytest.mark.parametrize(
    ("scaling", "scale"), [("linear", 32.0), ("sqrt", sqrt(32)), ("none", 1.0)]
)
def test_the_rate_is_scaled_by_the_ratio_of_batch_sizes(scaling: str, scale: float) -> None:
    assert isclose(Recipe(8192, 256, scaling).scale, scale)
    # Goyal et al.: 0.1 for 256 samples is 3.2 for 8192.
    schedule = Recipe(8192, 256, scaling).schedule(optimizer())
    assert schedule.get_last_lr() == pytest.approx([0.1 * scale, 0.3 * scale], rel=1e-15)


DECAYS: dict[str, tuple[Decay, Any]] = {
    "constant": (Constant(), lambda s: 1.0),
    "step": (Step(3, 0.5), lambda s: 0.5 ** (s // 3)),
    "exponential": (Exponential(0.9), lambda s: 0.9**s),
    "inverse time": (InverseTime(0.2), lambda s: 1 / (1 + 0.2 * s)),
    "polynomial": (Polynomial(2.0), lambda s: (1 - s / 12) ** 2),
    "cosine": (Cosine(), lambda s: (1 + cos(pi * s / 12)) / 2),
}


@pytest.mark.parametrize("name", DECAYS)
def test_every_step_has_the_rate_of_the_closed_form(name: str) -> None:
    decay, closed = DECAYS[name]
    recipe = Recipe(64, 16, warmup_steps=4, decay=decay, total_steps=16)
    opt = optimizer()
    schedule = recipe.schedule(opt)
    for step in range(16):
        factor = 1 + 3 * step / 4 if step < 4 else 4 * closed(step - 4)
        rates = [group["lr"] for group in opt.param_groups]
        assert rates == pytest.approx([0.1 * factor, 0.3 * factor], rel=1e-14)
        opt.step()
        schedule.step()


@pytest.mark.parametrize(("period", "growth"), [(3, 1), (3, 2), (1, 3)])
def test_a_cosine_with_restarts_is_torchs(period: int, growth: int) -> None:
    own, torchs = optimizer(), optimizer()
    schedule = Recipe(8, 8, decay=CosineRestarts(period, growth, 0.1)).schedule(own)
    expected = CosineAnnealingWarmRestarts(torchs, period, growth, eta_min=0.01)
    for _ in range(40):
        rates = own.param_groups[0]["lr"], torchs.param_groups[0]["lr"]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12)
        for opt, following in ((own, schedule), (torchs, expected)):
            opt.step()
            following.step()


@pytest.mark.parametrize("decay", [Cosine(), Polynomial()])
def test_a_rate_that_has_come_to_its_end_stays_there(decay: Decay) -> None:
    recipe = Recipe(8, 8, decay=decay, total_steps=5)
    assert recipe.factor(4) > 0
    assert [recipe.factor(step) for step in (5, 6, 100)] == [0.0] * 3


def test_a_checkpoint_goes_on_with_the_same_rates() -> None:
    recipe = Recipe(64, 16, warmup_steps=3, decay=Cosine(), total_steps=12)

    def rates(opt: Optimizer, schedule: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(opt.param_groups[0]["lr"])
            opt.step()
            schedule.step()
        return found

    whole = optimizer()
    expected = rates(whole, recipe.schedule(whole), 12)
    for stop in (2, 7):
        first = optimizer()
        schedule = recipe.schedule(first)
        begun = rates(first, schedule, stop)
        file = io.BytesIO()
        torch.save([first.state_dict(), schedule.state_dict()], file)
        file.seek(0)
        second = optimizer()
        again = recipe.schedule(second)
        for target, state in zip((second, again), torch.load(file, weights_only=True), strict=True):
            target.load_state_dict(state)
        assert begun + rates(second, again, 12 - stop) == expected


def test_steps_are_counted_for_this_batch_size_or_as_of_a_smaller_one() -> None:
    assert number_of_steps(1000, 3, 64) == 3 * 16
    assert number_of_steps(1000, 3, 640, as_of_batch_size=64) == 3 * 16
    assert number_of_steps(1000, 3, 640) == 3 * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe(0, 8), "batch_size=0 is not a count"),
        (lambda: Recipe(8, 2.5), "reference_batch_size=2.5 is not a count"),
        (lambda: Recipe(8, 8, "cubic"), "scaling='cubic' is unknown; choose linear, sqrt, none"),
        (lambda: Recipe(8, 8, warmup_steps=-1), "warmup_steps=-1"),
        (lambda: Recipe(8, 8, warmup_steps=5, total_steps=5), "total_steps=5 .* of 6 or more"),
        (lambda: Recipe(8, 8, decay=Cosine()), r"Cosine\(\) falls to 0 .* total_steps="),
        (lambda: Step(0), "step_size=0"),
        (lambda: Exponential(1.5), "gamma=1.5 is not a decay factor"),
        (lambda: InverseTime(-1.0), "gamma=-1.0 is not positive"),
        (lambda: Polynomial(0.0), "power=0.0 is not positive"),
        (lambda: CosineRestarts(0), "period=0"),
        (lambda: CosineRestarts(5, 2, 1.5), "floor=1.5 is not a fraction"),
        (lambda: number_of_steps(10, 0, 5), "epochs=0"),
        (lambda: max_batch(0), "samples=0"),
        (lambda: advise({"samples": 2}, 4, 100), "'samples' is not an axis of a grid"),
        (lambda: advise({"height": -1}, 4, 100), "height=-1 is not a count"),
    ],
)
def test_values_out_of_range_are_errors(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# Advice


def test_the_largest_batch_is_the_root_of_the_data_set() -> None:
    assert [max_batch(n) for n in (1, 99, 100, 10**10)] == [1, 9, 10, 10**5]


def test_nothing_is_said_about_a_batch_that_suits_grid_and_data() -> None:
    assert advise({"sample": 4, "height": 2}, 64, 10_000, noise_scale=80.0) == []
    assert advise({"sample": 4}, 64, 10_000, noise_scale=float("nan")) == []


def test_a_batch_beyond_the_root_of_the_data_set_wants_fewer_replicas() -> None:
    beyond, better = advise({"sample": 16, "height": 2}, 64, 1024)
    assert "64 is beyond sqrt(1024) = 32" in beyond
    assert better.startswith("sample=8 with 4 ranks a sample uses the 32 ranks better than")


def test_a_batch_beyond_the_noise_scale_wants_fewer_replicas() -> None:
    beyond, better = advise({"sample": 8}, 64, 10**6, noise_scale=17.3)
    assert "beyond 17.3, the gradient noise scale" in beyond
    assert better.startswith("sample=2 with 4 ranks")


def test_replicas_without_a_sample_and_uneven_ones_are_mentioned() -> None:
    idle, better = advise({"sample": 8}, 6, 10_000)
    assert "leaves 2 of 8 replicas without a sample" in idle
    assert better.startswith("sample=4 with 2 ranks")
    (uneven,) = advise({"sample": 4}, 6, 10_000)
    assert "not a multiple of 4 replicas: replicas with 1 samples wait" in uneven


@pytest.mark.parallel([1, 2])
def test_a_grid_with_ranks_is_advised_as_its_extents_are() -> None:
    grid = dc.ProcessGrid(sample=-1)
    assert advise(grid, 64, 100) == advise({"sample": grid.size}, 64, 100) != []
