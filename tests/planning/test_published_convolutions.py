"""Published times of convolutions on one MI300A, and what its description says of them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
from torch import nn

from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute

MI300A = Machine.load(Path(__file__).parents[2] / "machines" / "el-capitan.json")

PUBLISHED = (
    ((64, 64), (128, 128, 128), (1.93, 3.48, 3.37)),
    ((128, 64), (128, 128, 128), (4.38, 3.99, 5.86)),
    ((64, 64), (128, 256, 256), (6.98, 12.71, 12.96)),
    ((64, 64), (64, 256, 256), (3.78, 6.54, 6.05)),
    ((128, 64), (64, 256, 256), (8.27, 8.13, 12.29)),
    ((128, 128), (64, 128, 128), (2.53, 4.28, 3.54)),
    ((128, 128), (32, 128, 128), (1.40, 2.19, 1.88)),
    ((256, 128), (64, 128, 128), (6.27, 6.34, 7.41)),
    ((256, 128), (32, 128, 128), (3.72, 3.87, 3.79)),
    ((512, 256), (32, 64, 64), (3.77, 4.00, 3.45)),
    ((256, 256), (32, 64, 64), (1.34, 2.38, 1.71)),
)
"""Channels in and out, a rank's block, and milliseconds forward and of the gradients of input and
weight: LLNL's ScaFFold benchmark (2026); bfloat16, channels last, 3^3, padding 1."""

FITTED, HELD_OUT = PUBLISHED[0::2], PUBLISHED[1::2]
"""From the first the machine's file takes the efficiency; the others it has not seen."""

OUTLIER = ((128, 64), (128, 256, 256), (18.9, 8_200.0, 45_401.0))
"""For this one shape the vendor's library found no fast kernel, the publication says."""


def predicted(channels: tuple[int, int], block: tuple[int, ...]) -> tuple[float, float]:
    """Return the milliseconds of a convolution, forward and both gradients, as planning has it."""
    convolution = nn.Conv3d(*channels, 3, padding=1, bias=False, dtype=torch.bfloat16)
    step = record_step(convolution, [(1, channels[0], *block)], {}, gpu=True, input_gradients=True)
    times = OperatorTimes(MI300A, 1)
    forward, backward = (
        times[event.operator] * 1e3
        for event in step.events
        if isinstance(event, Compute) and event.operator.convolves
    )
    return forward, backward


def test_published_times_are_predicted_within_a_quarter_in_the_median() -> None:
    errors = []
    for channels, block, (forward, *gradients) in HELD_OUT:
        for expected, published in zip(
            predicted(channels, block), (forward, sum(gradients)), strict=True
        ):
            errors.append(abs(expected / published - 1))
    assert median(errors) < 0.25 and max(errors) < 0.6


def test_a_kernel_that_a_library_does_not_have_is_beyond_a_roofline() -> None:
    channels, block, (forward, *gradients) = OUTLIER
    expected, expected_gradients = predicted(channels, block)
    assert forward / 1.5 < expected < forward * 1.5
    assert sum(gradients) > 1000 * expected_gradients
