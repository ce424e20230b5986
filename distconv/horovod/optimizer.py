"""`DistributedOptimizer`: an optimizer that averages gradients over all ranks before its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer

from distconv.comm.collectives import WIDE, HalfSum
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.horovod.collectives import GRADIENTS, Average, ReduceOp, part_of, sum_or_average
from distconv.horovod.compression import Compression
from distconv.horovod.job import (
    Announcement,
    HorovodInternalError,
    Job,
    ProcessSet,
    global_process_set,
)
from distconv.model.buckets import Bucket, BucketSequence, ReducedParameter
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import is_shared
from distconv.training.checks import check_count, check_wrappable
from distconv.transport.interface import ChainedRequest, Request

_OWNER = "DistributedOptimizer"

_WIRES: dict[Any, torch.dtype | None] = {Compression.none: None, Compression.fp16: torch.float16}
"""For each compression, the type in which gradients are sent; None for an unchanged type."""


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_bytes: int = 2**20,
) -> Any:
    """Return a copy of the optimizer that reduces gradients over all ranks before its steps.

    The class of the copy is derived from the optimizer's class. Gradients are sent in buckets
    during the backward pass, or with a compression after the pass. The copy shares groups and state
    with `optimizer`. Collective.

    Parameters
    ----------
    optimizer: an optimizer of plain parameters, which are the same on all ranks.
    named_parameters: names and parameters, compared with the optimizer's parameters.
    compression: Compression.none, or Compression.fp16 to send gradients in float16.
    backward_passes_per_step: the number of backward passes that are accumulated before gradients
        are sent; an earlier step sends the gradients accumulated by then.
    op: Average or Sum.
    gradient_predivide_factor: a number f; each gradient is divided by f before the sum, and the sum
        by (number of ranks) / f: only rounding changes.
    num_groups, groups: ignored: gradients are sent in buckets of `bucket_bytes` in any case.
    sparse_as_dense: whether sparse gradients are made dense, to be summed.
    process_set: the ranks that train together; on others the optimizer is local.
    bucket_bytes: the bytes of gradients in one message.

    Raises
    ------
    TypeError
        For an optimizer that cannot be wrapped.
    ValueError
        If the names do not fit, parameters belong to a parallelized module, or `op` has no meaning
        for gradients.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    >>> model(torch.full((2, 4), 1.0 + hvd.rank())).mean().backward()
    >>> optimizer.step()
    >>> model.weight.grad  # the average of 1 and 2
    tensor([[1.5000, 1.5000, 1.5000, 1.5000]])
    """
    check_wrappable(_OWNER, optimizer, _DistributedOptimizer)
    check_count(_OWNER, "backward_passes_per_step", backward_passes_per_step, 1)
    check_count(_OWNER, "bucket_bytes", bucket_bytes, 1)
    if compression not in _WIRES:
        raise ValueError(
            f"{_OWNER}: compression={compression!r} is not supported; choose Compression.none or "
            "Compression.fp16 of distconv.horovod"
        )
    chosen = sum_or_average(_OWNER, op)
    if gradient_predivide_factor != 1.0 and chosen is not Average:
        raise ValueError(f"{_OWNER}: gradient_predivide_factor is for op=Average; leave it out")
    if named_parameters is not None:
        _check_names(list(named_parameters), optimizer)
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_DistributedOptimizer, kind), {}))
    # An earlier scheduler has put its own step into the instance.
    made.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    wire = _WIRES[compression]
    made._reduction = _Reduction(
        process_set, chosen, gradient_predivide_factor, wire, sparse_as_dense, bucket_bytes
    )
    made._reduction.accumulate(backward_passes_per_step)
    made._reduction.watch(made)
    made._reduction.connect()
    return made


def _check_names(named: list[Any], optimizer: Optimizer) -> None:
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
        raise ValueError(
            f"{_OWNER}: named_parameters are not pairs of a name and a parameter; pass "
            "model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{_OWNER}: named_parameters name {', '.join(twice)} twice; rename one of the two"
        )
    known = {id(p) for _, p in named}
    unnamed = sum(id(p) not in known for p in _parameters(optimizer))
    if unnamed:
        raise ValueError(
            f"{_OWNER}: {unnamed} of the optimizer's parameters are not in named_parameters; pass "
            "the parameters of all models that the optimizer trains"
        )


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@dataclass(eq=False)
class _Trained:
    """The state of one parameter of the optimizer between two steps.

    Attributes
    ----------
    passes_left: the number of backward passes left before the gradient is sent.
    reduced: the `ReducedParameter` in a bucket; None before the first pass, and if the parameter is
        not trained.
    seen: the identity and version of the gradient after the last pass; None if the gradient may
        have changed since.
    """

    passes_left: int
    reduced: ReducedParameter | None = None
    seen: tuple[int, int] | None = None


class _Reduction:
    """The gradient reduction of a `DistributedOptimizer`: hooks on parameters start the sums.

    A step begins with the first gradient of a backward pass. A gradient enters its bucket once the
    last pass of the step has computed the gradient; full buckets are sent. `synchronize` ends the
    step.

    Attributes
    ----------
    passes: the number of backward passes in a step.
    synchronizes: whether a step of the optimizer calls `synchronize`.
    synchronized: whether `synchronize` was called since the last backward pass.
    size: the number of ranks.
    begun: whether a backward pass has computed gradients that are not reduced yet.
    """

    def __init__(
        self,
        process_set: ProcessSet,
        op: ReduceOp,
        predivide: float,
        wire: torch.dtype | None,
        sparse_as_dense: bool,
        bucket_bytes: int,
    ):
        self.passes = 1
        self.synchronizes = True
        self.synchronized = self.begun = False
        global_process_set.job  # noqa: B018  raises before init
        self._job = process_set.job if process_set.included() else None
        self.size = 1 if self._job is None else self._job.size
        self._op, self._predivide, self._wire = op, predivide, wire
        self._sparse_as_dense, self._bucket_bytes = sparse_as_dense, bucket_bytes
        self._parameters: dict[Tensor, _Trained] = {}
        self._kinds: list[Any] = []
        """The types, devices and shapes of the parameters, from which the buckets follow."""
        self._buckets = BucketSequence((), bucket_bytes)
        self._announced = False
        """Whether the sums of this step are announced."""
        self._changed = False
        """Whether the program has changed a gradient since the backward pass."""

    @property
    def _ranks(self) -> Job:
        assert self._job is not None
        return self._job

    def connect(self) -> None:
        """Make the grid and communicators for the sums. Collective.

        Called before training, since some ranks may have joined before the first backward pass.
        """
        if self.size > 1:
            self._grid().communicator(AXES, GRADIENTS)

    def watch(self, optimizer: Optimizer) -> None:
        """Register hooks on the parameters of an optimizer that have no hook yet.

        Raises ValueError for parameters of a parallelized module.
        """
        hook = WeakMethod(self._after_accumulation)

        def call(p: Tensor) -> None:
            method = hook()
            if method is not None:
                method(p)

        for p in _parameters(optimizer):
            if isinstance(p, DistTensor) or is_shared(p):
                raise ValueError(
                    f"{_OWNER}: a parameter belongs to a parallelized module, which already sums "
                    "its gradients over ranks; use torch's own optimizer"
                )
            if p in self._parameters:
                continue
            self._parameters[p] = _Trained(self.passes)
            if p.requires_grad and self.size > 1:
                p.register_post_accumulate_grad_hook(call)

    def accumulate(self, passes: int) -> None:
        """Send gradients after every `passes` backward passes. Called between steps only."""
        self.passes = passes
        for trained in self._parameters.values():
            trained.passes_left = passes

    def synchronize(self) -> None:
        """Start the sums of the remaining gradients, and wait for all sums. Collective.

        Raises HorovodInternalError if the program changed a gradient while it was being reduced.
        """
        if self.size > 1:
            self._look()
            for trained in self._parameters.values():
                trained.seen = None
            self._begin_step()
            while (bucket := self._buckets.start_next(self._start_sum)) is not None:
                if self._wire is not None:
                    bucket.wait()  # sums of halves take two messages each, in one order
            for bucket in self._buckets:
                bucket.wait()
        changed, self._changed = self._changed, False
        self.begun = self._announced = False
        self.accumulate(self.passes)
        if changed:
            raise HorovodInternalError(
                f"{_OWNER}: gradients were changed between backward() and step(), for example by "
                "clip_grad_norm_, while their reduction was in flight: ranks would continue with "
                "different parameters. Call synchronize(), change the gradients, and step within "
                "`with optimizer.skip_synchronize():`"
            )
        self.synchronized = True

    def _look(self) -> None:
        """Record whether the program has changed a gradient since the backward pass."""
        for p, trained in self._parameters.items():
            if trained.seen is not None and trained.seen != _state(p):
                self._changed = True

    def _after_accumulation(self, p: Tensor) -> None:
        if p.grad is not None and p.grad.layout != torch.strided:
            if not self._sparse_as_dense:
                raise TypeError(
                    f"{_OWNER}: a gradient is sparse; pass sparse_as_dense=True, or make the "
                    "layer dense, for example torch.nn.Embedding(..., sparse=False)"
                )
            p.grad = p.grad.to_dense()
        trained = self._parameters[p]
        if trained.passes_left <= 0:
            raise AssertionError(
                f"{_OWNER}: more than backward_passes_per_step={self.passes} backward passes have "
                "added to a gradient before step(); increase it to accumulate gradients"
            )
        self._begin_step()
        trained.passes_left -= 1
        trained.seen = _state(p)
        if self._wire is None and trained.passes_left == 0 and trained.reduced is not None:
            self._buckets.note(trained.reduced)
            self._buckets.start_full(self._start_sum)

    def _begin_step(self) -> None:
        """Begin a step before its first gradient; make new buckets if parameters have changed."""
        if self.begun:
            return
        self.begun, self.synchronized = True, False
        kinds = [(p.dtype, p.device, p.shape, p.requires_grad) for p in self._parameters]
        if kinds != self._kinds:
            self._kinds = kinds
            grid = self._grid()
            for number, (p, trained) in enumerate(self._parameters.items()):
                trained.reduced = None
                if p.requires_grad:
                    trained.reduced = ReducedParameter(p, number, grid, AXES, GRADIENTS)
            self._buckets = BucketSequence(self._reduced(), self._bucket_bytes)
        self._buckets.begin()
        for reduced in self._reduced():
            reduced.is_part = True

    def _reduced(self) -> list[ReducedParameter]:
        found = (trained.reduced for trained in self._parameters.values())
        return [reduced for reduced in found if reduced is not None]

    def _grid(self) -> ProcessGrid:
        devices = {p.device for p in self._parameters if p.requires_grad} or {torch.device("cpu")}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"{_OWNER}: parameters are on {names}; train them on one device a rank"
            )
        return self._ranks.on(devices.pop())

    def _start_sum(self, bucket: Bucket) -> Request:
        """Start the sum, or the average, of a bucket: the `ReduceHook` of the optimizer."""
        if not self._announced:
            self._announced = True
            firsts = [b.members[0].leaf for b in self._buckets]
            parts = [
                part_of(b.elements, p, self._wire_of(p))
                for b, p in zip(self._buckets, firsts, strict=True)
            ]
            detail = str(self._op), self._predivide
            announced = Announcement(GRADIENTS, None, detail, tuple(parts))
            self._ranks.start(announced, lambda everyone: lambda: None).wait()
        self._look()
        flat, grid, wire = bucket.buffer, self._grid(), self._wire_of(bucket.buffer)
        gradients = bucket.elements_of(flat)
        if self._predivide != 1.0:
            gradients.mul_(1 / self._predivide)
        request: Request
        if wire is None:
            request = grid.transport.all_reduce(flat, bucket.comm)
        else:
            request = HalfSum(flat, grid, AXES, wire, GRADIENTS)
        factor = self._predivide / self.size if self._op is Average else 1.0
        if factor == 1.0:
            return request
        return ChainedRequest([request], lambda: gradients.mul_(factor))

    def _wire_of(self, x: Tensor) -> torch.dtype | None:
        return self._wire if x.dtype in WIDE else None


def _state(p: Tensor) -> tuple[int, int]:
    """Return the identity of a parameter's gradient, and the version of its elements.

    Two equal results mean that nothing has changed the gradient in between.
    """
    gradient = p.grad
    return id(gradient), -1 if gradient is None else gradient._version


class _DistributedOptimizer(Optimizer):
    """The methods of a `DistributedOptimizer`, mixed into the class of the wrapped optimizer."""

    _reduction: _Reduction

    def synchronize(self) -> None:
        """Reduce all gradients now, for example before clipping. Collective."""
        self._reduction.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step without a reduction of gradients in a `with` block, after `synchronize`."""
        self._reduction.synchronizes = False
        try:
            yield
        finally:
            self._reduction.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate `passes` backward passes before gradients are sent, equally on all ranks.

        Raises AssertionError between a backward pass and its step.
        """
        check_count("set_backward_passes_per_step", "passes", passes, 1)
        if self._reduction.begun:
            raise AssertionError(
                f"{_OWNER}: set_backward_passes_per_step() between backward() and step(): "
                "reductions of gradients may be in flight; call it before backward(), or after "
                "step()"
            )
        self._reduction.accumulate(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose gradients are reduced as well."""
        super().add_param_group(param_group)
        if "_reduction" in self.__dict__:
            self._reduction.watch(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step on the reduced gradients. Collective.

        Parameters
        ----------
        closure: computes the gradients first; its result is returned.
        """
        reduction, loss = self._reduction, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if reduction.synchronizes:
            if reduction.synchronized:
                warnings.warn(
                    f"{_OWNER}: step() after synchronize() reduces the gradients once more; call "
                    "it within `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            reduction.synchronize()
        reduction.synchronized = False
        super().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero.

        Raises AssertionError between a backward pass and its step.
        """
        if self._reduction.begun:
            raise AssertionError(
                f"{_OWNER}: zero_grad() between backward() and step() would discard gradients "
                "whose reduction is in flight; call step() or synchronize() first"
            )
        super().zero_grad(set_to_none)
