"""The gradients of a parallelized module: summed over ranks during the backward pass.

Gradients are sent in buckets. Each bucket is one all-reduce, which starts as soon as the bucket and
all earlier buckets are full, in the same order on all ranks (Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", VLDB 2020).

The steps of a backward pass:

1. Before the forward pass `GradientReduction.prepare` registers hooks on the trained parameters. It
   makes new buckets if other parameters were trained in the previous pass.
2. Before autograd adds this rank's part of a gradient to `p.grad`, it calls
   `GradientReduction._before_accumulation`. The first such call of a pass runs `_begin_pass`, which
   marks all gradients as missing and all buckets as not started, and registers `_end_pass` for the
   end of the pass. Each call marks the gradient as a part: a sum of an earlier pass is kept on one
   rank and set to zero on the others.
3. After autograd has added the part, it calls `GradientReduction._after_accumulation`. If the
   bucket is now full, `Bucket.start` packs the gradients, and `reduce_hook(bucket)` starts their
   sum, while the backward pass continues.
4. At the end of the pass autograd calls `GradientReduction._end_pass`. It starts the buckets that
   are not full, because some of their parameters have no gradient on this rank.
5. `GradientReduction.wait` waits for the sum of each bucket, which `Bucket.unpack` sets as
   gradients. It calls the program's own post-accumulate-gradient hooks, and `backward()` returns.

Within `no_sync` only steps 1 and 2 run. Each rank keeps its part until a backward pass outside
`no_sync` sums the parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distconv import torch_private
from distconv.comm.collectives import WIDE, ErrorFeedback, HalfSum
from distconv.device.streams import number_of_stream
from distconv.geometry.layout import replicating_axes
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.words import PARAMETERS, user_line
from distconv.model.buckets import (
    Bucket,
    BucketSequence,
    ReducedParameter,
    ReduceHook,
    accumulating_nodes,
    alive,
)
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import check_counted_once, disown, own
from distconv.transport.interface import Request

REDUCTION_ATTRIBUTE = "_distconv_gradient_reduction"
"""The attribute of a module, and of each of its submodules, that holds its `GradientReduction`."""

_PURPOSE = "gradients"
"""The purpose, as in `ProcessGrid.communicator`, of the communicators that sum gradients."""


def reduction_of(module: nn.Module) -> GradientReduction | None:
    """Return the `GradientReduction` of a parallelized module or its submodule, else None.

    A copy of a parallelized module is not parallelized.
    """
    reduction: GradientReduction | None = module.__dict__.get(REDUCTION_ATTRIBUTE)
    return reduction if reduction is not None and reduction.covers(module) else None


@contextmanager
def reductions_used() -> Iterator[list[GradientReduction]]:
    """Collect the `GradientReduction` of each module that is called within a `with` block.

    The block's list is filled when the block ends, and has each reduction once. A copy of a
    parallelized module counts as the original.
    """
    found: dict[nn.Module, None] = {}
    used: list[GradientReduction] = []
    handle = register_module_forward_pre_hook(lambda m, _: found.update(dict.fromkeys(m.modules())))
    try:
        yield used
    finally:
        handle.remove()
    noted = (m.__dict__.get(REDUCTION_ATTRIBUTE) for m in found)
    used += dict.fromkeys(r for r in noted if r is not None)


def required_reduction(caller: str, module: nn.Module) -> GradientReduction:
    """Return the `GradientReduction` of a module, or raise `ValueError` if it has none.

    `caller` is the name of the calling function, for the message.
    """
    reduction = reduction_of(module)
    if reduction is None:
        raise ValueError(
            f"{caller}: the module is not parallelized; call parallelize(module, grid) first"
        )
    return reduction


class GradientReduction:
    """The sum of a module's gradients over the ranks of a grid, in every backward pass.

    Attributes
    ----------
    grid: the grid over which gradients are summed.
    whole: a weak reference to the parallelized module.
    parameters: the parameters of the module, in its order.
    buckets: the buckets of the parameters that are trained.
    reduce_hook: a function that starts the sum of a bucket; None to use `start_sum`.
    enabled: False within `no_sync`, where gradients are not summed.
    apart: True once a backward pass has run within `no_sync`.
    divisor: a number by which each rank's part of a gradient is divided, for `DistConvDDP`. Inputs
        may then be on smaller grids of some of the ranks, each with its own samples. None to sum
        without a division.
    layout: a checksum of the parameters' types, strides and trainability, from which the buckets
        follow; it must be equal on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        grid: ProcessGrid,
        bucket_bytes: int,
        wire: torch.dtype | None = None,
        error_feedback: bool = False,
    ):
        self.grid, self.whole = grid, ref(module)
        self.enabled, self.apart = True, False
        self.divisor: float | None = None
        self.reduce_hook: ReduceHook | None = None
        self._bucket_bytes, self._wire, self._error_feedback = bucket_bytes, wire, error_feedback
        tensors = list(module.parameters())
        PARAMETERS.update({p: i for i, p in enumerate(tensors)})
        for p in tensors:
            if isinstance(p, DistTensor) and not p.summed_by:
                p.summed_by = "module"
        # All ranks make all communicators here, whichever parameters each of them trains first.
        self.parameters = [
            ReducedParameter(p, i, grid, _axes_of_sum(p, grid), _PURPOSE)
            for i, p in enumerate(tensors)
        ]
        own((*tensors, *(p.leaf for p in self.parameters), *module.buffers()), grid.size)
        self.buckets = BucketSequence((), bucket_bytes)
        self._laid_out: list[Any] = []
        """The number, type, shape and strides of each trained parameter, from which the buckets
        follow."""
        self._stream: int | None = None
        """The number of the stream on which the parameters' nodes were made."""
        self._pass = -1
        """The number of the current backward pass, -1 between passes."""
        self._warned = False
        """Whether a warning was given that ranks train different parameters."""
        self.layout = 0
        self.prepare()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReduction:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a parallelized module belongs to its MPI job and cannot be pickled; save its "
            "state_dict()"
        )

    def covers(self, module: nn.Module) -> bool:
        """Return whether `module` is the module of this reduction or one of its submodules.

        A module compiled by torch shares the `__dict__` of the original, and counts as the
        original.
        """
        whole = self.whole()
        return whole is not None and any(vars(x) is vars(module) for x in whole.modules())

    def keep_for(self, blocks: Iterable[Tensor]) -> None:
        """Keep this reduction alive as long as the autograd graph of `blocks`.

        A backward pass then works even if the program has deleted the module.
        """
        for node in {x.grad_fn for x in blocks}:
            if node is not None:
                notes: Any = node.metadata
                notes[REDUCTION_ATTRIBUTE] = self

    def make_communicators(self, purpose: str) -> list[Any]:
        """Return communicators for `purpose`, by which a `reduce_hook` sums. Collective.

        There is one communicator for each set of axes over which gradients are summed. They are
        made before the backward pass, in which ranks might make them in different orders.
        """
        axes = dict.fromkeys(p.axes for p in self.parameters)
        return [self.grid.communicator(each, purpose) for each in axes]

    def release(self) -> None:
        """Remove all hooks and marks from the parameters.

        Raises RuntimeError if a gradient has not been summed over the ranks yet, after `no_sync`.
        """
        self.wait()
        self._check_sums("the module was unparallelized", self.parameters)
        for p in self.parameters:
            p.remove_hooks()
            disown((p.tensor, p.leaf))
            PARAMETERS.pop(p.tensor, None)
            PARAMETERS.pop(p.leaf, None)

    # Before the forward pass

    def prepare(self) -> None:
        """Register hooks on trained parameters; make new buckets if other parameters are trained.

        Raises RuntimeError if a frozen parameter has a gradient from `no_sync` that is not yet
        summed over the ranks.
        """
        trained = [p for p in self.parameters if p.leaf.requires_grad]
        self._put_hooks(trained)
        laid_out = [(p.number, p.leaf.dtype, p.leaf.shape, p.leaf.stride()) for p in trained]
        if laid_out == self._laid_out:
            return
        frozen = [p for p in self.parameters if not p.leaf.requires_grad]
        self._check_sums("parameters were frozen", frozen)
        self._laid_out = laid_out
        self.layout = crc32(repr([self.kind(p.tensor) for p in self.parameters]).encode())
        self.buckets = BucketSequence(trained, self._bucket_bytes)

    def _put_hooks(self, trained: list[ReducedParameter]) -> None:
        """Register hooks on parameters of `trained` without hooks, or whose autograd node is new.

        On a grid of one rank there is no sum, so hooks are registered only if gradients are
        divided.
        """
        if self.grid.size == 1 and self.divisor is None:
            return
        stream = number_of_stream(self.grid.device)
        if stream != self._stream:
            # A held node accumulates on the stream on which it was made, and a capture on another
            # stream may not wait for that stream. Without references to its nodes, torch makes new
            # ones.
            self._stream = stream
            for p in self.parameters:
                p.node = None
        nodes = accumulating_nodes([p.leaf for p in trained])
        for p, node in zip(trained, nodes, strict=True):
            if p.node is not node:
                before = partial(self._before_accumulation, ref(self), p.number)
                after = partial(self._after_accumulation, ref(self), p.number)
                p.hook(node, before, after)
            if torch_private.hooks_of(p.leaf):
                p.sum_for_hooks()

    def _check_sums(self, event: str, parameters: Iterable[ReducedParameter]) -> None:
        """Raise RuntimeError if a gradient of `parameters` is not yet summed over the ranks.

        `event` begins the message.
        """
        if self.grid.size > 1 and any(p.is_part and p.leaf.grad is not None for p in parameters):
            raise RuntimeError(
                f"{event} while gradients computed within no_sync are not yet summed over the "
                "ranks; first run a backward pass outside no_sync, or zero the gradients"
            )

    @property
    def why_apart(self) -> str:
        """Return a sentence about `no_sync` for errors about differing parameters, or ""."""
        return (
            "A backward pass has run within no_sync. Its gradients differ between ranks until a "
            "backward pass outside no_sync sums them; the optimizer must not step before. "
            if self.apart
            else ""
        )

    @property
    def is_of_shards(self) -> bool:
        """Return whether any parameter is sharded."""
        return any(isinstance(p.tensor, DistTensor) for p in self.parameters)

    @staticmethod
    def kind(p: Tensor) -> str:
        """Return a parameter's type, strides and trainability as text, to compare between ranks."""
        stride = "" if isinstance(p, DistTensor) else f" of strides {p.stride()}"
        return f"{p.dtype}{stride}, requires_grad={p.requires_grad}"

    # Within the backward pass. Hooks run for every parameter in every step: nothing wraps them.

    @staticmethod
    def _before_accumulation(
        reference: ref[GradientReduction], number: int, gradients: tuple[Tensor | None]
    ) -> tuple[Tensor] | None:
        """Mark the gradient of parameter `number` as this rank's part, before autograd adds it.

        Returns the part to add if it differs from the given part: divided by `divisor`, or zero.
        Otherwise returns None.
        """
        self = reference() or alive(reference)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): the sum of parameter gradients over the ranks cannot "
                "be differentiated; differentiate with respect to inputs, backward(inputs=[x])"
            )
        part = gradients[0]
        if part is None:
            return None
        p = self.parameters[number]
        scaled = None
        if self.divisor is not None and self.divisor != 1:
            scaled = (part * (1 / self.divisor),)
        if self.grid.size == 1:
            p.expect_part()
            return scaled
        backward_pass = torch_private.backward_pass()
        if backward_pass != self._pass:
            self._begin_pass(backward_pass)
        if len(torch_private.accumulation_hooks_of(p.leaf)) > 1:
            p.defer_hooks(self.enabled)
        p.expect_part()
        if torch_private.hooks_of(p.leaf) and p.holds_sum_of_hooks() and p.comm.rank > 0:
            # Results of hooks on the sum are the same on all ranks, and count once.
            return (torch.zeros_like(part),)
        return scaled

    @staticmethod
    def _after_accumulation(reference: ref[GradientReduction], number: int, _: Tensor) -> None:
        """Record that the gradient of parameter `number` is accumulated, and start full buckets."""
        self = reference() or alive(reference)  # and with it the node with the other hook
        if self.grid.size == 1 or not self.enabled:
            return
        full = self.buckets.note(self.parameters[number])
        if full and not self.starts_at_the_end:
            self.buckets.start_full(self.reduce_hook or self.start_sum)

    def _begin_pass(self, backward_pass: int) -> None:
        check_counted_once()
        if any(bucket.packed is not None and bucket.request is None for bucket in self.buckets):
            raise RuntimeError(
                "a second backward pass through a model within ConcurrentReductions while the "
                "reductions of the first are in flight; leave the context between the passes, or "
                "run the first pass in no_sync"
            )
        self.wait()
        self._pass = backward_pass
        for p in self.parameters:
            p.is_new = False
        self.buckets.begin()
        if self.enabled:
            torch_private.at_end_of_backward(_EndOfBackward(self._end_pass))
        else:
            self.apart = True

    def _end_pass(self, failed: bool) -> None:
        """End a backward pass: start the sums that have not started, and set sums as gradients.

        If the pass has `failed`, no further sum is started.
        """
        if not failed:
            self.start_rest()
        self.wait(hooks=not failed)

    @property
    def starts_at_the_end(self) -> bool:
        """Return whether all sums start after the backward pass, in one order on all ranks.

        A rank without a gradient for a parameter starts the parameter's bucket at the end. If the
        transport needs messages in one order, other ranks must not start that bucket during the
        pass.
        """
        return self.grid.transport.ordered or self._wire is not None

    def start_rest(self) -> None:
        """Start the sums of all buckets that have not started. Collective."""
        hook = self.reduce_hook or self.start_sum
        while self.grid.size > 1 and self.buckets.start_next(hook) is not None:
            pass

    def start_sum(self, bucket: Bucket, purpose: str = _PURPOSE) -> Request:
        """Start to sum a bucket over its ranks, sent in the 16-bit type `wire` if that was chosen.

        This is the default `reduce_hook`. `purpose` is the purpose of the communicator, as in
        `make_communicators`. Collective over the ranks of the bucket.
        """
        grid, flat = self.grid, bucket.buffer
        if self._wire is None or flat.dtype not in WIDE or bucket.comm.size == 1:
            return grid.transport.all_reduce(flat, grid.communicator(bucket.axes, purpose))
        if self._error_feedback and bucket.feedback is None:
            # The counts after the gradients are not rounded.
            bucket.feedback = ErrorFeedback(len(bucket.members))
        return HalfSum(flat, grid, bucket.axes, self._wire, purpose, bucket.feedback)

    def wait(self, hooks: bool = True) -> None:
        """Wait for all sums in flight, and set gradients to the sums.

        Then call the program's post-accumulate-gradient hooks, unless `hooks` is false.
        """
        self._pass = -1
        summed: list[ReducedParameter] = []
        for bucket in self.buckets:
            if bucket.request is None:
                continue
            summed += (members := bucket.wait())
            if members and bucket.uneven and not self._warned:
                self._warn(bucket)
        if hooks:
            for p in summed:
                p.call_deferred_hooks()

    def _warn(self, bucket: Bucket) -> None:
        """Warn once per module that a parameter has received a gradient on some ranks only.

        One rank of the bucket warns; on GPUs the ranks without a gradient warn, as only these ranks
        read the counts.
        """
        ranks, kind = bucket.comm.size, self._wire or bucket.members[0].leaf.dtype
        # Counts are sent with the gradients in their type, in which large counts are rounded.
        exact = ranks <= 2 / torch.finfo(kind).eps
        if not exact or (bucket.comm.rank and not self.grid.computes_on_gpu):
            return
        self._warned = True
        i, some = next(iter(bucket.uneven.items()))
        number = bucket.members[i].number
        module = self.whole()
        names = [] if module is None else [name for name, _ in module.named_parameters()]
        name = names[number] if number < len(names) else "a parameter"
        warnings.warn(
            f"backward at {user_line()}: {name} of the parallelized module received a gradient on "
            f"{some} of {ranks} ranks only. If ranks choose different layers, by rank or by data "
            "that differ between ranks, the gradients are wrong. They are right only if each rank "
            "chooses layers for its own block, between to_local() and DistTensor.from_local. This "
            "warning is not repeated for this module",
            stacklevel=2,
        )


class _EndOfBackward:
    """A callback that calls `end(failed)` once, at the end of a backward pass or when it fails.

    Autograd calls the callback at the end of the pass, and deletes it without a call if the pass
    fails.
    """

    __slots__ = ("_end", "_over")

    def __init__(self, end: Callable[[bool], None]):
        self._end, self._over = end, False

    def __call__(self) -> None:
        self._end(False)
        self._over = True

    def __del__(self) -> None:
        if not self._over:
            self._end(True)


def _axes_of_sum(p: Tensor, grid: ProcessGrid) -> tuple[str, ...]:
    """Return the grid axes along which `p` is replicated, over which its gradient is summed."""
    return replicating_axes(p.cuts if isinstance(p, DistTensor) else (), grid.topology)
