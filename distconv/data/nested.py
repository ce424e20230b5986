"""Mini-batches as nested dictionaries, tuples and lists of tensors: replacing the leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any


def mapped(content: Any, change: Callable[[Any, Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a copy of the nested containers `content` with each leaf replaced.

    A leaf becomes `change(name, leaf)`. The name is the key or position of the leaf, a tuple of
    keys and positions for a leaf in nested containers, and 0 if `content` is itself the leaf. An
    immutable mapping becomes a dictionary. `path` is the name of `content` in recursive calls.
    """
    if isinstance(content, Mapping):
        made = {key: mapped(value, change, (*path, key)) for key, value in content.items()}
        if type(content) is dict or not isinstance(content, MutableMapping):
            return made
        # The constructor of a subclass may not accept a dictionary.
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
