"""Compressions of messages, and the handles of collectives in flight."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

# Horovod's compressions, which make tensors smaller before they are sent.


class NoneCompressor:
    """No compression: send tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor` unchanged, and None as the `ctx` of `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` unchanged."""
        return tensor


class FP16Compressor:
    """Compress floating-point tensors to float16 for messages; compute sums in float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return `tensor`, in float16 if it is floating-point, and its original type."""
        smaller = tensor.half() if tensor.is_floating_point() else tensor
        return smaller, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return `tensor` converted to its original type `ctx`, as `compress` returned it."""
        return tensor.to(ctx)


class Compression:
    """The compressions for gradients and reductions: `none` and `fp16`.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> hvd.allreduce(torch.full((2,), 1.0 + hvd.rank()), compression=hvd.Compression.fp16)
    tensor([1.5000, 1.5000])
    """

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(caller: str, compression: Any) -> None:
    """Raise ValueError unless `compression` has the methods `compress` and `decompress`.

    `caller` is the name of the calling function, for the error message.
    """
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"distconv.horovod.{caller}: compression={compression!r} is unknown; choose "
            "Compression.none or Compression.fp16 of distconv.horovod"
        )


# Handles, numbers by which a program gets the results of collectives that it has started.


_handles = count(1)
_under_way: dict[int, Callable[[], Any]] = {}
"""For each handle, the function that waits for the result of the collective and returns it."""


def give_handle(result: Callable[[], Any]) -> int:
    """Return a new handle; `synchronize` will call `result`, which waits for a collective."""
    handle = next(_handles)
    _under_way[handle] = result
    return handle


class CallableHandle(int):
    """A handle that can be called to wait for the result, as `synchronize` does."""

    def __call__(self) -> Any:
        """Wait for the collective, and return its result, once."""
        return synchronize(self)


def synchronize(handle: int) -> Any:
    """Wait for a started collective, and return its result, once for each handle.

    Later calls with the same handle return None, as in Horovod.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> handle = hvd.allreduce_async(torch.tensor([1.0 + hvd.rank()]))
    >>> hvd.synchronize(handle)
    tensor([1.5000])
    """
    return _under_way.pop(handle, lambda: None)()


def poll(handle: int) -> bool:
    """Wait for a started collective and return True, so that `synchronize` does not wait.

    Horovod's `poll` returns False while messages are in flight; this one waits instead.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> handle = hvd.allreduce_async(torch.ones(2))
    >>> hvd.poll(handle)
    True
    >>> hvd.synchronize(handle)
    tensor([1., 1.])
    """
    if handle in _under_way:
        result = _under_way[handle]()
        _under_way[handle] = lambda: result
    return True
