"""Gradients of a dry run are summed in the buckets that a parallelized module fills."""

from __future__ import annotations

from distconv.planning.recording import Recording, Start
from tests.planning.test_prediction import SHAPE, network
from tests.planning.test_recorder import recorded


def sums(recording: Recording) -> list[Start]:
    """The sums of gradients that a step starts."""
    starts = (e for e in recording.events if isinstance(e, Start))
    return [s for s in starts if s.place.layer == "gradients"]


def test_small_buckets_add_up_to_the_bytes_of_one() -> None:
    (one,) = sums(recorded(SHAPE, {"height": 2}))
    several = sums(recorded(SHAPE, {"height": 2}, bucket_bytes=256))
    assert len(several) > 1
    assert {s.collective for s in several} == {"all_reduce"}
    # Beside the elements of each parameter there is one that counts its gradients.
    parameters = sum(p.numel() + 1 for p in network().parameters())
    assert sum(s.arriving[0][1] for s in several) == one.arriving[0][1] == 4 * parameters


def test_one_rank_keeps_its_gradients_and_sums_nothing() -> None:
    recording = recorded(SHAPE, {})
    assert not sums(recording)
