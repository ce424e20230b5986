"""Sums, averages and extremes over all ranks, as Horovod calls them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from distconv.comm.half_sums import HalfSum
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.horovod.compression import Compression, Compressor
from distconv.horovod.handles import give_handle, synchronize
from distconv.horovod.job import JOINED, PURPOSE, Announcement, Part, check_plain, current
from distconv.transport.interface import Request


class ReduceOp(Enum):
    """How the tensors of the ranks become one."""

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
"""The announcement, and the communicators, of the gradients of optimizers, which overlap others."""

_OF_ALL: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    Min: lambda stacked: stacked.amin(0),
    Max: lambda stacked: stacked.amax(0),
    Product: lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}
"""Ops that take the tensors of all ranks, stacked."""


class ProcessSet:
    """All ranks, the one process set that there is."""


global_process_set = ProcessSet()


def check_process_set(process_set: ProcessSet) -> None:
    """Raise `NotImplementedError` for any process set but that of all ranks."""
    if process_set is not global_process_set:
        raise NotImplementedError(
            f"distconv.horovod: process_set={process_set!r}: there are no process sets; make a "
            "distconv.ProcessGrid on some of the ranks, ProcessGrid([0, 1], sample=2)"
        )


def chosen_op(caller: str, op: ReduceOp | None, average: bool | None = None) -> ReduceOp:
    """Return the op that is asked for, by its name or by Horovod's older `average`."""
    if op is not None and average is not None:
        raise ValueError(f"distconv.horovod.{caller}: op and average are given; leave out average")
    if op is None:
        return Average if average in (None, True) else Sum
    if not isinstance(op, ReduceOp):
        raise ValueError(
            f"distconv.horovod.{caller}: op={op!r} is unknown; choose Average, Sum, Min, Max or "
            "Product of distconv.horovod"
        )
    if op is Adasum:
        raise NotImplementedError(
            f"distconv.horovod.{caller}: there is no Adasum; use op=Average with a rate by "
            "distconv.training.Recipe, or distconv.training.LARC, for large batches"
        )
    return op


def add_zeros(part: Part, purpose: str = PURPOSE) -> Request | None:
    """Take part in a sum without a summand; return what has still to arrive."""
    job = current()
    device = torch.device(part.device)
    grid = job.on(device)
    zeros = torch.zeros(part.elements, dtype=getattr(torch, part.dtype), device=grid.device)
    return start_sum(zeros, part, grid, purpose)


def start_sum(
    flat: Tensor, part: Part, grid: ProcessGrid, purpose: str = PURPOSE
) -> Request | None:
    """Start adding up a vector in place, or do it where it travels in another type."""
    if part.wire:
        HalfSum(flat, grid, AXES, getattr(torch, part.wire), purpose).wait()
        return None
    return grid.transport.all_reduce(flat, grid.communicator(AXES, purpose))


def part_of(flat: Tensor, wire: torch.dtype | None = None) -> Part:
    """Return the description of a vector."""
    name = "" if wire is None else str(wire).removeprefix("torch.")
    return Part(flat.numel(), str(flat.dtype).removeprefix("torch."), flat.device.type, name)


def sums(
    tensors: Sequence[Tensor], kind: str, detail: tuple[Any, ...]
) -> Callable[[], list[Tensor]]:
    """Start to add up tensors over all ranks; return what waits for the sums and returns them.

    Tensors of one type and device travel together. Those in half precision travel as they are, and
    are added up in float32.
    """
    job = current()
    groups: dict[tuple[torch.dtype, str], list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        groups[x.dtype, x.device.type].append(i)
    flats: list[Tensor] = []
    parts: list[Part] = []
    for (dtype, _), numbers in groups.items():
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in numbers])
        half = dtype in (torch.float16, torch.bfloat16)
        flats.append(flat.float() if half else flat)
        parts.append(part_of(flats[-1], dtype if half else None))
    requests: list[Request | None] = []
    if job.size > 1:
        shapes = tuple((tuple(x.shape), str(x.dtype)) for x in tensors)
        job.announce(Announcement(kind, (*detail, *shapes), tuple(parts)))
        for flat, part in zip(flats, parts, strict=True):
            requests.append(start_sum(flat, part, job.on(flat.device)))

    def finish() -> list[Tensor]:
        for request in requests:
            if request is not None:
                request.wait()
        requests.clear()
        results = list(tensors)
        for flat, numbers in zip(flats, groups.values(), strict=True):
            pieces = flat.split([tensors[i].numel() for i in numbers])
            for i, piece in zip(numbers, pieces, strict=True):
                results[i] = piece.view(tensors[i].shape).to(tensors[i].dtype)
        return results

    return finish


def _of_all(tensors: Sequence[Tensor], op: ReduceOp, detail: tuple[Any, ...]) -> list[Tensor]:
    """Return the extreme, or the product, of each tensor over all ranks."""
    job = current()
    shapes = tuple((tuple(x.shape), str(x.dtype)) for x in tensors)
    job.announce(Announcement(f"allreduce {op}", (*detail, *shapes)))
    results = []
    for x in tensors:
        grid = job.on(x.device)
        group = grid.communicator(AXES, PURPOSE)
        results.append(_OF_ALL[op](grid.transport.all_gather(x.detach().contiguous(), group)))
    return results


def _start(
    caller: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
) -> Callable[[], list[Tensor]]:
    """Start a reduction of several tensors; return what waits for the results."""
    check_plain(caller, *tensors)
    detail = (name, str(op), prescale_factor, postscale_factor)
    if op is Average:
        for x in tensors:
            if not (x.dtype.is_floating_point or x.dtype.is_complex):
                raise TypeError(
                    f"distconv.horovod.{caller}: the average of {x.dtype} is none of them in "
                    "general; convert to floating point, x.float(), or use op=Sum"
                )
        postscale_factor /= current().size
    before = [_scaled(x, prescale_factor) for x in tensors]
    if op in _OF_ALL:
        results = _of_all(before, op, detail)
        return lambda: [_scaled(x, postscale_factor) for x in results]
    finish = sums(before, caller, detail)
    return lambda: [_scaled(x, postscale_factor) for x in finish()]


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else (x * factor).to(x.dtype)


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, caller: str, options: tuple[Any, ...], *tensors: Tensor) -> Any:
        ctx.options = caller, options
        # A result that is the input itself would be taken for a view of it.
        results = _start(caller, tensors, *options)()
        return tuple(y.clone() if y is x else y for x, y in zip(tensors, results, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        caller, (name, op, *factors) = ctx.options
        if op in _OF_ALL:
            raise NotImplementedError(
                f"distconv.horovod.{caller}: op={op} has no gradient; use Sum or Average, or "
                "x.detach()"
            )
        return None, None, *_Allreduce.apply(f"{caller} backward", (name, op, *factors), *gradients)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the average, or another reduction, of each tensor over all ranks, which call it.

    The gradient of the result is reduced in the same way.
    """
    return _reduce(
        "grouped_allreduce",
        tensors,
        chosen_op("grouped_allreduce", op, average),
        (name, prescale_factor, postscale_factor),
        compression,
        process_set,
    )


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the average, or another reduction, of a tensor over all ranks, which call it together.

    The gradient of the result is reduced in the same way.

    Parameters
    ----------
    tensor: of the same shape and type on every rank.
    name: is compared between the ranks.
    op: Average, when not given, Sum, Min, Max or Product.
    prescale_factor, postscale_factor: of the summands, and of the result.
    """
    factors = name, prescale_factor, postscale_factor
    chosen = chosen_op("allreduce", op, average)
    return _reduce("allreduce", [tensor], chosen, factors, compression, process_set)[0]


def _reduce(
    caller: str,
    tensors: Sequence[Tensor],
    op: ReduceOp,
    factors: tuple[str | None, float, float],
    compression: type[Compressor],
    process_set: ProcessSet,
) -> list[Tensor]:
    check_process_set(process_set)
    check_plain(caller, *tensors)
    name, *scales = factors
    packed = [compression.compress(x) for x in tensors]
    reduced = _Allreduce.apply(caller, (name, op, *scales), *(x for x, _ in packed))
    return [compression.decompress(y, c) for y, (_, c) in zip(reduced, packed, strict=True)]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce`, and return a handle for `synchronize`; outside autograd.

    It returns when all ranks have called it.
    """
    options = average, name, op, prescale_factor, postscale_factor, process_set
    finish = _started("allreduce_async", [tensor], *options)
    return give_handle(lambda: finish()[0])


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce` of which `synchronize` writes the result to the tensor itself."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    finish = _started("allreduce_async_", [tensor], *options)
    return give_handle(lambda: _overwritten([tensor], finish())[0])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor by its reduction over all ranks, and return it."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    result: Tensor = synchronize(allreduce_async_(tensor, *options))
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce`, and return a handle for `synchronize`; outside autograd."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    return give_handle(_started("grouped_allreduce_async", tensors, *options))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce` of which `synchronize` writes the results to the tensors."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    finish = _started("grouped_allreduce_async_", tensors, *options)
    return give_handle(lambda: _overwritten(tensors, finish()))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Overwrite tensors by their reductions over all ranks, and return them."""
    options = average, name, op, prescale_factor, postscale_factor, process_set
    result: list[Tensor] = synchronize(grouped_allreduce_async_(tensors, *options))
    return result


def _started(
    caller: str,
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Callable[[], list[Tensor]]:
    """Start a reduction outside autograd; return what waits for the results, new tensors."""
    check_process_set(process_set)
    chosen = chosen_op(caller, op, average)
    finish = _start(caller, tensors, name, chosen, prescale_factor, postscale_factor)

    def results() -> list[Tensor]:
        return [y.clone() if y is x else y for x, y in zip(tensors, finish(), strict=True)]

    return results


def _overwritten(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)
    return list(tensors)


def join(device: int = -1) -> int:
    """Add zeros to the sums of the others until all ranks have come here; return the last to come.

    A rank calls it when it has no samples left. An average is the sum over all ranks divided by
    their number, those that have joined among them, as in Horovod: to weight by samples, add up
    sums and counts. Parameters stay those of the last step that the rank has taken; broadcast
    those of the rank that is returned.
    """
    job = current()
    under_way: list[Request] = []
    last = job.rank
    while job.size > 1:
        before = job.joined
        everyone = job.announce(JOINED)
        active = [a for a in everyone if a.kind != JOINED.kind]
        if not active:
            last = max(frozenset(range(job.size)) - before, default=job.size - 1)
            job.joined = frozenset()
            break
        of_gradients = active[0].kind == GRADIENTS
        if of_gradients:
            # These may end later than what is announced next; but not than the gradients next.
            _wait(under_way)
        for part in active[0].parts:
            request = add_zeros(part, GRADIENTS if of_gradients else PURPOSE)
            if request is not None:
                under_way.append(request)
    _wait(under_way)
    return last


def _wait(requests: list[Request]) -> None:
    for request in requests:
        request.wait()
    requests.clear()
