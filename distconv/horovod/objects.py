"""Broadcasts of models, optimizers and objects from one rank to all, and gathers of objects."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from distconv.horovod.collectives import broadcast, grouped_broadcast_
from distconv.horovod.job import Announcement, ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters and buffers with the values of rank `root_rank`. Collective.

    Parameters
    ----------
    params: a state_dict, or the result of `named_parameters`; values that are not tensors are
        ignored.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> model = nn.Linear(2, 1)
    >>> with torch.no_grad():
    ...     model.weight[:] = 5.0 + hvd.rank()  # 5 and 6
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> model.weight.tolist()
    [[5.0, 5.0]]
    """
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
    grouped_broadcast_(tensors, root_rank, None, process_set)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the `obj` of rank `root_rank` on all ranks. Collective.

    Calls with the same `name` belong together; without names, calls in the same order.
    Tensors in the result are on the CPU, except on rank `root_rank`, which gets its own `obj`.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
    {'epoch': 3}
    """
    mine = _is_root(root_rank, process_set)
    message = _pickled(obj) if mine else torch.zeros(0, dtype=torch.uint8)
    length = broadcast(torch.tensor([message.numel()]), root_rank, name, process_set)
    if not mine:
        message = torch.zeros(int(length), dtype=torch.uint8)
    message = broadcast(message, root_rank, name, process_set)
    return obj if mine else _unpickled(message)


def _is_root(root_rank: int, process_set: ProcessSet) -> bool:
    return process_set.ranks[process_set.job.rank] == root_rank


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite an optimizer's state and settings with rank `root_rank`'s. Collective.

    Parameters
    ----------
    model: ignored; Horovod uses it for optimizers that shard their state.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1 * (1 + hvd.rank()))
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "distconv.horovod.broadcast_optimizer_state: the history of LBFGS cannot be "
            "broadcast; start from the same parameters on all ranks instead"
        )
    if process_set.job.size == 1:
        return
    mine = _is_root(root_rank, process_set)
    state = optimizer.state_dict() if mine else None
    state = broadcast_object(state, root_rank, None, process_set)
    if not mine:
        optimizer.load_state_dict(state)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective.

    Calls with the same `name` belong together; without names, calls in the same order.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> hvd.allgather_object(f"rank {hvd.rank()}")
    ['rank 0', 'rank 1']
    """
    job = process_set.job
    announced = Announcement("allgather_object", name, own=_pickled(obj))
    everyone = job.start(announced, lambda everyone: lambda: everyone).wait()
    return [obj if r == job.rank else _unpickled(theirs.own) for r, theirs in enumerate(everyone)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called `barrier`.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> hvd.barrier()
    """
    process_set.job.start(Announcement("barrier"), lambda everyone: lambda: None).wait()


def _pickled(value: Any) -> Tensor:
    # torch's own format keeps tensors that share memory together.
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _unpickled(message: Tensor) -> Any:
    file = io.BytesIO(message.numpy().tobytes())
    return torch.load(file, map_location="cpu", weights_only=False)
