"""Mini-batches as loaders yield them: tensors in dictionaries, tuples and lists, nested at will."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any


def mapped(content: Any, change: Callable[[Any, Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return `content` in the same form, with `change(name, leaf)` in place of each leaf.

    The name of a leaf is its key or position, a tuple of them if it is nested, and 0 if
    `content` is itself the leaf. A mapping that cannot be changed becomes a dictionary.
    """
    if isinstance(content, Mapping):
        made = {key: mapped(value, change, (*path, key)) for key, value in content.items()}
        if type(content) is dict or not isinstance(content, MutableMapping):
            return made
        # A subclass may need other arguments than a dictionary.
        like = copy(content)
        like.update(made)
        return like
    if isinstance(content, tuple | list):
        items = [mapped(value, change, (*path, place)) for place, value in enumerate(content)]
        named = isinstance(content, tuple) and hasattr(content, "_fields")
        return type(content)(*items) if named else type(content)(items)
    if len(path) > 1:
        return change(path, content)
    return change(path[0] if path else 0, content)
