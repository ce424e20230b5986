"""`DistributedOptimizer`: an optimizer that averages gradients over all ranks before its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from distconv.comm.collectives import WIDE, HalfSum
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.horovod.collectives import (
    GRADIENTS,
    Average,
    ReduceOp,
    part_of,
    sum_or_average,
)
from distconv.horovod.compression import Compression
from distconv.horovod.job import (
    Announcement,
    HorovodInternalError,
    Job,
    ProcessSet,
    global_process_set,
)
from distconv.model.buckets import Bucket, fill_buckets
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import is_shared
from distconv.training.checks import check_count

_OWNER = "DistributedOptimizer"

_WIRES: dict[Any, torch.dtype | None] = {Compression.none: None, Compression.fp16: torch.float16}
"""For each compression the type in which gradients are sent, None for their own."""


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

    Its class is derived from the optimizer's. Gradients are sent in buckets during the backward
    pass; with a compression, after it. The copy shares groups and state with `optimizer`. All ranks
    make it together.

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
    TypeError For an optimizer that cannot be wrapped. ValueError If the names do not fit,
    parameters belong to a parallelized module, or `op` has no meaning for gradients.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(
        optimizer, (LBFGS, _DistributedOptimizer)
    ):
        raise TypeError(
            f"{_OWNER}: {type(optimizer).__name__} is no optimizer that can be wrapped; pass one "
            "of torch's that takes one gradient a step, such as SGD or Adam"
        )
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
            f"{_OWNER}: named_parameters are no pairs of a name and a parameter; pass "
            "model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{_OWNER}: named_parameters name {', '.join(twice)} twice; rename one")
    known = {id(p) for _, p in named}
    unnamed = sum(id(p) not in known for p in _parameters(optimizer))
    if unnamed:
        raise ValueError(
            f"{_OWNER}: {unnamed} of the optimizer's parameters are not in named_parameters; pass "
            "the parameters of all models that it trains"
        )


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class _Reduction:
    """The gradient reduction of a `DistributedOptimizer`: hooks on parameters start the sums."""

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
        """Whether a step synchronizes by itself."""
        self.synchronized = False
        global_process_set.job  # noqa: B018  raises before init
        self._job = process_set.job if process_set.included() else None
        self.size = 1 if self._job is None else self._job.size
        self._op, self._predivide, self._wire = op, predivide, wire
        self._sparse_as_dense, self._bucket_bytes = sparse_as_dense, bucket_bytes
        self._parameters: list[Tensor] = []
        self._left: dict[Tensor, int] = {}
        """For each parameter, the number of backward passes left before it is reduced."""
        self._kinds: list[Any] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._missing: list[int] = []
        self.begun = self._announced = False
        """Whether gradients are not reduced yet, and whether their reduction is announced."""
        self._started = 0
        self._states: dict[Tensor, tuple[int, int]] = {}
        """Each gradient after the last backward pass, with the version of its elements."""
        self._changed = False
        """Whether the program has changed a gradient since then."""

    @property
    def _ranks(self) -> Job:
        assert self._job is not None
        return self._job

    def connect(self) -> None:
        """Make the grid and communicators for the sums. All ranks call it together.

        It is called before training: at the first backward pass some ranks may have joined already.
        """
        if self.size > 1:
            self._grid().communicator(AXES, GRADIENTS)

    def watch(self, optimizer: Optimizer) -> None:
        """Put hooks on those parameters of an optimizer that have none yet."""
        hook = WeakMethod(self._after_accumulation)

        def call(p: Tensor) -> None:
            method = hook()
            if method is not None:
                method(p)

        for p in _parameters(optimizer):
            if isinstance(p, DistTensor) or is_shared(p):
                raise ValueError(
                    f"{_OWNER}: a parameter is one of a parallelized module, which adds up its "
                    "gradients by itself; use torch's own optimizer"
                )
            if p in self._left:
                continue
            self._parameters.append(p)
            self._left[p] = self.passes
            if p.requires_grad and self.size > 1:
                p.register_post_accumulate_grad_hook(call)

    def accumulate(self, passes: int) -> None:
        """Send gradients after `passes` backward passes from now on. Call it between steps."""
        self.passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def synchronize(self) -> None:
        """Finish the reduction of all gradients. All ranks call it together.

        Raises HorovodInternalError if the program changed a gradient while it was being reduced.
        """
        if self.size > 1:
            self._look()
            self._reduce_buckets()
        changed, self._changed = self._changed, False
        self._states.clear()
        self.begun = self._announced = False
        self.accumulate(self.passes)
        if changed:
            raise HorovodInternalError(
                f"{_OWNER}: gradients have changed between backward() and step(), as "
                "clip_grad_norm_ changes them, while they travel: ranks would go on with different "
                "parameters. Call synchronize(), change them, and step within `with "
                "optimizer.skip_synchronize():`"
            )
        self.synchronized = True

    def _look(self) -> None:
        """Note whether the program has changed a gradient since the backward pass."""
        self._changed |= any(_state(p) != seen for p, seen in self._states.items())

    def _after_accumulation(self, p: Tensor) -> None:
        if p.grad is not None and p.grad.layout != torch.strided:
            if not self._sparse_as_dense:
                raise TypeError(
                    f"{_OWNER}: a gradient is sparse; pass sparse_as_dense=True, or make the "
                    "layer dense, as torch.nn.Embedding(..., sparse=False)"
                )
            p.grad = p.grad.to_dense()
        if self._left[p] <= 0:
            raise AssertionError(
                f"{_OWNER}: more than backward_passes_per_step={self.passes} backward passes have "
                "added to a gradient before step(); increase it to accumulate gradients"
            )
        self._begin()
        self._left[p] -= 1
        self._states[p] = _state(p)
        if self._wire is not None:
            return
        b = self._bucket_of[p]
        self._missing[b] -= self._left[p] == 0
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    def _begin(self) -> None:
        """Arrange the parameters in buckets, before the first gradient of a step."""
        if self.begun:
            return
        self.begun, self._started, self.synchronized = True, 0, False
        kinds = [(p.dtype, p.device, p.shape, p.requires_grad) for p in self._parameters]
        if kinds != self._kinds:
            self._kinds = kinds
            trained: list[tuple[Tensor, tuple[str, ...]]] = [
                (p, AXES) for p in self._parameters if p.requires_grad
            ]
            filled = fill_buckets(trained, self._bucket_bytes)
            group = self._grid().communicator(AXES, GRADIENTS)
            self._buckets = [Bucket(ps, group, self._sum_of(ps[0])) for _, ps in filled]
            self._bucket_of = {
                p: b for b, bucket in enumerate(self._buckets) for p in bucket.parameters
            }
        self._missing = [len(bucket.parameters) for bucket in self._buckets]

    def _grid(self) -> ProcessGrid:
        devices = {p.device for p in self._parameters if p.requires_grad} or {torch.device("cpu")}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"{_OWNER}: parameters are on {names}; train them on one device a rank"
            )
        return self._ranks.on(devices.pop())

    def _start_next(self) -> None:
        if not self._announced:
            self._announced = True
            parts = [
                part_of(b.elements, p, self._wire_of(p))
                for b in self._buckets
                for p in b.parameters[:1]
            ]
            detail = str(self._op), self._predivide
            announced = Announcement(GRADIENTS, None, detail, tuple(parts))
            self._ranks.start(announced, lambda everyone: lambda: None).wait()
        bucket = self._buckets[self._started]
        self._look()
        _scale(bucket.parameters, 1 / self._predivide)
        every = [True] * len(bucket.parameters)
        bucket.start(every, [False] * len(every), self._grid())
        self._states |= {p: _state(p) for p in bucket.parameters if p in self._states}
        self._started += 1

    def _reduce_buckets(self) -> None:
        self._begin()
        factor = self._predivide / self.size if self._op is Average else 1.0
        for b, bucket in enumerate(self._buckets):
            # Sums of halves take two messages each, in one order on all ranks.
            while self._started < (len(self._buckets) if self._wire is None else b + 1):
                self._start_next()
            for p in bucket.parameters:
                self._states.pop(p, None)
            bucket.finish()
            _scale(bucket.parameters, factor)

    def _wire_of(self, p: Tensor) -> torch.dtype | None:
        return self._wire if p.dtype in WIDE else None

    def _sum_of(self, p: Tensor) -> Callable[[Tensor], HalfSum] | None:
        """Return a function that starts the sum of a bucket in the compressed type.

        `p` is a parameter of the bucket. Returns None if its gradients are sent in their own type.
        """
        wire = self._wire_of(p)
        if wire is None:
            return None
        return partial(HalfSum, grid=self._grid(), axes=AXES, wire=wire, purpose=GRADIENTS)


def _state(p: Tensor) -> tuple[int, int]:
    """Return the identity of a parameter's gradient, and the version of its elements.

    Two equal results mean that nothing has changed the gradient in between.
    """
    gradient = p.grad
    return id(gradient), -1 if gradient is None else gradient._version


def _scale(parameters: Iterable[Tensor], factor: float) -> None:
    if factor != 1.0:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(factor)


class _DistributedOptimizer(Optimizer):
    """The methods of a `DistributedOptimizer`, mixed into the class of the wrapped optimizer."""

    _reduction: _Reduction

    def synchronize(self) -> None:
        """Reduce all gradients now, for example to clip them. All ranks call it."""
        self._reduction.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let steps in a `with` block use the gradients as they are, after `synchronize`."""
        self._reduction.synchronizes = False
        try:
            yield
        finally:
            self._reduction.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate `passes` backward passes before gradients are sent. All ranks call it.

        Raises AssertionError between a backward pass and its step.
        """
        check_count("set_backward_passes_per_step", "passes", passes, 1)
        if self._reduction.begun:
            raise AssertionError(
                f"{_OWNER}: set_backward_passes_per_step() between backward() and step(): some "
                "gradients may be under way; call it before backward(), or after step()"
            )
        self._reduction.accumulate(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose gradients are reduced as well."""
        super().add_param_group(param_group)
        if "_reduction" in self.__dict__:
            self._reduction.watch(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step on the reduced gradients. All ranks call it together.

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
        """Set all gradients to None, or to zero."""
        if self._reduction.begun:
            raise AssertionError(
                f"{_OWNER}: zero_grad() between backward() and step() would drop gradients that "
                "are under way; call step() or synchronize() before"
            )
        super().zero_grad(set_to_none)
