"""All-reduce of vectors by messages in half precision; the sums are computed in float32.

With error feedback a rank adds its rounding error to the next vector (Karimireddy et al., "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distconv.grid.interface import Grid

WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The types of messages, by name."""

WIDE = (torch.float32, torch.float64)
"""The types of vectors that half precision makes smaller."""


def wire_type(owner: str, wire: str) -> torch.dtype:
    """Return the torch type called `wire`, "bfloat16" or "float16".

    Raises ValueError for another name; its message begins with `owner`, the function to which the
    user has passed `wire`.
    """
    if wire not in WIRES:
        raise ValueError(f"{owner}: wire={wire!r} is unknown; choose {' or '.join(WIRES)}")
    return WIRES[wire]


class ErrorFeedback:
    """The rounding errors that this rank made in one sum of a vector, to add to the next vector.

    The last `exact` elements of a vector are counts, for which no rounding errors are kept.
    """

    def __init__(self, exact: int = 0):
        self._exact = exact
        self._left_out: Tensor | None = None

    def add_to(self, padded: Tensor) -> None:
        """Add the kept rounding errors to the next vector, `padded`, which ends with padding."""
        if self._left_out is not None:
            padded += self._left_out

    def keep(self, left_out: Tensor, elements: int) -> None:
        """Keep the rounding errors of a padded vector, of which `elements` are not padding."""
        left_out[elements - self._exact :] = 0.0
        # A value too large for the halves is lost: as a rounding error it would be infinite.
        self._left_out = left_out.nan_to_num_(0.0, 0.0, 0.0)


class HalfSum:
    """A running all-reduce of the vector `flat` in place, over the ranks along `axes`.

    These ranks make it, and wait for it, together and in the order of all exchanges. All get the
    same sum. Each rank sums one piece of the vector, so for each element of the vector it sends and
    receives two numbers of half precision, of type `wire`. `feedback` carries rounding errors from
    one sum to the next. Sums that run at the same time need different purposes.
    """

    def __init__(
        self,
        flat: Tensor,
        grid: Grid,
        axes: Sequence[str],
        wire: torch.dtype,
        purpose: str,
        feedback: ErrorFeedback | None = None,
    ):
        transport = grid.transport
        ranks = grid.topology.peers(grid.rank, axes)
        self._flat, self._transport, self._feedback = flat, transport, feedback
        self._group = grid.communicator(axes, purpose)
        self._own = ranks.index(grid.rank)
        length = -(-len(flat) // len(ranks))
        padded = flat.new_zeros(len(ranks) * length)
        padded[: len(flat)] = flat
        if feedback is not None:
            feedback.add_to(padded)
        self._leaving = padded.to(wire).view(len(ranks), length)
        # Without feedback nobody needs the rounding errors, so their memory is freed here.
        self._left_out = None if feedback is None else padded.sub_(self._leaving.view(-1))
        self._arriving = transport.empty((len(ranks), length), self._leaving)
        others = [i for i in range(len(ranks)) if i != self._own]
        self._request = transport.exchange(
            [(ranks[i], self._arriving[i]) for i in others],
            [(ranks[i], self._leaving[i]) for i in others],
            transport.next_tag(),
        )

    def wait(self) -> None:
        """Wait for the messages, and overwrite the vector `flat` by the sum."""
        self._request.wait()
        arriving, own, flat = self._arriving, self._own, self._flat
        arriving[own] = self._leaving[own]
        total = arriving[0].float()
        for piece in arriving[1:]:
            total += piece
        rounded = total.to(arriving.dtype)
        if self._feedback is not None and self._left_out is not None:
            self._left_out.view(arriving.shape)[own] += total - rounded
            self._feedback.keep(self._left_out, len(flat))
        flat.copy_(self._transport.all_gather(rounded, self._group).view(-1)[: len(flat)])
