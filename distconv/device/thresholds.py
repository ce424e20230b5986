"""Sizes from which one way of computing is faster than another, measured on each kind of device.

A number measured on one kind of device says nothing about another. Sizes that only decide between
kernels of CPUs stay beside these kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from distconv.device.kinds import is_accelerator


class Thresholds(NamedTuple):
    """Sizes in elements, for one kind of device.

    Attributes
    ----------
    overlapped, overlapped_transposed: the smallest block for which a convolution or a transposed
        convolution overlaps communication with computation.
    own_batch_norm: the largest block that torch's own batch norm normalises in training where no
        communication is needed.
    most_indices: the most indices with which one indexed copy of several boxes is faster than a
        copy of each. The indices of a plan stay in memory, 8 bytes each.
    own_group_norm: whether torch's own group norm is fast and accurate for blocks in channels last.
    """

    overlapped: int
    overlapped_transposed: int
    own_batch_norm: float
    most_indices: int
    own_group_norm: bool


HOST = Thresholds(
    # Assembled, a network of 8 small layers took 0.91 of the time with blocks of 2**14 elements,
    # 0.98 with 2**15 and 1.015 with 2**16.
    overlapped=2**15 + 1,
    # Assembling was measured to be faster with fewer inputs than a quarter of the weights only.
    overlapped_transposed=0,
    # torch takes several times as long for larger blocks with rows last, and adds up too many
    # elements one by one with channels last to be accurate to 1e-5.
    own_batch_norm=2**18,
    # Measured in float32: eight boxes of 16 x 64 x 64 took 5 us by 4,160 indices, and 55 us box by
    # box; those of 64 x 128 x 128 42 us by 33,024 and 87 us; those of 128 x 512 x 512 1.85 ms by
    # 262,656 and 1.28 ms. Contiguous rows take one index each.
    most_indices=2**17,
    # torch takes several times as long, and computes the variance as E[x^2] - E[x]^2.
    own_group_norm=False,
)

ACCELERATOR = Thresholds(
    # One H100, 3x3 convolutions with two neighbours, both passes: 2**26 elements is the smallest
    # block for which overlapping was faster (64 channels x 1024^2: 0.98 of the time).
    overlapped=2**26,
    overlapped_transposed=2**26,
    own_batch_norm=float("inf"),
    # An H100 launches a kernel in 5 to 10 us, and moves this many elements in as much time as it
    # takes to launch eight.
    most_indices=2**22,
    own_group_norm=True,
)


def on_accelerator(block: Tensor, simulated: bool) -> bool:
    """Return whether operators on `block` run on an accelerator.

    `simulated` is the answer for a block without elements, as in a dry run: whether it stands for a
    block on an accelerator.
    """
    return simulated if block.is_meta else is_accelerator(block.device)


def thresholds(accelerator: bool) -> Thresholds:
    """Return the thresholds of accelerators, or of hosts."""
    return ACCELERATOR if accelerator else HOST
