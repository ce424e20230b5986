"""Results of commands as one line of JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, is_dataclass
from typing import Any


def as_json(record: Any, **more: object) -> str:
    """Return the fields of a dataclass, and `more`, as one line of JSON.

    Values without a form in JSON become text; numbers that are not finite become null.
    """
    return json.dumps(_plain(asdict(record) | more), allow_nan=False, default=repr)


def _plain(value: Any) -> Any:
    """Return a value with dictionaries for dataclasses, and None for NaN and infinite numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
