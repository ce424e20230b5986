"""Binary semaphores in the memory of GPUs, on which streams wait, not the host.

A rank acquires those in its own memory, and releases them there and in the memory of others. Their
values are 0 and 1 whatever has happened before, so that graphs of CUDA can be replayed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol


class Semaphores(Protocol):
    """What a stream, known by its address, can do with the semaphore at an address."""

    def acquire(self, stream: int, semaphore: int) -> None:
        """Let the stream wait until it is 1, and make it 0."""

    def release(self, stream: int, semaphore: int) -> None:
        """Make it 1, when what the stream has been given before can be seen by other GPUs."""


class MemoryOperations:
    """By the operations on memory that the driver offers on streams, through cuda-bindings."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)

    def acquire(self, stream: int, semaphore: int) -> None:
        """Let the stream wait until it is 1, and make it 0."""
        self._check(self._driver.cuStreamWaitValue32(stream, semaphore, 1, self._equal))
        self._check(self._driver.cuStreamWriteValue32(stream, semaphore, 0, 0))

    def release(self, stream: int, semaphore: int) -> None:
        """Make it 1; the driver orders that after what has been written before."""
        self._check(self._driver.cuStreamWriteValue32(stream, semaphore, 1, 0))

    def _check(self, answer: tuple[Any]) -> None:
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"an operation on memory of a GPU failed: {answer[0]!s}")


_SOURCE = """
extern "C" __global__ void acquire(volatile unsigned int* semaphore) {
    while (*semaphore != 1) __nanosleep(100);
    *semaphore = 0;
    __threadfence_system();
}
extern "C" __global__ void release(volatile unsigned int* semaphore) {
    __threadfence_system();
    *semaphore = 1;
}
"""


class Kernels:
    """By kernels of one thread, where cuda-bindings is missing; they hold the GPU while they wait.

    They need GPUs from Volta on.
    """

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.ExternalStream
        module = cupy.RawModule(code=_SOURCE)
        self._acquire, self._release = (module.get_function(n) for n in ("acquire", "release"))

    def acquire(self, stream: int, semaphore: int) -> None:
        """Let the stream wait until it is 1, and make it 0."""
        with self._stream(stream):
            self._acquire((1,), (1,), (semaphore,))

    def release(self, stream: int, semaphore: int) -> None:
        """Make it 1."""
        with self._stream(stream):
            self._release((1,), (1,), (semaphore,))


def semaphores() -> Semaphores:
    """Those that this process has the libraries for."""
    return MemoryOperations() if find_spec("cuda.bindings") else Kernels()
