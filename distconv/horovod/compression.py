"""The types in which gradients are sent: their own, or half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """A conversion of tensors before they are sent, and back.

    Subclasses define both methods. The results of `compress` are summed, and passed to
    `decompress`.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the received tensor converted back."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point tensors as float16, which is infinite beyond 65504."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor in float16, and its type."""
        floating = tensor.dtype.is_floating_point
        return (tensor.to(torch.float16) if floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its own type."""
        return tensor.to(ctx)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
