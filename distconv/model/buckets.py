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
    """A placeholder for the program's post-accumulate-gradient hook, deferred until the sum is set.

    The placeholder has the number of `hook` among the parameter's hooks, so that the program's
    handle removes the placeholder.
    """

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[Tensor], None]):
        self.hook = hook

    def __call__(self, p: Tensor) -> None:
        """Do nothing: autograd calls this method before the gradient is summed over the ranks."""


class ReducedParameter:
    """A parameter whose gradient is summed over the ranks of a grid that hold the parameter.

    Autograd adds this rank's part of the gradient to `leaf.grad` in a backward pass. The bucket of
    the parameter then replaces the part by the sum of the parts of all ranks.

    Attributes
    ----------
    tensor: the parameter of the module; a DistTensor if it is sharded.
    leaf: the leaf of autograd: `tensor`, or this rank's block if `tensor` is sharded.
    number: the position among the parameters of the module.
    axes: the grid axes over which the gradient is summed.
    comm: the communicator of the ranks along `axes`.
    bucket: the position of the parameter's bucket in its `BucketSequence`.
    is_part: whether the gradient is this rank's part only, not yet the sum.
    is_new: whether autograd has created `leaf.grad` in the current backward pass. Otherwise
        autograd has added the part to an earlier gradient, to which the program may hold a
        reference.
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
        """The handle of the hook on the parameter, and then the handles of hooks on its autograd
        nodes."""
        self._sum_handle: RemovableHandle | None = None
        """The handle of the hook that sums before the program's own hooks; None without hooks."""

    def expect_part(self) -> None:
        """Mark the gradient as this rank's part, before autograd accumulates into the gradient.

        A gradient that an earlier backward pass has summed is kept on the first rank and set to
        zero on the others, so that the next sum counts the gradient once.
        """
        gradient = self.leaf.grad
        self.is_new = gradient is None
        if gradient is not None and not self.is_part and self.comm.rank > 0:
            gradient.zero_()
        self.is_part = True

    def set_sum(self, gradient: Tensor | None) -> None:
        """Set the gradient to `gradient`, which is summed over the ranks, or to None."""
        self.leaf.grad = gradient
        self.is_part = self.is_new = False

    def hook(self, node: Node, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Register hooks that autograd calls before and after it accumulates the gradient.

        `node` is the autograd node that accumulates the gradient; torch makes a new node when the
        type of the parameter or the stream changes. `before` is a hook of the node, as hooks of the
        tensor would also run in autograd.grad. `after` is a hook of the parameter, and is
        registered once.
        """
        if not self._handles:
            self._handles.append(self.leaf.register_post_accumulate_grad_hook(after))
        self._handles.append(node.register_prehook(before))
        self.node = node

    def sum_for_hooks(self) -> None:
        """Pass the gradient summed over the ranks to the program's own hooks on the parameter.

        A hook that sums is registered before the program's hooks, and is removed once the program
        has no hooks.
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
        """Return whether the gradient is the result of the program's hooks on the sum.

        Called only if the program has hooks. Returns False for a DistTensor, whose hooks sum by
        themselves. Raises RuntimeError if the hooks have received this rank's part.
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
            return  # only distconv's own hook
        self.defer_hooks(True)  # this rank may have had no part of the gradient
        with torch.no_grad():
            for _, after in self._deferred():
                after.hook(self.leaf)

    def _deferred(self) -> list[tuple[int, _AfterSum]]:
        """Return the program's deferred hooks, each with its number among the parameter's hooks."""
        hooks = torch_private.accumulation_hooks_of(self.leaf) or {}
        return [(number, hook) for number, hook in hooks.items() if isinstance(hook, _AfterSum)]

    def remove_hooks(self) -> None:
        """Remove all hooks of this class, and restore the program's deferred hooks."""
        for handle in self._handles:
            handle.remove()
        if self._sum_handle is not None:
            self._sum_handle.remove()
        hooks = torch_private.accumulation_hooks_of(self.leaf)
        for number, after in self._deferred():
            hooks[number] = after.hook


_Owner = TypeVar("_Owner")


def alive(reference: ref[_Owner]) -> _Owner:
    """Return the object that `reference` refers to; raise RuntimeError if its module was deleted.

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
    """Return, for each of `leaves`, the autograd node that accumulates its gradient.

    One call of an autograd function finds all nodes, several times as fast as one call for each.
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
    flat: a vector of all elements, followed by one number for each gradient: 1 if this rank has a
        part of the gradient, else 0; after the sum, the number of ranks that have a part.
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
    members: the parameters, all with the same axes and type.
    axes: the grid axes over which the gradients are summed.
    comm: the communicator of the ranks along `axes`.
    elements: the number of elements in the message.
    missing: the number of gradients that the current backward pass has not made yet.
    packed: the packed gradients between `start` and the end of `wait`, else None.
    request: the request of the sum in flight, else None.
    feedback: the rounding errors of the last sum, if they are kept.
    uneven: for each member of which only some ranks had a part in the last sum, by index, the
        number of ranks that had a part. On a GPU it is known only if this rank had to read the
        counts.
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
        """Pack the gradients, and start their sum by `reduce_hook`. Collective over `comm`."""
        self.packed = self.pack()
        self.request = reduce_hook(self)

    def wait(self) -> list[ReducedParameter]:
        """Wait for the sum if it is in flight, set the gradients, and return their parameters."""
        if self.request is None or self.packed is None:
            return []
        request, packed = self.request, self.packed
        self.request = self.packed = None
        request.wait()
        return self.unpack(packed)

    @property
    def buffer(self) -> Tensor:
        """Return the vector of the packed gradients, which a `ReduceHook` sums in place."""
        assert self.packed is not None
        return self.packed.flat

    def pack(self) -> PackedGradients:
        """Copy the gradients into one vector, and free gradients that autograd made in this pass.

        A gradient that is summed already, and so equal on all ranks, is zero on all but the first
        rank.
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
        """Set the gradients to the sums in `packed`, and return their parameters.

        A gradient of which no rank has a part is left unchanged.
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

Like a communication hook of DistributedDataParallel, the function is called for each bucket in the
same order on all ranks, within the backward pass or at its end, and returns a request. After
`request.wait()` the buffer has the sums over the ranks of `bucket.comm`, which the bucket then sets
as gradients. If the function returns None, the gradients stay packed until a request is assigned to
`bucket.request`.
"""


class BucketSequence:
    """The buckets of a list of parameters, whose sums start in the same order on all ranks.

    A bucket starts as soon as it and all earlier buckets are full. The last parameters are in the
    first buckets, as backward passes compute their gradients first.

    Parameters
    ----------
    parameters: the parameters in the order of the module; the attribute `bucket` of each is set.
    bucket_bytes: the bytes of gradients from which on a bucket gets no further parameters.
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
        """Begin a backward pass: mark all gradients as missing, and all buckets as not started."""
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def note(self, p: ReducedParameter) -> bool:
        """Record that the gradient of `p` is computed; return whether its bucket is now full."""
        bucket = self._buckets[p.bucket]
        bucket.missing -= 1
        return not bucket.missing

    def start_full(self, reduce_hook: ReduceHook) -> None:
        """Start the sums of full buckets in order, up to the first bucket that is not full."""
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self.start_next(reduce_hook)

    def start_next(self, reduce_hook: ReduceHook) -> Bucket | None:
        """Start the next bucket in order, full or not, and return it; None if all have started."""
        if self._started == len(self._buckets):
            return None
        bucket = self._buckets[self._started]
        bucket.start(reduce_hook)
        self._started += 1
        return bucket


def _strides(p: Tensor) -> tuple[int, ...]:
    """Return strides for the gradient of `p`: the same if `p` is dense, else row-major."""
    own = p.stride()
    dense: Tensor = torch.empty_like(p, device="meta")
    return own if dense.stride() == own else torch.empty(p.shape, device="meta").stride()
