"""Sizes at which one method becomes faster than another, measured on each kind of device."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.device.kinds import HOSTS


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of one kind of device."""

    most_indices: int
    """The most indices with which one indexed copy of several boxes is faster than a copy of each.
    The indices of a plan stay in memory, 8 bytes each."""


_HOST = Thresholds(
    # Measured in float32: eight boxes of 16 x 64 x 64 took 5 us by 4,160 indices, and 55 us box by
    # box; those of 64 x 128 x 128 42 us by 33,024 and 87 us; those of 128 x 512 x 512 1.85 ms by
    # 262,656 and 1.28 ms. Contiguous rows take one index each.
    most_indices=2**17,
)
_ACCELERATOR = Thresholds(
    # An H100 launches a kernel in 5 to 10 us, and moves this many elements in as much time as it
    # takes to launch eight.
    most_indices=2**22,
)


def thresholds(kind: str) -> Thresholds:
    """Return the thresholds of a kind of device, such as "cpu" or "cuda"."""
    return _HOST if kind in HOSTS else _ACCELERATOR
