"""Multi-head attention, by torch's own composition of functions that have rules."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from distconv.tensor.dispatch import implements


def _composition(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's as it is written in Python, without its own dispatch.

    It does not hand distributed tensors over as a whole, so each function that it calls does.
    """
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention = _composition(F.multi_head_attention_forward)


@implements(F.multi_head_attention_forward)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """Return the attention of (length, sample, features) queries, and its weights if asked for.

    Samples and the lengths of queries stay cut where they are; features, keys and values are made
    whole where they are cut.
    """
    return _attention(*args, **kwargs)
