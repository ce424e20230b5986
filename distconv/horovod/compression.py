"""Horovod's compressions, which make tensors smaller before they are sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """No compression: tensors are sent as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor, and None, which `decompress` expects."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor."""
        return tensor


class FP16Compressor:
    """Floating-point tensors are sent in float16, and added up in float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return a floating-point tensor in float16, any other as it is, and the tensor's type."""
        smaller = tensor.half() if tensor.is_floating_point() else tensor
        return smaller, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return the tensor in the type `ctx` that `compress` has returned."""
        return tensor.to(ctx)


class Compression:
    """The compressions for gradients and reductions: `none` and `fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(caller: str, compression: Any) -> None:
    """Raise ValueError unless `compression` has the methods `compress` and `decompress`.

    `caller` is the name of the calling function, for the error message.
    """
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"distconv.horovod.{caller}: compression={compression!r} is no compression; choose "
            "Compression.none or Compression.fp16 of distconv.horovod"
        )
