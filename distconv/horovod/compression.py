"""How gradients travel: as they are, or in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """A way in which tensors change before they travel, and back.

    Subclasses define both; the sum of what `compress` returns is taken, and given to `decompress`.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor that has travelled, as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Let tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Let tensors of floating point travel as float16, infinite beyond 65504."""

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
