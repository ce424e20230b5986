"""Tensors and objects of one rank for all, and those of all ranks for each."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.optim import LBFGS, Optimizer

from distconv.geometry.topology import AXES
from distconv.horovod.handles import give_handle
from distconv.horovod.job import PURPOSE, Announcement, check_plain, current
from distconv.horovod.reductions import (
    ProcessSet,
    Sum,
    allreduce,
    check_process_set,
    global_process_set,
)


def _broadcast(caller: str, tensors: list[Tensor], root_rank: int, name: str | None) -> None:
    """Overwrite tensors by those of one rank; those of a type and device travel together."""
    check_plain(caller, *tensors)
    job = current()
    if not isinstance(root_rank, int) or not 0 <= root_rank < job.size:
        raise ValueError(
            f"distconv.horovod.{caller}: root_rank={root_rank!r} is no rank; give one from 0 to "
            f"{job.size - 1}"
        )
    if job.size == 1:
        return
    shapes = tuple((tuple(x.shape), str(x.dtype), x.device.type) for x in tensors)
    job.announce(Announcement(caller, (root_rank, name, *shapes)))
    groups: dict[tuple[torch.dtype, str], list[Tensor]] = defaultdict(list)
    for x in tensors:
        groups[x.dtype, x.device.type].append(x.detach())
    for alike in groups.values():
        grid = job.on(alike[0].device, root_rank)
        flat = torch.cat([x.reshape(-1) for x in alike])
        if flat.numel():
            grid.transport.broadcast(flat, grid.communicator(AXES, PURPOSE))
        for x, piece in zip(alike, flat.split([x.numel() for x in alike]), strict=True):
            x.copy_(piece.view(x.shape))


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        ctx.root_rank = root_rank
        result = tensor.clone()
        _broadcast("broadcast", [result], root_rank, name)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = allreduce(gradients[0], op=Sum)
        root = current().rank == ctx.root_rank
        return (total if root else torch.zeros_like(total)), None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of one rank, on all ranks, which call it together; differentiable."""
    check_process_set(process_set)
    check_plain("broadcast", tensor)
    result: Tensor = _Broadcast.apply(tensor, root_rank, name)
    return result


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor by that of one rank, and return it; all ranks call it together."""
    check_process_set(process_set)
    _broadcast("broadcast_", [tensor], root_rank, name)
    return tensor


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Return a handle of `broadcast`, which is complete already."""
    result = broadcast_(tensor.detach().clone(), root_rank, name, process_set)
    return give_handle(lambda: result)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Return a handle of `broadcast_`, which is complete already."""
    broadcast_(tensor, root_rank, name, process_set)
    return give_handle(lambda: tensor)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters and buffers by those of one rank; all ranks call it together.

    Parameters
    ----------
    params: a state_dict, or what `named_parameters` returns.
    """
    check_process_set(process_set)
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
        named = [pair if isinstance(pair, tuple) else ("", pair) for pair in params]
    else:
        raise ValueError(
            f"distconv.horovod.broadcast_parameters: {type(params).__name__} holds no parameters; "
            "pass model.state_dict() or model.named_parameters()"
        )
    tensors = [tensor for _, tensor in named if isinstance(tensor, Tensor)]
    _broadcast("broadcast_parameters", tensors, root_rank, None)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an object of one rank, on all ranks, which call it together.

    Tensors in it come to the CPU.
    """
    check_process_set(process_set)
    mine = current().rank == root_rank
    message = _pickled(obj) if mine else torch.zeros(0, dtype=torch.uint8)
    length = torch.tensor([message.numel()])
    _broadcast("broadcast_object", [length], root_rank, name)
    if not mine:
        message = torch.zeros(int(length), dtype=torch.uint8)
    _broadcast("broadcast_object", [message], root_rank, name)
    return obj if mine else _unpickled(message)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give an optimizer the state and settings that it has on one rank; all ranks call it together.

    Parameters
    ----------
    model: is not used; Horovod takes it for optimizers that shard their state.
    """
    check_process_set(process_set)
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "distconv.horovod.broadcast_optimizer_state: LBFGS keeps a history that is its own; "
            "begin with the same parameters on all ranks, and step together"
        )
    if current().size == 1:
        return
    mine = current().rank == root_rank
    state = broadcast_object(optimizer.state_dict() if mine else None, root_rank)
    if not mine:
        optimizer.load_state_dict(state)


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None) -> Tensor:
        job = current()
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        ctx.shape = tensor.shape
        detail = (name, str(tensor.dtype), tensor.device.type, tuple(rows.shape[1:]))
        everyone = job.announce(Announcement("allgather", detail, own=len(rows)))
        lengths = [theirs.own for theirs in everyone]
        ctx.start, ctx.length = sum(lengths[: job.rank]), len(rows)
        if job.size == 1:
            return rows.clone()
        if not sum(lengths) * rows.shape[1:].numel():
            return rows.new_zeros(sum(lengths), *rows.shape[1:])
        grid = job.on(tensor.device)
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        stacked = grid.transport.all_gather(padded, grid.communicator(AXES, PURPOSE))
        return torch.cat([stacked[r, :n] for r, n in enumerate(lengths)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = allreduce(gradients[0], op=Sum)
        return total.narrow(0, ctx.start, ctx.length).reshape(ctx.shape), None


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, one after the other along the first dimension.

    All ranks call it together. The shapes differ in the first dimension only; a number counts as a
    vector of one. The gradient is summed over the ranks.
    """
    check_process_set(process_set)
    check_plain("allgather", tensor)
    result: Tensor = _Allgather.apply(tensor, name)
    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Return a handle of `allgather`, which is complete already."""
    result = allgather(tensor.detach(), name, process_set)
    return give_handle(lambda: result)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order; all ranks call it together."""
    check_process_set(process_set)
    job = current()
    everyone = job.announce(Announcement("allgather_object", (name,), own=_pickled(obj)))
    return [obj if r == job.rank else _unpickled(theirs.own) for r, theirs in enumerate(everyone)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called it."""
    check_process_set(process_set)
    current().announce(Announcement("barrier"))


def _pickled(value: Any) -> Tensor:
    # torch's own format keeps tensors that share memory together.
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _unpickled(message: Tensor) -> Any:
    file = io.BytesIO(message.numpy().tobytes())
    return torch.load(file, map_location="cpu", weights_only=False)
