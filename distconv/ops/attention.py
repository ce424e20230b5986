"""Multi-head attention: torch's own Python code, which calls functions that have rules."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from distconv.tensor.dispatch import implements
from distconv.torch_private import composition

_attention = composition(F.multi_head_attention_forward)


@implements(F.multi_head_attention_forward)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """Return attention outputs and weights for queries, (length, sample, features).

    The query's cuts along samples and length stay. Features, keys and values are made whole on
    every rank.
    """
    return _attention(*args, **kwargs)
