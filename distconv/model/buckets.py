"""Buckets of gradients: copied side by side, summed over ranks, and set as views of the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from distconv.comm.collectives import ErrorFeedback
from distconv.model.reduced_parameter import ReducedParameter
from distconv.ops.support.operands import constant
from distconv.transport.interface import Request


class PackedGradients(NamedTuple):
    """The gradients of a bucket, copied side by side.

    Attributes
    ----------
    flat: a vector of all elements. Behind them is a number for each gradient: 1 if this rank has a
        part of the gradient, else 0; after the sum, the number of ranks that have one.
    views: for each gradient its elements in `flat`, in the shape of the parameter.
    used: for each gradient, whether this rank has a part of it.
    """

    flat: Tensor
    views: list[Tensor]
    used: tuple[bool, ...]


class Bucket:
    """Parameters whose gradients are summed over ranks in one message.

    Gradients are copied side by side into new memory, and summed there. A gradient that autograd
    has made in this backward pass becomes a view of the sum. Any other gradient, which the program
    may hold, is overwritten.

    Attributes
    ----------
    members: the parameters. Their axes and types are equal.
    axes: the grid axes over which the gradients are summed.
    comm: the communicator of the ranks along these axes.
    elements: the number of elements in the message.
    missing: the number of gradients that the current backward pass has not made yet.
    packed: the gradients from `start` to the end of `wait`, else None.
    request: the sum under way; None if no sum is.
    feedback: the rounding errors of the last sum, if they are kept.
    uneven: the indices of members to whose last sum some ranks added nothing, each with the number
        of ranks that did. On a GPU only where this rank had to read the counts.
    """

    def __init__(self, members: Sequence[ReducedParameter]):
        self.members = members
        self.axes, self.comm = members[0].axes, members[0].comm
        self._strides = [_strides(p.leaf) for p in members]
        *self._starts, end = accumulate((p.leaf.numel() for p in members), initial=0)
        self.elements = end + len(members)
        self.missing = len(members)
        self.packed: PackedGradients | None = None
        self.request: Request | None = None
        self.feedback: ErrorFeedback | None = None
        self.uneven: dict[int, int] = {}

    def start(self, reduce_hook: ReduceHook) -> None:
        """Pack the gradients, and start their sum. All ranks of the bucket call it together."""
        self.packed = self.pack()
        self.request = reduce_hook(self)

    def wait(self) -> list[ReducedParameter]:
        """Wait for the sum, if one is under way, and return the members whose gradients it sets."""
        if self.request is None or self.packed is None:
            return []
        request, packed = self.request, self.packed
        self.request = self.packed = None
        request.wait()
        return self.unpack(packed)

    @property
    def buffer(self) -> Tensor:
        """Return the vector of the packed gradients, for a `ReduceHook`."""
        assert self.packed is not None
        return self.packed.flat

    def pack(self) -> PackedGradients:
        """Copy the gradients side by side. Where autograd has made them, their memory is freed.

        A gradient that is the sum already, equal on all ranks, counts on the first rank only.
        """
        first = self.members[0].leaf
        flat = torch.empty(self.elements, dtype=first.dtype, device=first.device)
        views, used = [], []
        for p, strides, start in zip(self.members, self._strides, self._starts, strict=True):
            leaf = p.leaf
            view, gradient = flat.as_strided(leaf.shape, strides, start), leaf.grad
            if gradient is None or not (p.is_part or self.comm.rank == 0):
                view.zero_()
            else:
                view.copy_(gradient)
            used.append(gradient is not None and (p.is_part or p.node is None))
            if gradient is not None and p.is_new and gradient.dtype == view.dtype:
                leaf.grad = None
            views.append(view)
        flat[-len(used) :] = constant(flat.device, tuple(used), flat.dtype)
        return PackedGradients(flat, views, tuple(used))

    def unpack(self, packed: PackedGradients) -> list[ReducedParameter]:
        """Set summed gradients, and return their parameters.

        Gradients of which no rank has a part stay as they are.
        """
        summed = []
        counts = self.counts(packed) if packed.flat.is_cpu else []
        for i, (p, view) in enumerate(zip(self.members, packed.views, strict=True)):
            p.is_part = p.is_new = False
            if not packed.used[i]:
                counts = counts or self.counts(packed)
                if not counts[i]:
                    continue
            if p.leaf.grad is None:
                p.leaf.grad = view
            else:
                p.leaf.grad.copy_(view)
            summed.append(p)
        self.uneven = {i: n for i, n in enumerate(counts) if 0 < n < self.comm.size}
        return summed

    def counts(self, packed: PackedGradients) -> list[int]:
        """Return for each summed gradient the number of ranks that have a part of it.

        The host waits for the sum on a GPU.
        """
        counts = packed.flat[-len(self.members) :]
        if counts.is_meta:  # A dry run assumes that all ranks use the same parameters.
            return [n * self.comm.size for n in packed.used]
        return [int(n.real) for n in counts.tolist()]

    def elements_of(self, flat: Tensor) -> Tensor:
        """Return the elements of the gradients in a packed vector, without the counts."""
        return flat[: -len(self.members)]


ReduceHook: TypeAlias = Callable[[Bucket], Request | None]
"""A function `reduce_hook(bucket)` that starts to sum `bucket.buffer` over ranks, in place.

It is like a communication hook of DistributedDataParallel: it is called for each bucket in the same
order on all ranks, within the backward pass or at its end, and returns a request. After
`request.wait()` the buffer has the sums over the ranks of `bucket.comm`, which the bucket then sets
as gradients. None leaves the gradients packed: whoever gave the hook assigns a request to
`bucket.request` later.
"""


class BucketSequence:
    """The buckets of some parameters, which start in one order on all ranks.

    A bucket starts as soon as this bucket and all before it are full. The last parameters fill the
    first buckets, as backward passes reach them first.

    Parameters
    ----------
    parameters: the parameters; each gets the position of its bucket.
    bucket_bytes: the bytes of gradients with which a bucket is full.
    """

    def __init__(self, parameters: Sequence[ReducedParameter], bucket_bytes: int):
        groups: list[list[ReducedParameter]] = []
        filling: dict[tuple[tuple[str, ...], torch.dtype], list[ReducedParameter]] = {}
        for p in reversed(parameters):
            kind = p.axes, p.leaf.dtype
            group = filling.setdefault(kind, [])
            group.append(p)
            if sum(q.leaf.numel() * q.leaf.element_size() for q in group) >= bucket_bytes:
                groups.append(filling.pop(kind))
        self._buckets = [Bucket(group) for group in (*groups, *filling.values())]
        for b, bucket in enumerate(self._buckets):
            for p in bucket.members:
                p.bucket = b
        self._started = 0

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def begin(self) -> None:
        """Begin a backward pass: all gradients are missing, and no bucket has started."""
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def note(self, p: ReducedParameter) -> bool:
        """Note that the gradient of `p` is there, and return whether its bucket is now full."""
        bucket = self._buckets[p.bucket]
        bucket.missing -= 1
        return not bucket.missing

    def start_full(self, reduce_hook: ReduceHook) -> None:
        """Start the buckets that are full, up to the first one that is not."""
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self.start_next(reduce_hook)

    def start_next(self, reduce_hook: ReduceHook) -> Bucket | None:
        """Start the first bucket that has not started, and return it; None if all have."""
        if self._started == len(self._buckets):
            return None
        bucket = self._buckets[self._started]
        bucket.start(reduce_hook)
        self._started += 1
        return bucket


def _strides(p: Tensor) -> tuple[int, ...]:
    """Return strides for a gradient: the parameter's own if these have no gaps, else row-major."""
    own = p.stride()
    dense: Tensor = torch.empty_like(p, device="meta")
    return own if dense.stride() == own else torch.empty(p.shape, device="meta").stride()
