"""Checks and stand-ins for blocks that torch's pooling refuses."""

from __future__ import annotations

from torch import Tensor

from distconv.comm.packing import empty_in_format, has_channels_last
from distconv.device.kinds import is_accelerator
from distconv.tensor.dist_tensor import DistTensor


def check_pooled_type(name: str, input: DistTensor, implemented: bool) -> None:
    """Raise NotImplementedError on every rank unless `implemented`.

    `implemented` says whether torch can pool the type of `input`; `name` is the name of the pooling
    function, for the error.
    """
    if not implemented:
        raise NotImplementedError(
            f"{name}: not implemented for {input.dtype}; convert it, x.float()"
        )


def with_some_channel(x: Tensor) -> Tensor:
    """Return `x`; if it has no channels, which torch refuses, return an empty batch with one."""
    return x if x.shape[1] else x.reshape(0, 1, *x.shape[2:])


def unread_input(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a stand-in of `shape` for the input that a backward pass of pooling does not read.

    torch takes only the shape of this input, and its memory format, which is that of `like`. On
    GPUs torch copies the input if it is not contiguous, so memory is allocated for it there.
    """
    if is_accelerator(like.device) or has_channels_last(like):
        return empty_in_format(shape, like)
    return like.new_empty(()).expand(shape)
