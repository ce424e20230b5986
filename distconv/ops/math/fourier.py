"""Fourier transforms; the dimensions that are transformed are made whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.ops.support.argument_forms import normalize_dims
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import gather_whole
from distconv.ops.support.whole_dimensions import apply_along
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def _transform(name: str) -> None:
    function: Callable[..., Tensor] = getattr(torch.fft, name)
    last: Any = -1 if not name.endswith(("2", "n")) else (-2, -1) if name.endswith("2") else None

    @implements(function)
    def rule(
        input: DistTensor, n: Any = None, dim: Any = last, norm: str | None = None, s: Any = None
    ) -> Any:
        sizes = n if s is None else s
        sizes = tuple(sizes) if isinstance(sizes, Sequence) else sizes
        dim = tuple(dim) if isinstance(dim, Sequence) else dim
        check_on_meta(function, input, sizes, dim, norm)
        count = len(sizes) if dim is None and sizes is not None else input.dim()
        over = tuple(range(input.dim() - count, input.dim())) if dim is None else dim
        chosen = normalize_dims(over, input.dim())
        return apply_along(function, name, input, chosen, sizes, dim, norm)


for _name in ("fft", "hfft", "rfft"):
    for _form in ("", "2", "n"):
        _transform(f"{_name}{_form}")
        _transform(f"i{_name}{_form}")


def _shift(name: str, before: int) -> None:
    function: Callable[..., Tensor] = getattr(torch.fft, name)

    @implements(function)
    def rule(input: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
        check_on_meta(function, any_type(input), dim)
        over = normalize_dims(dim, input.dim())
        return torch.roll(input, [(input.shape[d] + before) // 2 for d in over], over)


_shift("fftshift", 0)
_shift("ifftshift", 1)


@implements(torch.stft, torch.Tensor.stft)
def stft(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
    arguments = [gather_whole(x, "stft") for x in args]
    named = {name: gather_whole(x, "stft") for name, x in kwargs.items()}
    d = input.dim() - 1
    return apply_along(torch.stft, "stft", input, [d], *arguments, dropped=[d], **named)
