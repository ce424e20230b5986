"""Multi-head attention, by torch's own composition of functions that have rules."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from distconv.tensor.dispatch import implements
from distconv.torch_private import composition

_attention = composition(F.multi_head_attention_forward)


@implements(F.multi_head_attention_forward)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """Return the attention of (length, sample, features) queries, and its weights if asked for.

    Samples and the lengths of queries stay cut where they are; features, keys and values are made
    whole where they are cut.
    """
    return _attention(*args, **kwargs)
