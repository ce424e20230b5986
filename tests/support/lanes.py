"""Ranks that reach each other's memory without GPUs: MPI shares it, and threads are the lanes."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import numpy as np
from mpi4py import MPI
from torch import Tensor

from distconv.transport.mailboxes import Mailboxes, initial_semaphores, mailbox_bytes
from distconv.transport.mpi import MPITransport
from distconv.transport.peer import PeerTransport


class Marked:
    """What a lane has been given so far."""

    def __init__(self, tensors: Iterable[Tensor]):
        self.happened = threading.Event()
        self._tensors = tuple(tensors)

    def wait(self) -> None:
        self.happened.wait()
        self._tensors = ()


class ThreadLane:
    """Stands for `transport.peer_stream.PeerStream`: a thread does what it is given, in order.

    Parameters
    ----------
    window: what shares the memory of ranks.
    pause: seconds that pass at most before something is done.
    """

    def __init__(self, window: MPI.Win, pause: float = 0.0):
        self._window, self._pause = window, pause
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        rng = random.Random(MPI.COMM_WORLD.rank)
        while True:
            work = self._work.get()
            if self._pause and not rng.randrange(4):
                time.sleep(rng.uniform(0, self._pause))
            work()

    def follow(self) -> None:
        """On a CPU the program has done already what it did before."""

    def run(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def acquire(self, semaphore: int) -> None:
        self._work.put(lambda: self._acquire(ctypes.c_uint32.from_address(semaphore)))

    def _acquire(self, semaphore: ctypes.c_uint32) -> None:
        while not semaphore.value:
            time.sleep(1e-5)
        self._window.Sync()
        semaphore.value = 0

    def release(self, semaphore: int) -> None:
        self._work.put(lambda: self._release(ctypes.c_uint32.from_address(semaphore)))

    def _release(self, semaphore: ctypes.c_uint32) -> None:
        assert not semaphore.value, "released twice"
        self._window.Sync()
        semaphore.value = 1

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._work.put(lambda: ctypes.memmove(target, source, nbytes))

    def mark(self, tensors: Iterable[Tensor]) -> Marked:
        marked = Marked(tensors)
        self._work.put(marked.happened.set)
        return marked


_WINDOWS: list[MPI.Win] = []


def connected(
    slot: int, reached: list[frozenset[int]] | None = None, pause: float = 0.0
) -> PeerTransport:
    """A transport of all ranks, and MPI beyond those that are `reached`; collective."""
    world = MPI.COMM_WORLD
    window = MPI.Win.Allocate_shared(mailbox_bytes(world.size, slot), comm=world)
    _WINDOWS.append(window)  # for as long as a lane may use it
    memory = [window.Shared_query(rank)[0] for rank in range(world.size)]
    head = np.array(initial_semaphores(world.size), np.uint32)
    np.frombuffer(memory[world.rank], np.uint32, len(head))[:] = head
    window.Lock_all()
    window.Sync()
    world.Barrier()
    lane = ThreadLane(window, pause)
    boxes = Mailboxes(lane, [m.address for m in memory], world.rank, slot)
    everyone = frozenset(range(world.size))
    return PeerTransport(
        world,
        reached or [everyone] * world.size,
        {rank: rank for rank in everyone},
        lane,
        boxes,
        MPITransport(world.Dup()),
    )
