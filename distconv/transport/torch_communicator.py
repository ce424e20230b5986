"""Ranks that torchrun, or a program by torch.distributed, has started, as a `Communicator`."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distconv.transport.communicator import Comparison, with_opposites
from distconv.transport.torch_groups import (
    ProcessGroup,
    Store,
    complete,
    finish,
    gloo_group,
    group_name,
    start,
)


class TorchCommunicator:
    """Some ranks of a job that share a store of torch.distributed.

    Parameters
    ----------
    store: of all ranks of the job; None where this rank is the only one.
    me, ranks: this rank's number in the job, and those of all that take part.
    """

    def __init__(self, store: Store | None, me: int, ranks: tuple[int, ...], purpose: str):
        self.store, self.ranks, self.purpose = store, ranks, purpose
        self.rank, self.size = ranks.index(me), len(ranks)
        self._me = me

    @cached_property
    def group(self) -> ProcessGroup:
        """Return the process group of several ranks, which make it together at first need."""
        name = group_name(self.purpose, self.ranks)
        return gloo_group(self.store, name, self.rank, self.size)

    def allgather(self, value: Any) -> list[Any]:
        """Return what every rank passes, in rank order."""
        if self.size == 1:
            return [value]
        mine = _pickled(value)
        lengths = self.all_gather_numbers([len(mine)])[:, 0].tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        together = padded.new_empty((self.size, len(padded)))
        complete(self.group._allgather_base, together.view(-1), padded)
        return [_unpickled(row[:n]) for row, n in zip(together, lengths, strict=True)]

    def bcast(self, value: Any = None) -> Any:
        """Return what the first rank passes."""
        if self.size == 1:
            return value
        mine = _pickled(value if self.rank == 0 else None)
        length = torch.tensor([len(mine)])
        complete(self.group.broadcast, length, 0)
        message = mine if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        complete(self.group.broadcast, message, 0)
        return _unpickled(message)

    def all_gather_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers of every rank, of shape (size, len(numbers)), in 64 bits."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        together = mine.new_empty((self.size, len(numbers)))
        if self.size == 1:
            together[0] = mine
        else:
            complete(self.group._allgather_base, together.view(-1), mine)
        return together.numpy()

    def compare(self, numbers: Sequence[int]) -> Comparison:
        """Start to compare numbers of fewer than 64 bits with those of the other ranks."""
        from torch.distributed import ReduceOp

        most = with_opposites(numbers)
        if self.size == 1:
            return Comparison(lambda: None, most)
        work = start(self.group.allreduce, torch.frombuffer(most, dtype=torch.int64), ReduceOp.MAX)
        return Comparison(partial(finish, work), most)

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> TorchCommunicator:
        """Return a communicator of some of the ranks, in numbers of the job; those call it."""
        made = TorchCommunicator(self.store, self._me, ranks, purpose)
        if made.size > 1:
            assert made.group is not None  # made now, and not in the middle of an operator
        return made

    def for_program(self) -> TorchCommunicator:
        """Return this communicator."""
        return self


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(message: Tensor) -> Any:
    return pickle.loads(message.numpy().tobytes())
