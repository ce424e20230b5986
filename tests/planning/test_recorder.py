"""What a recorder notes of a step: messages of both passes, and operators, in order."""

from __future__ import annotations

from typing import Any

from distconv import Layout
from distconv.planning.losses import LOSSES, OPTIMIZERS
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, Recording, Start, Wait
from tests.planning.test_prediction import SHAPE, network


def recorded(shape: tuple[int, ...], grid: dict[str, int], **options: Any) -> Recording:
    """A step of the network as the first rank sees it, with a mean squared error."""
    given: dict[str, Any] = {"loss": LOSSES["mse"], "optimizer": OPTIMIZERS["sgd"], "rank": 0}
    return record_step(network(), [shape], grid, **(given | options))


def test_a_recording_has_the_halos_of_both_passes_and_one_sum_of_gradients() -> None:
    recording = recorded(SHAPE, {"height": 2})
    starts = [e for e in recording.events if isinstance(e, Start)]
    halos = [(s.place, s.arriving) for s in starts if s.collective is None]
    row = 4 * 4 * 16
    # The first layer sends no gradients of its input, which nobody asks for.
    assert halos == [
        (("0", "forward"), ((1, 3 * row),)),
        (("3", "forward"), ((1, 8 * row),)),
        (("3", "backward"), ((1, 8 * row),)),
    ]
    parameters = sum(p.numel() + 1 for p in network().parameters())
    (gradients,) = (s for s in starts if s.place.layer == "gradients")
    assert gradients.arriving == ((1, 4 * parameters),)
    waited = [e.number for e in recording.events if isinstance(e, Wait)]
    assert sorted(waited) == [s.number for s in starts]


def test_convolutions_run_between_the_start_of_an_exchange_and_its_end() -> None:
    recording = recorded((4, 3, 256, 256), {"height": 2})
    kinds = [
        e.operator.name if isinstance(e, Compute) else type(e).__name__
        for e in recording.events
        if e.place == ("3", "forward") and type(e).__name__ in ("Compute", "Start", "Wait")
    ]
    start, wait = kinds.index("Start"), kinds.index("Wait")
    assert "aten.convolution.default" in kinds[start:wait]


def test_layers_that_are_cut_otherwise_redistribute() -> None:
    cut = recorded(SHAPE, {"height": 2}, layouts={"3": Layout(sample="height")})
    moved = [e for e in cut.events if isinstance(e, Start) and e.place.layer == "3"]
    assert len([m for m in moved if m.collective is None]) == 2
