"""Published times of convolutions on one MI300A, and what its description says of them."""

from __future__ import annotations

from statistics import median

from benchmarks.fractals import MACHINE, PUBLISHED, convolution_times
from distconv.planning.machine import Machine

MI300A = Machine.load(MACHINE)

FITTED, HELD_OUT = PUBLISHED[0::2], PUBLISHED[1::2]
"""From the first the machine's file takes the efficiency; the others it has not seen."""

OUTLIER = ((128, 64), (128, 256, 256), (18.9, 8_200.0, 45_401.0))
"""For this one shape the vendor's library found no fast kernel, the publication says."""


def test_published_times_are_predicted_within_a_quarter_in_the_median() -> None:
    errors = []
    for channels, block, (forward, *gradients) in HELD_OUT:
        for expected, published in zip(
            convolution_times(MI300A, channels, block), (forward, sum(gradients)), strict=True
        ):
            errors.append(abs(expected / published - 1))
    assert median(errors) < 0.25 and max(errors) < 0.6


def test_a_kernel_that_a_library_does_not_have_is_beyond_a_roofline() -> None:
    channels, block, (forward, *gradients) = OUTLIER
    expected, expected_gradients = convolution_times(MI300A, channels, block)
    assert forward / 1.5 < expected < forward * 1.5
    assert sum(gradients) > 1000 * expected_gradients
