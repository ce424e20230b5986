"""A layout for each layer: hooks that redistribute the inputs of modules."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from distconv.geometry.layout import Layout
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import replaced, tensors_in
from distconv.tensor.redistribution import cuts_of_layout, redistribute_once
from distconv.torch_private import run_eagerly


def match_layouts(module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layout of each module whose name matches a key of `layouts`, by module name.

    Keys are shell patterns as in Python's `fnmatch`; the last one that matches decides. Raises
    ValueError for a pattern that matches nothing. Raises TypeError for a pattern that is no string,
    or a value that is no layout.
    """
    if not isinstance(layouts, Mapping):
        raise TypeError(
            f"layouts={layouts!r} is not a dictionary; write {{'block5.*': Layout(...)}}, say"
        )
    parts = dict(module.named_modules(remove_duplicate=False))
    found: dict[nn.Module, Layout] = {}
    for pattern, layout in layouts.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"layouts: {pattern!r} is not a pattern of module names; write 'block5.*', say"
            )
        if not isinstance(layout, Layout):
            raise TypeError(
                f"layouts[{pattern!r}]={layout!r} is not a Layout; write "
                "Layout(channel='height'), say"
            )
        matching = [part for name, part in parts.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"layouts: no module's name matches {pattern!r}; the modules are "
                f"{', '.join(filter(None, parts))}, and '' is the whole"
            )
        found.update(dict.fromkeys(matching, layout))
    return {name: found[part] for name, part in parts.items() if part in found}


def redistribute_inputs(module: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Let each submodule named in `layouts` redistribute its input tensors to that layout."""
    for name, part in module.named_modules():
        if name in layouts:
            part.register_forward_pre_hook(InputLayout(name, layouts[name]), with_kwargs=True)


class InputLayout:
    """A forward pre-hook of a module that redistributes its input tensors to one layout."""

    def __init__(self, name: str, layout: Layout):
        self._name, self._layout = name, layout

    @run_eagerly
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        operator = f"layouts, {self._name or 'the module'}"
        recut = {
            id(x): redistribute_once(x, cuts_of_layout(self._layout, x.grid, x.dim()), operator)
            for x in tensors_in(args, kwargs)
            if isinstance(x, DistTensor)
        }
        return replaced(args, recut), replaced(kwargs, recut)
