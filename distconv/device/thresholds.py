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
    own_group_norm: whether torch's own group norm is fast and accurate for blocks in channels last.
    """

    overlapped: int
    overlapped_transposed: int
    own_batch_norm: float
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
    # torch takes several times as long, and computes the variance as E[x^2] - E[x]^2.
    own_group_norm=False,
)

ACCELERATOR = Thresholds(
    # One H100, 3x3 convolutions with two neighbours, both passes: 2**26 elements is the smallest
    # block for which overlapping was faster (64 channels x 1024^2: 0.98 of the time).
    overlapped=2**26,
    overlapped_transposed=2**26,
    own_batch_norm=float("inf"),
    own_group_norm=True,
)


def on_accelerator(block: Tensor, simulated: bool) -> bool:
    """Return whether operators on `block` run on an accelerator.

    `simulated` is the answer for a block without elements, as in a dry run: whether it stands for a
    block on an accelerator.
    """
    return simulated if block.is_meta else is_accelerator(block.device)


def thresholds(block: Tensor, simulated: bool) -> Thresholds:
    """Return the thresholds for the device of `block`; `simulated` as for `on_accelerator`."""
    return ACCELERATOR if on_accelerator(block, simulated) else HOST
