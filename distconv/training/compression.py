"""Gradients that travel in half precision: half the bytes, for a rounding error in each sum.

Halves are added up in single precision, each piece of the gradient by one rank, and rounded once
more on their way back; so all ranks get the same sums. With error feedback what a rounding has left
out is added in the next step (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", arXiv:1901.09847).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from distconv.comm.half_sums import WIDE, HalfSum, wire_type
from distconv.model.gradient_reduction import required_reduction
from distconv.model.parallelize import no_sync
from distconv.training.gradient_messages import GradientMessage, GradientPacking

Kind: TypeAlias = tuple[tuple[str, ...], torch.dtype, tuple[tuple[int, torch.Size], ...]]
"""The axes of a message, its type, and what is in it."""

_PURPOSE = "compressed gradients"


class GradientCompression:
    """Add up the gradients of a parallelized model in half precision.

    Gradients in half precision already travel as they are, and those that are summed over one rank
    not at all.

    Parameters
    ----------
    model: has been parallelized.
    wire: the type that travels: "bfloat16", with the range of float32 and 8 bits, or "float16",
        with 11 bits, beyond 65504 infinite and below 6e-8 zero.
    error_feedback: whether to keep what is rounded away, and to add it in the next step. It takes
        the memory of one gradient, which is not part of any checkpoint.

    Raises
    ------
    ValueError
        Where the model is not parallelized, or the type is another.
    """

    def __init__(self, model: nn.Module, wire: str = "bfloat16", *, error_feedback: bool = False):
        reduction = required_reduction("GradientCompression", model)
        self.wire, self.error_feedback = wire_type("GradientCompression", wire), error_feedback
        self._model, self._reduction, self._grid = model, reduction, reduction.grid
        self._packing = GradientPacking(model, self._grid, _PURPOSE)
        self._left_out: dict[Kind, Tensor] = {}
        """The remainder of rounding for each kind of message."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a step, in place of `loss.backward()`.

        All ranks of the grid call it together. Gradients of earlier passes are dropped, as by
        `zero_grad()`. Messages leave when the backward pass has ended.
        """
        self._model.zero_grad()
        with no_sync(self._model):
            loss.backward()  # type: ignore[no-untyped-call]
        before, self._left_out = self._left_out, {}
        messages = [m._replace(flat=self._summed(m, before)) for m in self._packing.pack()]
        self._reduction.give(self._packing.unpack(messages))

    def _summed(self, message: GradientMessage, before: dict[Kind, Tensor]) -> Tensor:
        """Return the sum of a message, with what was left out of one of its kind before."""
        axes, flat, places = message
        if self._grid.topology.parts(axes) == 1:
            return flat
        if flat.dtype not in WIDE:
            self._grid.transport.all_reduce(flat, self._grid.communicator(axes, _PURPOSE)).wait()
            return flat
        # With other parameters trained than before it is another kind.
        kind = axes, flat.dtype, tuple(places)
        if kind in before:
            flat += before[kind]
        total, left_out = HalfSum(flat, self._grid, axes, self.wire, _PURPOSE).complete()
        if self.error_feedback:
            # How many ranks have a gradient is not carried over to the next step.
            left_out[-len(places) :] = 0.0
            self._left_out[kind] = left_out
        return total
