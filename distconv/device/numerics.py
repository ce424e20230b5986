"""torch's settings that change numbers, and sizes from which libraries compute wrong numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CHANNELS_LAST = "DISTCONV_CHANNELS_LAST"

_WRONG_VOLUMES = range(90800, 91500)
"""Versions of cuDNN whose convolutions of a volume of 1.8e9 halves were found wrong, without an
error, from 9.8 until 9.15 (pytorch/pytorch, issues 163539 and 166643)."""

FEWEST_IN_DOUBT = 2**30
"""The most elements of a block of halves for which no convolution is known to be wrong."""


def in_doubt(elements: int) -> bool:
    """Return whether a convolution in half precision may compute wrong numbers without an error.

    `elements` is the number of elements of the block. Libraries count with 32 bits, which end at
    2**31; some versions of cuDNN have been wrong below.
    """
    version = torch.backends.cudnn.version()
    return elements > (FEWEST_IN_DOUBT if version in _WRONG_VOLUMES else 2**31)


def asks_for_channels_last() -> bool | None:
    """Return DISTCONV_CHANNELS_LAST as a bool, or None if it is not set.

    Raises ValueError if it is neither 1 nor 0.
    """
    value = os.environ.get(_CHANNELS_LAST) or None
    if value not in (None, "0", "1"):
        raise ValueError(f"{_CHANNELS_LAST}={value!r}; set it to 1 or 0, or not, on every rank")
    return None if value is None else value == "1"


def settings() -> dict[str, Any]:
    """Return torch's and distconv's settings that change numbers, by their names in programs."""
    cudnn, onednn = torch.backends.cudnn, torch.backends.mkldnn
    return {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        "torch.backends.cudnn.allow_tf32": _takes_tf32(cudnn),
        "torch.backends.cuda.matmul.allow_tf32": _takes_tf32(torch.backends.cuda.matmul),
        "torch.backends.mkldnn.enabled": onednn.enabled,
        "torch.backends.mkldnn.allow_tf32": getattr(onednn, "allow_tf32", None),
        _CHANNELS_LAST: asks_for_channels_last(),
    }


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Let GPUs compute in full float32 within the context, not in TF32 with its 10-bit mantissa."""
    switched = []
    for place in (torch.backends.cudnn, torch.backends.cuda.matmul):
        switch = _switch_of_tf32(place)
        switched.append((*switch, getattr(*switch)))
        setattr(*switch, False if switch[1] == "allow_tf32" else "ieee")
    try:
        yield
    finally:
        for where, name, before in switched:
            setattr(where, name, before)


def _takes_tf32(place: Any) -> bool:
    return getattr(*_switch_of_tf32(place)) in (True, "tf32")


def _switch_of_tf32(place: Any) -> tuple[Any, str]:
    """Return the object and the attribute name by which torch switches TF32 on or off.

    `place` is `torch.backends.cudnn` or `torch.backends.cuda.matmul`. From torch 2.9 on the
    attribute has a new name; once a program has used the new one, reading the old one raises.
    """
    try:
        _ = place.allow_tf32
    except RuntimeError:
        return getattr(place, "conv", place), "fp32_precision"
    return place, "allow_tf32"
