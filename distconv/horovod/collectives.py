"""Collectives on tensors in Horovod's forms: blocking, in place, and with a handle.

Each function is collective over a process set, and starts when all ranks of the set have called it.
Calls with a `name` are matched by the name, in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from inspect import Parameter, Signature, cleandoc
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from distconv.comm.collectives import HalfSum
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.horovod.compression import CallableHandle, Compression, check_compression, give_handle
from distconv.horovod.job import (
    JOINED,
    PURPOSE,
    Announcement,
    Job,
    Part,
    ProcessSet,
    current,
    global_process_set,
    refuse_dist_tensors,
)
from distconv.transport.interface import Request

WaitForResults = Callable[[], list[Tensor]]
"""A function that waits for the results of a collective and returns them as new tensors."""


class ReduceOp(Enum):
    """Horovod's operations that reduce the tensors of all ranks to one.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> x = torch.tensor([2.0 + hvd.rank()])  # 2 and 3
    >>> ops = hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product
    >>> [hvd.allreduce(x, op=op).item() for op in ops]
    [2.5, 5.0, 2.0, 3.0, 6.0]
    >>> isinstance(hvd.Adasum, hvd.ReduceOp)  # is known, but raises
    True
    """

    Average = "Average"
    Sum = "Sum"
    Adasum = "Adasum"
    Min = "Min"
    Max = "Max"
    Product = "Product"

    def __str__(self) -> str:
        return self.value


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


GRADIENTS = "horovod gradients"
"""The kind of announcement, and the purpose of the communicators, for gradients of optimizers,
whose sums overlap other collectives."""

_OF_ALL: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    Min: lambda stacked: stacked.amin(0),
    Max: lambda stacked: stacked.amax(0),
    Product: lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}
"""For each operation that is not a sum, the function that computes it from the tensors of all
ranks, stacked along a new first dimension."""

_HALVES = (torch.float16, torch.bfloat16)
"""16-bit types, whose sums are computed in float32."""


def chosen_op(caller: str, op: ReduceOp | None, average: Any = None) -> ReduceOp:
    """Return the operation chosen by `op`, or by Horovod's older argument `average`.

    As in Horovod, `average` means Average if true, else Sum; Average is the default. `caller` is
    the name of the calling function, for error messages. Raises ValueError if both are given or
    `op` is unknown, and NotImplementedError for Adasum.
    """
    if op is not None and average is not None:
        raise ValueError(
            f"distconv.horovod.{caller}: both op and average are given; leave out average"
        )
    if op is None:
        return Average if average is None or average else Sum
    if not isinstance(op, ReduceOp):
        raise ValueError(
            f"distconv.horovod.{caller}: op={op!r} is unknown; choose Average, Sum, Min, Max or "
            "Product of distconv.horovod"
        )
    if op is Adasum:
        raise NotImplementedError(
            f"distconv.horovod.{caller}: op=Adasum is not supported; for large batches use "
            "op=Average with a learning rate by distconv.training.Recipe, or "
            "distconv.training.LARC"
        )
    return op


def sum_or_average(caller: str, op: ReduceOp | None) -> ReduceOp:
    """Return `op`, by default Average; raise ValueError unless it is Sum or Average."""
    chosen = chosen_op(caller, op)
    if chosen not in (Average, Sum):
        raise ValueError(
            f"distconv.horovod.{caller}: op={chosen} is not supported; choose Average or Sum"
        )
    return chosen


# Sums, which ranks without samples take part in


def start_flat_sum(
    flat: Tensor, part: Part, grid: ProcessGrid, purpose: str = PURPOSE
) -> Request | None:
    """Start to sum the vector `flat` over the ranks, in place. Collective.

    `part` has the type in which `flat` is sent. Returns the request of the all-reduce; None if
    `flat` is sent in 16 bits, as the sum is complete then. `purpose` names the communicator.
    """
    if part.wire:
        HalfSum(flat, grid, AXES, getattr(torch, part.wire), purpose).wait()
        return None
    return grid.transport.all_reduce(flat, grid.communicator(AXES, purpose))


def part_of(elements: int, like: Tensor, wire: torch.dtype | None) -> Part:
    """Return the `Part` for a vector of `elements` elements with the type and device of `like`.

    `wire` is the type in which the vector is sent; None for its own type.
    """
    names = [str(kind or "").removeprefix("torch.") for kind in (like.dtype, wire)]
    return Part(elements, names[0], like.device.type, names[1])


def _sums(
    job: Job, tensors: Sequence[Tensor], kind: str, name: str | None, detail: tuple[Any, ...]
) -> WaitForResults:
    """Start to sum tensors over a process set; return a function that waits for the sums.

    Tensors of one type and device are sent together, in their own type. Sums of 16-bit types are
    computed in float32. `kind`, `name` and `detail` are announced to the other ranks; see
    `Announcement`.
    """
    groups: dict[tuple[torch.dtype, str], list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        groups[x.dtype, x.device.type].append(i)
    flats: list[Tensor] = []
    parts: list[Part] = []
    for (dtype, _), numbers in groups.items():
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in numbers])
        half = dtype in _HALVES
        flats.append(flat.float() if half else flat)
        parts.append(part_of(flat.numel(), flats[-1], dtype if half else None))

    def start(everyone: list[Announcement | None]) -> WaitForResults:
        requests = [
            start_flat_sum(f, p, job.on(f.device)) for f, p in zip(flats, parts, strict=True)
        ]

        def wait() -> list[Tensor]:
            for request in filter(None, requests):
                request.wait()
            results = list(tensors)
            for flat, numbers in zip(flats, groups.values(), strict=True):
                pieces = flat.split([tensors[i].numel() for i in numbers])
                for i, piece in zip(numbers, pieces, strict=True):
                    results[i] = piece.view(tensors[i].shape).to(tensors[i].dtype)
            return results

        return wait

    if job.size == 1:
        return lambda: [x.detach().clone() for x in tensors]
    announced = Announcement(kind, name, (*detail, *_shapes(tensors)), tuple(parts))
    return job.start(announced, start).wait


def join(device: int = -1) -> int:
    """Add zeros to other ranks' sums until all ranks have called `join`. Collective.

    Returns the number of the rank that called `join` last. A rank calls `join` when it has no
    samples left. As in Horovod, an average divides by the number of all ranks, including ranks that
    have joined: to weight by samples, sum sums and counts. A rank that has joined keeps the
    parameters of its last step; broadcast those of the returned rank.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> for _ in range(2 if hvd.rank() == 0 else 1):  # unequal numbers of batches
    ...     mean = hvd.allreduce(torch.ones(1))
    >>> hvd.join()  # rank 0 is the last
    0
    """
    job = current()
    under_way: list[Request | None] = []
    last = job.rank

    def wait() -> None:
        for request in filter(None, under_way):
            request.wait()
        under_way.clear()

    def add_zeros(announced: Announcement) -> None:
        purpose = GRADIENTS if announced.kind == GRADIENTS else PURPOSE
        if purpose == GRADIENTS:
            # Sums of gradients may end after the next collective, but not after the next sums of
            # gradients.
            wait()
        for part in announced.parts:
            grid = job.on(torch.device(part.device))
            kind = getattr(torch, part.dtype)
            zeros = torch.zeros(part.elements, dtype=kind, device=grid.device)
            under_way.append(start_flat_sum(zeros, part, grid, purpose))

    while job.size > 1:
        before = job.joined
        if all(theirs == JOINED for theirs in job.round(JOINED, absent=add_zeros)):
            last = max(frozenset(range(job.size)) - before, default=job.size - 1)
            break
    wait()
    return last


# Each kind of collective: its start, and its gradient


class _Collective(NamedTuple):
    """A collective such as allreduce, as two functions.

    Attributes
    ----------
    start: starts the collective, given the job, tensors and options; returns a function that waits
        for the results.
    gradients: returns the gradients of the tensors, given the job, the gradients of the results,
        options and the shapes of the tensors.
    """

    start: Callable[[Job, Sequence[Tensor], dict[str, Any]], WaitForResults]
    gradients: Callable[[Job, list[Tensor], dict[str, Any], Sequence[torch.Size]], list[Tensor]]


def _shapes(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), str(x.dtype), x.device.type) for x in tensors)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else (x * factor).to(x.dtype)


def _mean(x: Tensor, ranks: int) -> Tensor:
    """Return `x`, a sum over `ranks` ranks, divided by `ranks`; integers are truncated."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return x.div(ranks, rounding_mode="trunc" if whole else None).to(x.dtype)


def _reduce(job: Job, tensors: Sequence[Tensor], options: dict[str, Any]) -> WaitForResults:
    kind, op, name = options["kind"], options["op"], options["name"]
    before, after = options["prescale_factor"], options["postscale_factor"]
    scaled = [_scaled(x, before) for x in tensors]
    detail = str(op), before, after
    if op in _OF_ALL:

        def start(everyone: list[Announcement | None]) -> WaitForResults:
            results = []
            for x in scaled:
                grid = job.on(x.device)
                group = grid.communicator(AXES, PURPOSE)
                stacked = grid.transport.all_gather(x.detach().contiguous(), group)
                results.append(_OF_ALL[op](stacked))
            return lambda: results

        wait = job.start(Announcement(kind, name, (*detail, *_shapes(tensors))), start).wait
    else:
        wait = _sums(job, scaled, kind, name, detail)

    def results() -> list[Tensor]:
        found = wait()
        found = [_mean(x, job.size) for x in found] if op is Average else found
        return [_scaled(x, after) for x in found]

    return results


def _reduce_gradients(
    job: Job, gradients: list[Tensor], options: dict[str, Any], shapes: Sequence[torch.Size]
) -> list[Tensor]:
    if options["op"] in _OF_ALL:
        raise NotImplementedError(
            f"distconv.horovod.{options['kind']}: op={options['op']} has no gradient; use Sum or "
            "Average, or x.detach()"
        )
    return _apply(_REDUCE, job, gradients, options | {"name": None})


def _averages(job: Job, gradients: list[Tensor], kind: str) -> list[Tensor]:
    unscaled = {"op": Average, "name": None, "prescale_factor": 1.0, "postscale_factor": 1.0}
    return _apply(_REDUCE, job, gradients, {"kind": f"{kind} backward", **unscaled})


def _gather(job: Job, tensors: Sequence[Tensor], options: dict[str, Any]) -> WaitForResults:
    rows = [x.detach().reshape(1) if x.dim() == 0 else x.detach() for x in tensors]
    detail = (
        *options.get("detail", ()),
        *((tuple(x.shape[1:]), str(x.dtype), x.device.type) for x in rows),
    )
    own = [len(x) for x in rows]

    def start(everyone: list[Announcement | None]) -> WaitForResults:
        results = []
        lengths = [theirs.own for theirs in everyone if theirs is not None]
        for i, x in enumerate(rows):
            counts = [theirs[i] for theirs in lengths]
            padded = x.new_zeros(max(counts), *x.shape[1:])
            padded[: len(x)] = x
            grid = job.on(x.device)
            if padded.numel() and job.size > 1:
                group = grid.communicator(AXES, PURPOSE)
                stacked = grid.transport.all_gather(padded, group)
            else:
                stacked = padded.expand(job.size, *padded.shape)
            results.append(torch.cat([stacked[r, :n] for r, n in enumerate(counts)]))
        options["starts"] = [
            sum(theirs[i] for theirs in lengths[: job.rank]) for i in range(len(own))
        ]
        return lambda: results

    return job.start(Announcement(options["kind"], options["name"], detail, own=own), start).wait


def _gather_gradients(
    job: Job, gradients: list[Tensor], options: dict[str, Any], shapes: Sequence[torch.Size]
) -> list[Tensor]:
    means = _averages(job, gradients, options["kind"])
    parts = zip(means, options["starts"], shapes, strict=True)
    return [m.narrow(0, a, s[0] if s else 1).view(s) for m, a, s in parts]


def _broadcast(job: Job, tensors: Sequence[Tensor], options: dict[str, Any]) -> WaitForResults:
    root = _root_of(options)
    results = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]

    def start(everyone: list[Announcement | None]) -> WaitForResults:
        groups: dict[tuple[torch.dtype, str], list[Tensor]] = defaultdict(list)
        for x in results:
            groups[x.dtype, x.device.type].append(x)
        for alike in groups.values():
            grid = job.on(alike[0].device, root)
            flat = torch.cat([x.reshape(-1) for x in alike])
            if flat.numel():
                grid.transport.broadcast(flat, grid.communicator(AXES, PURPOSE))
            for x, piece in zip(alike, flat.split([x.numel() for x in alike]), strict=True):
                x.copy_(piece.view(x.shape))
        return lambda: results

    if job.size == 1:
        return lambda: results
    detail = options["root_rank"], *_shapes(tensors)
    return job.start(Announcement(options["kind"], options["name"], detail), start).wait


def _root_of(options: dict[str, Any]) -> int:
    """Return the position in the process set of the rank that `root_rank` names."""
    root, process_set = options["root_rank"], options["process_set"]
    if not isinstance(root, int) or root not in process_set.ranks:
        raise ValueError(
            f"distconv.horovod.{options['kind']}: root_rank={root!r} is not in the process set; "
            f"choose one of {process_set.ranks}"
        )
    return int(process_set.ranks.index(root))


def _broadcast_gradients(
    job: Job, gradients: list[Tensor], options: dict[str, Any], shapes: Sequence[torch.Size]
) -> list[Tensor]:
    means = _averages(job, gradients, options["kind"])
    return means if job.rank == _root_of(options) else [torch.zeros_like(m) for m in means]


def _exchange(job: Job, tensors: Sequence[Tensor], options: dict[str, Any]) -> WaitForResults:
    """Start an all-to-all of the rows of one tensor; return a function that waits for its results.

    The results are the rows received, in rank order, and the number of rows from each rank.
    """
    [x] = tensors
    splits = options["splits"]
    if splits is None:
        splits = [len(x) // job.size] * job.size
    splits = [int(n) for n in splits]
    if len(splits) != job.size or min(splits) < 0 or sum(splits) != len(x):
        raise ValueError(
            f"distconv.horovod.alltoall: splits={splits} do not divide {len(x)} rows among "
            f"{job.size} ranks; pass one number of rows for each rank, or a tensor whose number "
            "of rows is a multiple of the ranks"
        )

    def start(everyone: list[Announcement | None]) -> WaitForResults:
        counts = [theirs.own[job.rank] for theirs in everyone if theirs is not None]
        leaving = [piece.contiguous() for piece in x.detach().split(splits)]
        grid = job.on(x.device)
        arriving = [
            leaving[r] if r == job.rank else x.new_empty(n, *x.shape[1:])
            for r, n in enumerate(counts)
        ]
        others = [r for r in range(job.size) if r != job.rank]
        transport = grid.transport
        request = transport.exchange(
            [(r, arriving[r]) for r in others if arriving[r].numel()],
            [(r, leaving[r]) for r in others if leaving[r].numel()],
            transport.next_tag(),
        )

        def wait() -> list[Tensor]:
            request.wait()
            options["received"] = counts
            return [torch.cat(arriving), torch.tensor(counts, dtype=torch.int32)]

        return wait

    detail = tuple(x.shape[1:]), str(x.dtype), x.device.type
    return job.start(Announcement("alltoall", options["name"], detail, own=splits), start).wait


def _exchange_gradients(
    job: Job, gradients: list[Tensor], options: dict[str, Any], shapes: Sequence[torch.Size]
) -> list[Tensor]:
    back = {"name": None, "splits": options["received"]}
    return _apply(_EXCHANGE, job, gradients[:1], back)[:1]


def _scatter(job: Job, tensors: Sequence[Tensor], options: dict[str, Any]) -> WaitForResults:
    """Start a reduction with results partitioned by rows; return a function that waits for them.

    Each rank gets its block of the rows of each result; if they do not divide evenly, the first
    ranks get one row more.
    """
    for x in tensors:
        if not x.dim():
            raise ValueError(
                f"distconv.horovod.{options['kind']}: a 0-d tensor has no rows to scatter; pass a "
                "tensor of at least one dimension, or use allreduce"
            )
    wait = _reduce(job, tensors, options)
    return lambda: [x.tensor_split(job.size)[job.rank].clone() for x in wait()]


def _scatter_gradients(
    job: Job, gradients: list[Tensor], options: dict[str, Any], shapes: Sequence[torch.Size]
) -> list[Tensor]:
    kind = f"{options['kind']} backward"
    whole = _apply(_GATHER, job, gradients, {"kind": kind, "name": None})
    factor = job.size if options["op"] is Sum else 1.0
    return [_scaled(x, factor) for x in whole]


class _Differentiable(Function):
    @staticmethod
    def forward(
        ctx: Any, kind: _Collective, job: Job, options: dict[str, Any], *tensors: Tensor
    ) -> Any:
        ctx.context = kind, job, options, [x.shape for x in tensors]
        results = tuple(kind.start(job, tensors, options)())
        ctx.mark_non_differentiable(*(y for y in results if not y.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kind, job, options, shapes = ctx.context
        return None, None, None, *kind.gradients(job, list(gradients), options, shapes)


def _apply(
    kind: _Collective, job: Job, tensors: Sequence[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """Run the collective `kind` as a function of autograd, and return its results."""
    return list(_Differentiable.apply(kind, job, options, *tensors))


_REDUCE = _Collective(_reduce, _reduce_gradients)
_GATHER = _Collective(_gather, _gather_gradients)
_BROADCAST = _Collective(_broadcast, _broadcast_gradients)
_EXCHANGE = _Collective(_exchange, _exchange_gradients)
_SCATTER = _Collective(_scatter, _scatter_gradients)


# Horovod's functions: blocking, in place, with a handle, and for several tensors

_DEFAULTS: dict[str, Any] = {
    "average": None,
    "name": None,
    "compression": Compression.none,
    "op": None,
    "splits": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": global_process_set,
}
"""The default of each option."""

_OF_REDUCTIONS = "average name compression op prescale_factor postscale_factor process_set"
_OF_SCATTERS = "name compression op process_set prescale_factor postscale_factor"


def _called(
    kind: _Collective,
    family: str,
    several: bool,
    variant: str,
    tensors: Any,
    options: dict[str, Any],
) -> Any:
    """Call one of Horovod's functions; return its result, or a handle for `synchronize`.

    The function runs the collective `kind`. Its name is `family` with the ending `variant`: "",
    "_async", "_" or "_async_". `several` says whether it takes several tensors; `options` are its
    other arguments.
    """
    given = list(tensors) if several else [tensors]
    refuse_dist_tensors(family + variant, *given)
    job = options["process_set"].job
    options["kind"] = family
    compression = options.pop("compression", Compression.none)
    check_compression(family + variant, compression)
    if "op" in options:
        options["op"] = chosen_op(family + variant, options["op"], options.pop("average", None))
    if variant:
        wait = kind.start(job, [x.detach() for x in given], options)

        def result() -> Any:
            found = wait()
            if variant.endswith("_"):
                for x, y in zip(given, found, strict=True):
                    x.detach().copy_(y)
                found = given
            if several:
                return found
            # The result of alltoall_async is (tensor, splits), with and without given splits.
            return tuple(found) if "splits" in options else found[0]

        return give_handle(result) if "async" in variant else result()
    packed = [compression.compress(x) for x in given]
    results = _apply(kind, job, [x for x, _ in packed], options)
    if "splits" in options:
        return results[0] if options["splits"] is None else tuple(results)
    unpacked = [compression.decompress(y, ctx) for y, (_, ctx) in zip(results, packed, strict=True)]
    return unpacked if several else unpacked[0]


def _family(
    family: str,
    kind: _Collective,
    options: str,
    about: str,
    example: str = "",
    *,
    in_place: bool = False,
) -> list[Callable[..., Any]]:
    """Make the functions of a collective: blocking, with a handle, and both in place if `in_place`.

    Parameters
    ----------
    family: the name of the blocking function, such as "grouped_allreduce".
    options: the names of its options in order; those without a default are required.
    about: the beginning of the functions' docstrings.
    example: an example of all these functions, for the docstring of the blocking function.
    """
    several = family.startswith("grouped")
    own = "tensors" if several else "tensor"
    made = []
    variants = ("", "_async", "_", "_async_") if in_place else ("", "_async")
    for variant in variants:
        names = [n for n in options.split() if not (variant and n == "compression")]
        signature = Signature(
            [
                Parameter(
                    n, Parameter.POSITIONAL_OR_KEYWORD, default=_DEFAULTS.get(n, Parameter.empty)
                )
                for n in (own, *names)
            ]
        )

        def call(
            *args: Any, signature: Signature = signature, variant: str = variant, **kwargs: Any
        ) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            return _called(kind, family, several, variant, given.pop(own), given)

        call.__name__ = call.__qualname__ = family + variant
        call.__signature__ = signature  # type: ignore[attr-defined]
        shown = f"\n\nExamples\n--------\n{cleandoc(example)}" if example and not variant else ""
        call.__doc__ = f"{about}{_ABOUT_VARIANTS[variant]}{shown}"
        made.append(call)
    return made


_ABOUT_VARIANTS = {
    "": " Differentiable.",
    "_async": " Return a handle for `synchronize`; outside autograd.",
    "_": " The result is written to the given tensor, and returned; outside autograd.",
    "_async_": " Return a handle for `synchronize`, which writes the result to the given tensor.",
}

allreduce, allreduce_async, allreduce_, allreduce_async_ = _family(
    "allreduce",
    _REDUCE,
    _OF_REDUCTIONS,
    "Return the reduction of a tensor over the ranks: the average, or `op`. Averages of whole "
    "numbers are truncated. The gradient is reduced in the same way.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> x = torch.tensor([1.0 + hvd.rank()])  # 1 and 2
    >>> hvd.allreduce(x), hvd.allreduce(x, op=hvd.Sum)
    (tensor([1.5000]), tensor([3.]))
    >>> hvd.synchronize(hvd.allreduce_async(x))
    tensor([1.5000])
    >>> hvd.allreduce_(x)
    tensor([1.5000])
    >>> x  # in place
    tensor([1.5000])
    >>> hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum))
    tensor([3.])
    """,
    in_place=True,
)
grouped_allreduce, grouped_allreduce_async, grouped_allreduce_, grouped_allreduce_async_ = _family(
    "grouped_allreduce",
    _REDUCE,
    _OF_REDUCTIONS,
    "Return the reduction of each tensor over the ranks, all in one message; see `allreduce`.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> xs = [torch.tensor([1.0 + hvd.rank()]), torch.ones(2)]
    >>> hvd.grouped_allreduce(xs, op=hvd.Sum)
    [tensor([3.]), tensor([2., 2.])]
    >>> hvd.synchronize(hvd.grouped_allreduce_async(xs, op=hvd.Sum))
    [tensor([3.]), tensor([2., 2.])]
    >>> hvd.grouped_allreduce_(xs)
    [tensor([1.5000]), tensor([1., 1.])]
    >>> hvd.synchronize(hvd.grouped_allreduce_async_(xs))
    [tensor([1.5000]), tensor([1., 1.])]
    """,
    in_place=True,
)
allgather, allgather_async = _family(
    "allgather",
    _GATHER,
    "name process_set",
    "Return the tensors of all ranks, one after the other along the first dimension, in which "
    "alone they may differ. The gradient is averaged over the ranks, as in Horovod.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> x = torch.full((1 + hvd.rank(),), 1.0 + hvd.rank())  # 1 and 2, 2
    >>> hvd.allgather(x)
    tensor([1., 2., 2.])
    >>> hvd.synchronize(hvd.allgather_async(x))
    tensor([1., 2., 2.])
    """,
)
grouped_allgather, grouped_allgather_async = _family(
    "grouped_allgather",
    _GATHER,
    "name process_set",
    "Return `allgather` of each tensor.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> xs = [torch.tensor([1.0 + hvd.rank()]), torch.zeros(1)]
    >>> hvd.grouped_allgather(xs)
    [tensor([1., 2.]), tensor([0., 0.])]
    >>> hvd.synchronize(hvd.grouped_allgather_async(xs))
    [tensor([1., 2.]), tensor([0., 0.])]
    """,
)
broadcast, broadcast_async, broadcast_, broadcast_async_ = _family(
    "broadcast",
    _BROADCAST,
    "root_rank name process_set",
    "Return the tensor of one rank, by its number in the job. The gradient is averaged over the "
    "ranks, as in Horovod.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> x = torch.tensor([1.0 + hvd.rank()])  # 1 and 2
    >>> hvd.broadcast(x, root_rank=1)
    tensor([2.])
    >>> hvd.synchronize(hvd.broadcast_async(x, root_rank=1))
    tensor([2.])
    >>> hvd.broadcast_(x, root_rank=0)
    tensor([1.])
    >>> hvd.synchronize(hvd.broadcast_async_(x, root_rank=0))
    tensor([1.])
    """,
    in_place=True,
)
_, _, grouped_broadcast_, _ = _family(
    "grouped_broadcast",
    _BROADCAST,
    "root_rank name process_set",
    "Return the tensors of one rank; see `broadcast`.",
    in_place=True,
)
alltoall, alltoall_async = _family(
    "alltoall",
    _EXCHANGE,
    "splits name process_set",
    "Return the rows that all ranks send to this one, in rank order. `splits` has the number of "
    "rows for each rank, equal by default; if given, the numbers received are returned as well.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> x = torch.tensor([0, 1]) + 10 * hvd.rank()  # row i for rank i
    >>> hvd.allgather_object(hvd.alltoall(x).tolist())
    [[0, 10], [1, 11]]
    >>> rows, received = hvd.synchronize(hvd.alltoall_async(x, splits=[1, 1]))
    >>> received
    tensor([1, 1], dtype=torch.int32)
    """,
)
reducescatter, reducescatter_async = _family(
    "reducescatter",
    _SCATTER,
    _OF_SCATTERS,
    "Return this rank's rows of the reduction of a tensor; earlier ranks may have one more. The "
    "gradient gathers the rows of all ranks.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> x = torch.arange(4.0) + hvd.rank()
    >>> hvd.allgather_object(hvd.reducescatter(x, op=hvd.Sum).tolist())
    [[1.0, 3.0], [5.0, 7.0]]
    >>> mine = hvd.synchronize(hvd.reducescatter_async(x))
    >>> mine.shape
    torch.Size([2])
    """,
)
grouped_reducescatter, grouped_reducescatter_async = _family(
    "grouped_reducescatter",
    _SCATTER,
    _OF_SCATTERS,
    "Return `reducescatter` of each tensor.",
    """
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> xs = [torch.arange(4.0), torch.ones(2)]
    >>> [y.shape for y in hvd.grouped_reducescatter(xs)]
    [torch.Size([2]), torch.Size([1])]
    >>> [y.shape for y in hvd.synchronize(hvd.grouped_reducescatter_async(xs))]
    [torch.Size([2]), torch.Size([1])]
    """,
)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> CallableHandle:
    """Start to reduce a sparse tensor over the ranks, and return a handle. Collective.

    `handle()` and `synchronize(handle)` wait for the result and return it, once. The result is
    coalesced. Outside autograd.

    Parameters
    ----------
    tensor: a sparse COO tensor, of one shape and type on all ranks. The number of its non-zero
        elements may differ between ranks, and be 0.
    op: Average or Sum; averages of whole numbers are truncated.

    Raises
    ------
    TypeError
        For a tensor of another layout.
    ValueError
        For another `op`.
    HorovodInternalError
        On every rank, if shapes or types differ.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> x = torch.eye(2)[hvd.rank()].to_sparse()  # (1, 0) and (0, 1)
    >>> handle = hvd.sparse_allreduce_async(x, name="rows", op=hvd.Sum)
    >>> hvd.synchronize(handle).to_dense()
    tensor([1., 1.])
    """
    caller = "sparse_allreduce_async"
    refuse_dist_tensors(caller, tensor)
    op = sum_or_average(caller, op)
    if tensor.layout != torch.sparse_coo:
        raise TypeError(
            f"distconv.horovod.{caller}: the tensor's layout is {tensor.layout}; pass a "
            "torch.sparse_coo tensor, for example x.to_sparse(), or call allreduce_async"
        )
    own = tensor.detach().coalesce()
    shape, detail = tuple(tensor.shape), (str(op), tuple(tensor.shape))
    options = {"kind": "sparse_allreduce", "name": name, "detail": detail}
    job, made = process_set.job, partial(torch.sparse_coo_tensor, check_invariants=False)
    wait = _gather(job, [own.indices().t().contiguous(), own.values()], options)

    def result() -> Tensor:
        indices, values = wait()
        values = values.float() if own.dtype in _HALVES else values
        total = made(indices.t(), values, shape).coalesce()
        values = _mean(total.values(), job.size) if op is Average else total.values()
        return made(total.indices(), values.to(own.dtype), shape, is_coalesced=True)

    return CallableHandle(give_handle(result))
