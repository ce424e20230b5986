"""Parameters whose gradients are summed over ranks, and the buckets in which they are sent.

A bucket copies the gradients of its parameters side by side, sums them over ranks, and sets views
of the sum as gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from distconv import torch_private
from distconv.comm.collectives import ErrorFeedback, all_reduce_with_grad
from distconv.grid.process_grid import ProcessGrid
from distconv.ops.support.operands import constant
from distconv.tensor.base import shards_of
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import is_summed, mark_summed
from distconv.torch_private import ShardFunction
from distconv.transport.interface import Request

# A parameter, and the hooks that autograd calls for it.


class _AfterSum:
    """A post-accumulate-gradient hook of the program, which waits for the sum over the ranks.

    It stands in its place among the hooks of the parameter, so that its handle removes it.
    """

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[Tensor], None]):
        self.hook = hook

    def __call__(self, p: Tensor) -> None:
        """Do nothing when this rank's part has been accumulated."""


class ReducedParameter:
    """A parameter whose gradient is summed over the ranks of a grid that hold the parameter.

    Autograd adds this rank's part of the gradient to `leaf.grad` in a backward pass. The bucket of
    the parameter then replaces the part by the sum of the parts of all ranks.

    Attributes
    ----------
    tensor: the parameter as the module has it.
    leaf: the parameter as autograd knows it; for a sharded one, this rank's block.
    number: the position among the parameters of the module.
    axes: the grid axes over which the gradient is summed.
    comm: the communicator of the ranks along these axes.
    bucket: the position of the parameter's bucket in its `BucketSequence`.
    is_part: whether the gradient is this rank's part only, not yet the sum.
    is_new: whether autograd has made the gradient in the current backward pass. Otherwise it has
        added the part to an earlier gradient, which the program may hold.
    node: the autograd node with this parameter's hook; None if it has no hook yet.
    """

    def __init__(
        self, tensor: Tensor, number: int, grid: ProcessGrid, axes: tuple[str, ...], purpose: str
    ):
        self.tensor, self.number, self.axes, self._grid = tensor, number, axes, grid
        (self.leaf,) = shards_of(tensor)
        self.comm = grid.communicator(axes, purpose)
        self.bucket = 0
        self.is_part = self.is_new = False
        self.node: Node | None = None
        self._handles: list[Any] = []
        """The handles of the hook on the parameter, and of those on its nodes after it."""
        self._sum_handle: RemovableHandle | None = None
        """The handle of the hook that sums for the program's own hooks."""

    def expect_part(self) -> None:
        """Note that autograd is about to add this rank's part to the gradient.

        A sum of an earlier backward pass becomes a part again, the whole of it on the first rank.
        """
        gradient = self.leaf.grad
        self.is_new = gradient is None
        if gradient is not None and not self.is_part and self.comm.rank > 0:
            gradient.zero_()
        self.is_part = True

    def set_sum(self, gradient: Tensor | None) -> None:
        """Set the gradient to a sum over the ranks, or to None."""
        self.leaf.grad = gradient
        self.is_part = self.is_new = False

    def hook(self, node: Node, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Let autograd call `before` and `after` when it accumulates the gradient.

        `node` accumulates the gradient. torch makes a new node when the type of the parameter or
        the stream changes, and `before` is a hook of the node: hooks of the tensor would run in
        autograd.grad as well. `after` is a hook of the parameter, which stays.
        """
        if not self._handles:
            self._handles.append(self.leaf.register_post_accumulate_grad_hook(after))
        self._handles.append(node.register_prehook(before))
        self.node = node

    def sum_for_hooks(self) -> None:
        """Let the program's own hooks on the parameter get the gradient summed over the ranks.

        A hook that sums comes before them, and is removed when the program has none any more.
        """
        hooks = torch_private.hooks_of(self.leaf)
        if isinstance(self.tensor, DistTensor) or self._grid.size == 1:
            return  # the hooks of a DistTensor sum by themselves
        if self._sum_handle is None:
            others = dict(hooks)
            hooks.clear()  # hooks run in the order of their registration
            self._sum_handle = self.leaf.register_hook(partial(self._sum, ref(self)))
            hooks.update(others)
            mark_summed(self.leaf, True)
        elif len(hooks) == 1:
            mark_summed(self.leaf, False)
            self._sum_handle.remove()
            self._sum_handle = None

    @staticmethod
    def _sum(reference: ref[ReducedParameter], part: Tensor | None) -> Tensor:
        self = alive(reference)
        own = torch.zeros_like(self.leaf) if part is None else part
        counted = torch.cat([own.reshape(-1), own.new_full((1,), part is None)])
        total = all_reduce_with_grad(counted, self._grid, self.axes)
        if total[-1].item():
            raise RuntimeError(
                f"a parameter of shape {tuple(self.leaf.shape)} has a hook, but no gradient on "
                "some ranks, where the hook would not run; change the gradient after backward() "
                "has returned"
            )
        return total[:-1].view(own.shape)

    def holds_sum_of_hooks(self) -> bool:
        """Return whether the program's hooks have got the sum, and not this rank's part.

        The program has such hooks. Raises RuntimeError if they have got this rank's part.
        """
        if isinstance(self.tensor, DistTensor):
            return False
        if not is_summed(self.leaf):
            raise RuntimeError(
                f"a parameter of shape {tuple(self.leaf.shape)} received a hook after the forward "
                "pass, and the hook has received only this rank's part of the gradient; register "
                "the hook before the forward pass"
            )
        return True

    def defer_hooks(self, enabled: bool) -> None:
        """Defer the program's post-accumulate-gradient hooks until the sum over the ranks is set.

        `enabled` is false within no_sync, where no sum is computed: RuntimeError is raised if the
        program has registered such a hook.
        """
        hooks = torch_private.accumulation_hooks_of(self.leaf)
        if len(hooks) == 1:
            return
        if not enabled:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.leaf.shape)} has a post-accumulate-gradient "
                "hook, and within no_sync its gradient is not summed over the ranks; run the "
                "backward pass outside no_sync, or register the hook after it"
            )
        for number, hook in list(hooks.items()):
            if number != self._handles[0].id and not isinstance(hook, _AfterSum):
                hooks[number] = _AfterSum(hook)

    def call_deferred_hooks(self) -> None:
        """Call the program's post-accumulate-gradient hooks, now that the sum is set."""
        if len(torch_private.accumulation_hooks_of(self.leaf)) == 1:
            return  # distconv's own
        self.defer_hooks(True)  # this rank may have had no part of the gradient
        with torch.no_grad():
            for _, after in self._deferred():
                after.hook(self.leaf)

    def _deferred(self) -> list[tuple[int, _AfterSum]]:
        """Return the hooks that wait for the sum, each with its number."""
        hooks = torch_private.accumulation_hooks_of(self.leaf) or {}
        return [(number, hook) for number, hook in hooks.items() if isinstance(hook, _AfterSum)]

    def remove_hooks(self) -> None:
        """Remove all hooks, and let those of the program run as torch calls them."""
        for handle in self._handles:
            handle.remove()
        if self._sum_handle is not None:
            self._sum_handle.remove()
        hooks = torch_private.accumulation_hooks_of(self.leaf)
        for number, after in self._deferred():
            hooks[number] = after.hook


_Owner = TypeVar("_Owner")


def alive(reference: ref[_Owner]) -> _Owner:
    """Return the object of a weak reference; raise RuntimeError if its module was deleted.

    Parameters and autograd's nodes hold hooks, unseen by Python's garbage collector. A hook that
    held its object would keep the module alive for ever.
    """
    owner = reference()
    if owner is None:
        raise RuntimeError(
            "the parallelized module of a parameter no longer exists, so the gradient of the "
            "parameter cannot be summed over the ranks; keep a reference to the module while its "
            "parameters are trained"
        )
    return owner


class _Edges(ShardFunction):
    """An autograd function whose node refers to the autograd nodes of all its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return inputs[0].new_empty(())


def accumulating_nodes(leaves: Sequence[Tensor]) -> list[Node]:
    """Return the autograd node of each parameter, which accumulates its gradient.

    One call finds all of them; torch takes several times as long to return them one by one.
    """
    if not leaves:
        return []
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return accumulating_nodes(leaves)
    # Earlier versions of torch keep the node only as long as its result.
    result = _Edges.apply(*leaves)
    return [node for node, _ in result.grad_fn.next_functions]


# Buckets of parameters.


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
