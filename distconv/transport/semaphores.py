"""Binary semaphores in the memory of GPUs, on which streams wait, not the host.

A rank acquires those in its own memory, and releases them there and in the memory of others. Their
values are 0 and 1 whatever has happened before, so that graphs of CUDA can be replayed.
"""

from __future__ import annotations

from typing import Any, Protocol


class Semaphores(Protocol):
    """What a stream, known by its address, can do with the semaphore at an address."""

    def acquire(self, stream: int, semaphore: int) -> None:
        """Let the stream wait until the semaphore is 1, and make it 0."""

    def release(self, stream: int, semaphore: int) -> None:
        """Make the semaphore 1, when other GPUs can see all that the stream was given before."""


class DriverSemaphores:
    """Semaphores by the operations on memory that the driver offers on streams (cuda-bindings)."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        kinds = driver.CUstreamWaitValue_flags
        self._until_equal = int(kinds.CU_STREAM_WAIT_VALUE_EQ)
        can_flush = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        device = self._checked(driver.cuCtxGetDevice())
        if self._checked(driver.cuDeviceGetAttribute(can_flush, device)):
            # Such a GPU may see the semaphore of another before the message that was written first.
            self._until_equal |= int(kinds.CU_STREAM_WAIT_VALUE_FLUSH)

    def acquire(self, stream: int, semaphore: int) -> None:
        """Let the stream wait until the semaphore is 1, and make it 0."""
        self._checked(self._driver.cuStreamWaitValue32(stream, semaphore, 1, self._until_equal))
        self._checked(self._driver.cuStreamWriteValue32(stream, semaphore, 0, 0))

    def release(self, stream: int, semaphore: int) -> None:
        """Make the semaphore 1; the driver orders that after all earlier writes."""
        self._checked(self._driver.cuStreamWriteValue32(stream, semaphore, 1, 0))

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        """Return the result of a function of the driver, if it has one."""
        status, *value = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"an operation on memory of a GPU failed: {status!s}")
        return value[0] if value else None


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


class KernelSemaphores:
    """Semaphores by kernels of one thread, where cuda-bindings is missing.

    Such a kernel holds the GPU while it waits. It needs GPUs from Volta on.
    """

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.ExternalStream
        module = cupy.RawModule(code=_SOURCE)
        self._acquire, self._release = (module.get_function(n) for n in ("acquire", "release"))

    def acquire(self, stream: int, semaphore: int) -> None:
        """Let the stream wait until the semaphore is 1, and make it 0."""
        with self._stream(stream):
            self._acquire((1,), (1,), (semaphore,))

    def release(self, stream: int, semaphore: int) -> None:
        """Make the semaphore 1."""
        with self._stream(stream):
            self._release((1,), (1,), (semaphore,))


def make_semaphores() -> Semaphores:
    """Return the semaphores that this process has libraries for; a CUDA context is current."""
    try:
        return DriverSemaphores()
    except ImportError:
        return KernelSemaphores()
