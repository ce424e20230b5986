"""Buckets of gradients: copied side by side, summed over ranks, and set as views of the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distconv.grid.process_grid import ProcessGrid
from distconv.ops.support.operands import constant
from distconv.transport.interface import Request


class Bucket:
    """Parameters whose gradients are summed over ranks in one message.

    Gradients are copied side by side into fresh memory, and summed there. A gradient that autograd
    has made in this pass becomes a view of the sum; any other, which the program may hold, is
    overwritten.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        comm: Any,
        start_sum: Callable[[Tensor], Request] | None = None,
    ):
        self.parameters = parameters
        self.comm = comm
        """The communicator of the ranks over which the gradients are summed."""
        self._start_sum = start_sum
        """A function that starts the sum of a vector, in place of the carrier's all-reduce; or
        None."""
        self._strides = [_strides(p) for p in parameters]
        *self._starts, end = accumulate((p.numel() for p in parameters), initial=0)
        # A number for each parameter, after all elements, counts the ranks that have a gradient.
        self.elements = end + len(parameters)
        """The number of elements in the message."""
        self.uneven: dict[int, int] = {}
        """The indices of parameters to whose last sum some ranks added nothing, each with the
        number of ranks that did. On a GPU only where this rank had to read the counts."""
        self._sum: tuple[Tensor, list[tuple[int, Tensor]], tuple[bool, ...], Request] | None = None
        """The sum under way: the message; the parameters whose gradients are not views of it, or
        None, each with its piece; whether this rank adds its part of each gradient; the request."""

    @property
    def under_way(self) -> bool:
        """Return whether `start` was called without `finish`."""
        return self._sum is not None

    def start(self, parts: Sequence[bool], made: Sequence[bool], grid: ProcessGrid) -> None:
        """Start to sum the gradients. All ranks of the bucket call it together.

        Parameters
        ----------
        parts: for each gradient, whether it is this rank's summand; otherwise it is the sum
            already, equal on all ranks, and only the first rank adds it.
        made: for each gradient, whether autograd has made it in this pass, not added to an earlier
            one.
        """
        p = self.parameters[0]
        flat = torch.empty(self.elements, dtype=p.dtype, device=p.device)
        outside, used = [], []
        places = zip(self.parameters, self._strides, self._starts, parts, made, strict=True)
        for i, (p, strides, start, part, new) in enumerate(places):
            view, gradient = flat.as_strided(p.shape, strides, start), p.grad
            if gradient is None or not (part or self.comm.rank == 0):
                view.zero_()
            else:
                view.copy_(gradient)
            if gradient is not None and new and gradient.dtype == view.dtype:
                p.grad = view
            else:
                outside.append((i, view))
            used.append(part and gradient is not None)
        flat[-len(used) :] = constant(flat.device, tuple(used), flat.dtype)
        add_up = self._start_sum or (lambda flat: grid.transport.all_reduce(flat, self.comm))
        self._sum = flat, outside, tuple(used), add_up(flat)

    def finish(self) -> bool:
        """Wait for the sum and set it as the gradients; return False if none was started."""
        if self._sum is None:
            return False
        (flat, outside, used, request), self._sum = self._sum, None
        request.wait()

        def counted() -> list[int]:
            counts = flat[-len(used) :]
            if counts.is_meta:  # A dry run assumes that all ranks use the same parameters.
                return [n * self.comm.size for n in used]
            return [int(n.real) for n in counts.tolist()]  # for which the host waits on a GPU

        ranks = counted() if flat.is_cpu else []
        for i, view in outside:
            p = self.parameters[i]
            if not used[i]:
                ranks = ranks or counted()
                if not ranks[i]:
                    continue
            if p.grad is None:
                p.grad = view
            else:
                p.grad.copy_(view)
        self.uneven = {i: n for i, n in enumerate(ranks) if 0 < n < self.comm.size}
        return True


def fill_buckets(
    parameters: Sequence[tuple[Tensor, tuple[str, ...]]], bucket_bytes: int
) -> list[tuple[tuple[str, ...], list[Tensor]]]:
    """Return each bucket's axes and parameters, in the order in which backward passes fill buckets.

    Each of `parameters` comes with the grid axes over which its gradient is summed. The last
    parameters come first, as backward passes reach them first. Parameters of a bucket have equal
    axes and types; the bucket is full at `bucket_bytes`.
    """
    buckets = []
    filling: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
    for p, axes in reversed(parameters):
        chosen = filling.setdefault((axes, p.dtype), [])
        chosen.append(p)
        if sum(q.numel() * q.element_size() for q in chosen) >= bucket_bytes:
            buckets.append((axes, filling.pop((axes, p.dtype))))
    return buckets + [(axes, chosen) for (axes, _), chosen in filling.items()]


def _strides(p: Tensor) -> tuple[int, ...]:
    """Return strides for a gradient: the parameter's own if these have no gaps, else row-major."""
    own = p.stride()
    dense: Tensor = torch.empty_like(p, device="meta")
    return own if dense.stride() == own else torch.empty(p.shape, device="meta").stride()
