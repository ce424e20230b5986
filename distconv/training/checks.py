"""The check of counts among the arguments of training methods."""

from __future__ import annotations


def check_count(owner: str, name: str, value: object, least: int) -> None:
    """Raise ValueError unless argument `name` of `owner` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}: {name}={value!r} is no count; give an integer from {least} on")
