"""Process groups and communicators by torch.distributed, without its default group.

The ranks of a group find each other by the group's name in a store.
"""

from __future__ import annotations

import pickle
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_char
from datetime import timedelta
from functools import cached_property, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from distconv.device import groups
from distconv.device.kinds import is_accelerator
from distconv.torch_private import gather_flat
from distconv.transport.interface import Comparison, with_opposites
from distconv.transport.link import LOOPBACK

if TYPE_CHECKING:
    from distconv.transport.interface import Communicator

Store: TypeAlias = Any
"""A store of torch.distributed."""
ProcessGroup: TypeAlias = Any
"""A backend of torch.distributed, such as `ProcessGroupGloo`."""

NO_LIMIT = timedelta(days=365)
"""The time limit of gloo, longer than DISTCONV_TIMEOUT, whose report says more."""

_REACH = timedelta(seconds=20)
"""The time allowed for reaching the rank that keeps a store."""


def why_no_process_groups(device: str) -> str | None:
    """Return why torch cannot carry messages between devices of this kind; None if it can."""
    distributed = torch.distributed
    if not distributed.is_available():
        return "this torch is built without torch.distributed"
    if is_accelerator(torch.device(device)):
        return groups.why_no_backend(device)
    return None if distributed.is_gloo_available() else "this torch has no gloo"


def open_store(comm: Communicator) -> Store:
    """Return a new store over TCP, which the first rank keeps; None on ranks that cannot reach it.

    All ranks of `comm` call it. The first rank must leave last. Only processes of one host can
    reach the store where all ranks run there, and its keys have a prefix that only ranks know.
    """
    from torch.distributed import TCPStore

    store: Store = None
    hosts = comm.allgather(socket.gethostname())
    # The name of a single machine may be unknown to itself.
    first = hosts[0] if len(set(hosts)) > 1 else LOOPBACK
    if comm.rank == 0:
        listening = None
        if first == LOOPBACK:
            listening = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN).detach()
        with suppress(RuntimeError):
            store = TCPStore(
                first, 0, None, True, _REACH, wait_for_workers=False, master_listen_fd=listening
            )
    port, secret = comm.bcast((None if store is None else store.port, secrets.token_hex(16)))
    if comm.rank and port is not None:
        there = LOOPBACK if hosts[comm.rank] == hosts[0] else first
        with suppress(RuntimeError):
            store = TCPStore(there, port, None, False, _REACH, wait_for_workers=False)
    return None if store is None else prefixed(secret, store)


def common_store(comm: Communicator) -> Store:
    """Return a new store for process groups among the ranks of `comm`, which all call it.

    Raises RuntimeError on every rank if one cannot reach it.
    """
    store = open_store(comm)
    hosts = comm.allgather((socket.gethostname(), store is not None))
    lost = [f"{host} (rank {rank})" for rank, (host, reached) in enumerate(hosts) if not reached]
    if lost:
        raise RuntimeError(
            f"transport 'torch': {', '.join(lost)} cannot reach a port of {hosts[0][0]}, over "
            "which ranks find each other; open the ports between the nodes, or choose "
            "transport='mpi'"
        )
    store.set_timeout(NO_LIMIT)
    return store


def group_name(purpose: str, ranks: tuple[int, ...]) -> str:
    """Return a name for the group of these ranks, short for any number of ranks."""
    return f"{purpose} {sha256(repr(ranks).encode()).hexdigest()}"


def gloo_group(store: Store, name: str, rank: int, size: int) -> ProcessGroup:
    """Return the process group of gloo that is called `name`. All its ranks call it."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(prefixed(name, store), rank, size, timeout=NO_LIMIT)


def prefixed(name: str, store: Store) -> Store:
    """Return a view of a store in which all keys begin with `name`."""
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


def start(collective: Callable[..., Any], *arguments: Any) -> Any:
    """Start a collective, and return its `Work` of torch.distributed, for `finish`."""
    try:
        return collective(*arguments)
    except RuntimeError as error:
        raise explained(error) from error


def finish(work: Any) -> None:
    """Wait until the collective whose `start` returned `work` is complete."""
    try:
        work.wait()
    except RuntimeError as error:
        raise explained(error) from error


def complete(collective: Callable[..., Any], *arguments: Any) -> None:
    """Run a collective on contiguous tensors, whose memory the caller may use again afterwards."""
    finish(start(collective, *(lent(a) if isinstance(a, Tensor) else a for a in arguments)))


def lent(tensor: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous tensor, to be passed to gloo.

    gloo's thread holds a tensor for some time after the wait. The result does not own its memory,
    so the caller's memory is free as soon as the collective is complete.
    """
    if not tensor.numel():
        return tensor
    memory = (c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def explained(error: RuntimeError) -> RuntimeError:
    """Return an error of torch.distributed, with likely reasons added for the user."""
    return RuntimeError(
        f"torch.distributed could not complete the messages of an operator ({error}). Where it "
        "says that a connection was closed, another rank has ended; where it says that sizes "
        "differ, or that it timed out, the ranks run different operators, or one of them takes "
        "too long, and DISTCONV_DEBUG=1 names the first that differs"
    )


class TorchCommunicator:
    """A `Communicator` of ranks that share a store of torch.distributed, or of one rank alone.

    `store` is None for a single rank; `me` is this rank's number in the job.
    """

    def __init__(self, store: Store | None, me: int, ranks: tuple[int, ...], purpose: str):
        self.store, self.ranks, self.purpose = store, ranks, purpose
        self.rank, self.size = ranks.index(me), len(ranks)
        self._me = me

    @cached_property
    def group(self) -> ProcessGroup:
        """Return gloo's process group of the ranks, which make it together at the first call."""
        name = group_name(self.purpose, self.ranks)
        return gloo_group(self.store, name, self.rank, self.size)

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        mine = _pickled(value)
        lengths = self._gathered(torch.tensor([len(mine)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        together = self._gathered(padded)
        return [_unpickled(row[:n]) for row, n in zip(together, lengths, strict=True)]

    def bcast(self, value: Any = None) -> Any:
        if self.size == 1:
            return value
        mine = _pickled(value if self.rank == 0 else None)
        length = torch.tensor([len(mine)])
        complete(self.group.broadcast, length, 0)
        message = mine if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        complete(self.group.broadcast, message, 0)
        return _unpickled(message)

    def _gathered(self, mine: Tensor) -> Tensor:
        """Return the equally long vectors of all ranks, stacked. All ranks call it."""
        together = mine.new_empty((self.size, len(mine)))
        complete(gather_flat(self.group), together.view(-1), mine)
        return together

    def compare(self, numbers: Sequence[int]) -> Comparison:
        from torch.distributed import ReduceOp

        most = with_opposites(numbers)
        if self.size == 1:
            return Comparison(lambda: None, most)
        work = start(self.group.allreduce, torch.frombuffer(most, dtype=torch.int64), ReduceOp.MAX)
        return Comparison(partial(finish, work), most)

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> TorchCommunicator:
        made = TorchCommunicator(self.store, self._me, ranks, purpose)
        if made.size > 1:
            assert made.group is not None  # made now, and not in the middle of an operator
        return made

    def for_program(self) -> TorchCommunicator:
        return self


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(message: Tensor) -> Any:
    return pickle.loads(message.numpy().tobytes())
