"""The gradients of a parallelized module: summed over ranks during the backward pass.

They travel in buckets. Each bucket is one all-reduce, which begins as soon as the bucket and all
before it are full, in an order that all ranks share (Li et al., "PyTorch Distributed: Experiences
on Accelerating Data Parallel Training", VLDB 2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from distconv.geometry.layout import replicating_axes
from distconv.grid.interface import Grid
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.words import PARAMETERS, user_line
from distconv.model.buckets import Bucket, fill_buckets
from distconv.model.parameter_hooks import ParameterHooks
from distconv.tensor.base import shards_of
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import disown, own
from distconv.transport.interface import Request

REDUCTION_ATTRIBUTE = "_distconv_gradient_reduction"
"""The attribute of a module, and of each of its submodules, that holds its `GradientReduction`."""


def reduction_of(module: nn.Module) -> GradientReduction | None:
    """Return the `GradientReduction` of a module or its submodule; None if it has none.

    A copy of a parallelized module has none.
    """
    reduction: GradientReduction | None = module.__dict__.get(REDUCTION_ATTRIBUTE)
    return reduction if reduction is not None and reduction.covers(module) else None


@contextmanager
def reductions_used() -> Iterator[list[GradientReduction]]:
    """Return a list that has, after the context, the reductions of modules called in it, once each.

    A copy of a parallelized module refers to the reduction of the original.
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
            f"{caller}: the module is not parallelized; call parallelize(module, grid) before"
        )
    return reduction


class GradientReduction:
    """The sum of a module's gradients over the ranks of a grid, in every backward pass.

    Attributes
    ----------
    grid: the grid over which gradients are summed.
    whole: a weak reference to the parallelized module.
    leaves: the parameters as autograd knows them; for a sharded one, this rank's block.
    parts: for each parameter, True while its gradient is this rank's summand only, not yet the sum.
    enabled: False within `no_sync`, where gradients are not summed.
    apart: True once a backward pass has run within `no_sync`.
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
        self.enabled, self.apart = True, False
        self._purpose = "gradients"
        self._held = False
        """Whether sums stay under way after a backward pass."""
        self.grid, self.whole = grid, ref(module)
        self._bucket_bytes = bucket_bytes
        self._parameters = list(module.parameters())
        PARAMETERS.update({p: i for i, p in enumerate(self._parameters)})
        for p in self._parameters:
            if isinstance(p, DistTensor):
                p.mark_summed_when_accumulated()
        self.leaves = shards_of(self._parameters)
        own((*self._parameters, *self.leaves, *module.buffers()), grid.size)
        self._axes = [axes_of_sum(p, grid) for p in self._parameters]
        """For each parameter, the grid axes over which its gradient is summed."""
        self._wire, self._error_feedback = wire, error_feedback
        self._buckets: list[Bucket] = []
        self._members: list[list[int]] = []
        """For each bucket the numbers of its parameters."""
        self._bucket_of: dict[int, int] = {}
        """For each parameter's number the number of its bucket."""
        self._laid_out: list[Any] = []
        self.parts = [False] * len(self.leaves)
        self._missing: list[int] = []
        """For each bucket, the number of gradients that this backward pass has not made yet."""
        self._made: set[int] = set()
        """The parameters whose gradient the current backward pass has made."""
        self._pass = -1
        self._started = 0
        self._averages = False
        """Whether parts of the grid have samples of their own."""
        self._warned = False
        """Whether a warning was given that ranks train different parameters."""
        self.layout = 0
        self._hooks = ParameterHooks(self, self._parameters, self.leaves, grid, self._axes)
        self._make_communicators()
        self.prepare()

    @property
    def trains(self) -> bool:
        """Return whether any parameter requires a gradient."""
        return bool(self._buckets)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReduction:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a parallelized module belongs to its MPI job; save its state_dict()")

    def covers(self, module: nn.Module) -> bool:
        """Return whether `module` is the module of this reduction or one of its submodules.

        A compiled module shares the dictionary of its module, and counts as the same one.
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

    def release(self) -> None:
        """Remove all hooks and marks from the parameters.

        Raises RuntimeError if a gradient has not been summed over the ranks yet, after `no_sync`.
        """
        self.settle()
        self._check_sums("the parameters leave their module", [True] * len(self.leaves))
        self._hooks.remove()
        tensors = (*self._parameters, *self.leaves)
        disown(tensors)
        for x in tensors:
            PARAMETERS.pop(x, None)

    def reduce(self) -> None:
        """Sum the gradients that backward passes within `no_sync` have not summed. Collective.

        Gradients that have been summed stay as they are.
        """
        if self.grid.size == 1:
            return
        self.settle()
        self._started = 0
        self._made.clear()
        self._end(failed=False)

    def give(self, sums: Iterable[Tensor | None]) -> None:
        """Set each parameter's gradient to a sum over the ranks that was computed elsewhere."""
        for p, gradient in zip(self.leaves, sums, strict=True):
            p.grad = gradient
        self.parts = [False] * len(self.leaves)

    def average(self, factor: float) -> None:
        """From now on divide each rank's part of a gradient by `factor`, for `DistConvDDP`.

        Inputs may then live on smaller grids of some of the ranks, each with samples of its own.
        """
        self._averages = True
        self._hooks.share = 1 / factor

    def takes(self, grid: Any) -> bool:
        """Return whether inputs may live on `grid`, a grid of some of the ranks; see `average`."""
        return self._averages and set(grid.ranks) <= set(self.grid.ranks)

    def travel_apart(self, number: int) -> None:
        """From now on sum gradients over communicators that no other reduction uses.

        `number` distinguishes them from those of other reductions, and is the same on all ranks.
        All ranks of the grid call it together, between steps.
        """
        self._purpose = f"gradients {number}"
        self._make_communicators()
        self._connect()
        self._laid_out = []
        self.prepare()

    def hold(self) -> None:
        """From now on leave sums running after backward passes; `settle` waits for them.

        If `_starts_at_the_end`, sums are not started either, until `start_held`, which ends this.
        """
        self.settle()
        self._held, self._started = True, 0

    def start_held(self) -> None:
        """Start the sums that backward passes since `hold` have not started, and end `hold`."""
        self._held = False
        if self.grid.size > 1:
            self._start_rest()

    def settle(self, hooks: bool = True) -> None:
        """Wait for all started sums, and set them as gradients.

        Then call the program's post-accumulate-gradient hooks, unless `hooks` is false.
        """
        self._pass = -1
        summed = []
        for bucket, members in zip(self._buckets, self._members, strict=True):
            if bucket.finish():
                summed += [n for i, n in enumerate(members) if self.parts[n] or i in bucket.uneven]
                for n in members:
                    self.parts[n] = False
                if bucket.uneven and not self._warned:
                    self._warn(bucket, members)
        if hooks:
            self._hooks.call_with_sums(summed)

    @property
    def why_apart(self) -> str:
        """Return a hint at `no_sync` for errors about differing parameters, or an empty text."""
        return (
            "A backward pass has run within no_sync, after which gradients differ between ranks "
            "until a pass outside sums them; no step of the optimizer may come between. "
            if self.apart
            else ""
        )

    def _make_communicators(self) -> None:
        for axes in dict.fromkeys(self._axes):
            # All ranks make it together, whichever parameters each of them trains first.
            self.grid.communicator(axes, self._purpose)

    def _connect(self) -> None:
        """Send one message over each communicator. All ranks of the grid call it together.

        A carrier may connect a communicator's ranks at its first use, where they wait for each
        other. Ranks that first use communicators in different orders would wait for ever.
        """
        for axes in dict.fromkeys(self._axes):
            comm = self.grid.communicator(axes, self._purpose)
            self.grid.transport.all_reduce(torch.zeros(1, device=self.grid.device), comm).wait()

    @property
    def is_of_shards(self) -> bool:
        """Return whether parameters are sharded."""
        return any(isinstance(p, DistTensor) for p in self._parameters)

    @property
    def _starts_at_the_end(self) -> bool:
        """Return whether all sums start after the backward pass, in one order on all ranks.

        A rank without a gradient for a parameter starts the parameter's bucket at the end. If
        exchanges need one order, other ranks must not start it earlier, within the pass.
        """
        return self.grid.transport.ordered or self._wire is not None

    def prepare(self) -> None:
        """Put hooks on trainable parameters, and lay out buckets anew if these have changed."""
        trainable = [(n, p) for n, p in enumerate(self.leaves) if p.requires_grad]
        self._hooks.watch([n for n, _ in trainable])
        layout = [(n, p.dtype, p.shape, p.stride()) for n, p in trainable]
        if layout == self._laid_out:
            return
        self._check_sums("parameters were frozen", [not p.requires_grad for p in self.leaves])
        self._laid_out = layout
        self.layout = crc32(repr([self.kind(p) for p in self._parameters]).encode())
        filled = fill_buckets([(p, self._axes[n]) for n, p in trainable], self._bucket_bytes)
        self._buckets = [
            Bucket(ps, self.grid.communicator(axes, self._purpose), self._sum_over(axes, ps))
            for axes, ps in filled
        ]
        number_of = {p: n for n, p in trainable}
        self._members = [[number_of[p] for p in bucket.parameters] for bucket in self._buckets]
        self._bucket_of = {n: b for b, members in enumerate(self._members) for n in members}

    def _check_sums(self, event: str, concerned: Iterable[bool]) -> None:
        """Raise RuntimeError if a gradient that has to be summed over the ranks by now is not.

        `concerned` says for each parameter whether to check it; `event` begins the message.
        """
        if any(
            x and part and p.grad is not None
            for p, part, x in zip(self.leaves, self.parts, concerned, strict=True)
        ):
            raise RuntimeError(
                f"{event} while their gradients are still parts, after no_sync; run a backward "
                "pass outside no_sync first, or zero the gradients before"
            )

    @staticmethod
    def kind(p: Tensor) -> str:
        """Return a parameter's type, strides and trainability as text, to compare between ranks."""
        stride = "" if isinstance(p, DistTensor) else f" of strides {p.stride()}"
        return f"{p.dtype}{stride}, requires_grad={p.requires_grad}"

    def _sum_over(
        self, axes: tuple[str, ...], parameters: Sequence[Tensor]
    ) -> Callable[[Tensor], Request] | None:
        """Return a function that starts to sum a bucket in half precision over `axes`.

        None if the bucket of `parameters` is to be summed by an ordinary all-reduce.
        """
        grid, wire = self.grid, self._wire
        if wire is None or parameters[0].dtype not in WIDE or grid.topology.parts(axes) == 1:
            return None
        # The counts after the gradients are not rounded.
        feedback = ErrorFeedback(len(parameters)) if self._error_feedback else None
        return partial(
            HalfSum, grid=grid, axes=axes, wire=wire, purpose=self._purpose, feedback=feedback
        )

    def expect_part(self, n: int) -> bool:
        """Note that autograd is about to add this rank's part to the gradient of parameter `n`.

        Return whether this rank is the first of the ranks over which the gradient is summed.
        """
        first: bool = self._buckets[self._bucket_of[n]].comm.rank == 0
        gradient = self.leaves[n].grad
        if gradient is not None and not self.parts[n] and not first:
            # A sum of an earlier backward pass becomes a part again, the whole of it on one rank.
            gradient.zero_()
        self.parts[n] = True
        return first

    def take_part(self, n: int, new: bool) -> None:
        """Note that autograd has added this rank's part to the gradient of parameter `n`.

        Starts the sums of buckets that are full by it. `new` is True if autograd has made the
        gradient in this pass, and has not added the part to an earlier gradient.
        """
        backward_pass = torch_private.backward_pass()
        if backward_pass != self._pass:
            self._begin(backward_pass)
        if new:
            self._made.add(n)
        if not self.enabled:
            return
        b = self._bucket_of[n]
        self._missing[b] -= 1
        if self._missing[b] or self._starts_at_the_end:
            return
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    def _begin(self, backward_pass: int) -> None:
        if self._held and any(bucket.under_way for bucket in self._buckets):
            raise RuntimeError(
                "a second backward pass through a model within ConcurrentReductions, whose sums of "
                "the first are under way; leave the context between them, or run the first in "
                "no_sync"
            )
        self.settle()
        self._pass, self._started = backward_pass, 0
        self._made.clear()
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        if self.enabled:
            torch_private.at_end_of_backward(_EndOfBackward(self._end))
        else:
            self.apart = True

    def _start_next(self) -> None:
        members = self._members[self._started]
        self._buckets[self._started].start(
            [self.parts[n] for n in members], [n in self._made for n in members], self.grid
        )
        self._started += 1

    def _start_rest(self) -> None:
        while self._started < len(self._buckets):
            self._start_next()

    def _end(self, failed: bool) -> None:
        """End a backward pass: start the sums that have not started, and set sums as gradients.

        If the pass has `failed`, no further sum is started.
        """
        # Held sums that start at the end would start in another order on other ranks.
        if not failed and not (self._held and self._starts_at_the_end):
            self._start_rest()
        if not self._held:
            self.settle(hooks=not failed)

    def _warn(self, bucket: Bucket, members: list[int]) -> None:
        """Warn, once for a module, of a parameter that has got a gradient on some ranks only.

        One rank of the bucket warns; on GPUs the ranks without a gradient do, as only they know.
        """
        ranks, kind = bucket.comm.size, self._wire or bucket.parameters[0].dtype
        # Counts are sent with the gradients, and large ones are rounded as these are.
        exact = ranks <= 2 / torch.finfo(kind).eps
        if not exact or (bucket.comm.rank and not self.grid.computes_on_gpu):
            return
        self._warned = True
        i, some = next(iter(bucket.uneven.items()))
        module = self.whole()
        names = [] if module is None else [name for name, _ in module.named_parameters()]
        name = names[members[i]] if members[i] < len(names) else "a parameter"
        warnings.warn(
            f"backward at {user_line()}: {name} of the parallelized module has got a gradient on "
            f"{some} of {ranks} ranks only. If ranks have chosen different layers, by their rank "
            "or by data that they do not share, the numbers are wrong. It is right only where they "
            "choose for blocks of their own, between to_local() and DistTensor.from_local. There "
            "will be no more such warnings for this module",
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


def axes_of_sum(p: Tensor, grid: Grid) -> tuple[str, ...]:
    """Return the grid axes over which the gradient of `p` is summed: those that do not cut `p`."""
    return replicating_axes(p.cuts if isinstance(p, DistTensor) else (), grid.topology)
