"""The user's choice between the two ways to compute a convolution on a cut plane.

By default `ops.conv.overlapped.may_overlap` chooses, by the size of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

METHODS = ("assembled", "overlapped")
_FORCED: ContextVar[str | None] = ContextVar("distconv_method", default=None)


@contextmanager
def method(name: str) -> Iterator[None]:
    """Compute convolutions in this context by the method `name`, where both apply; for debugging.

    "assembled" copies a rank's block and its halos into one buffer and computes on that.
    "overlapped" computes on the block as it is while the halos travel, and mends the boundary.
    Results are equal to rounding. Outside the context the faster method is taken. All ranks must
    choose the same. If torch.utils.checkpoint computes activations again, `backward()` belongs
    within the context too; outside, torch raises its `CheckpointError` unless the methods agree.
    Another name raises `ValueError`.
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r} is not known; choose from {', '.join(METHODS)}")
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


def chosen_method() -> str | None:
    """Return the method set by `method`; None outside of it."""
    return _FORCED.get()
