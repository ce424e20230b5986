"""A layout for each layer: hooks that redistribute the inputs of modules."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from distconv.geometry.layout import Layout
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.eager import SerialTrace
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


_numbers = count()
_LAYOUTS: WeakValueDictionary[int, InputLayout] = WeakValueDictionary()
"""All hooks of this module by number, as functions of a traced graph refer to them."""


def redistributed_node(number: int, x: Tensor) -> Tensor:
    """Return `x` as the hook `number` redistributes it; a graph of `compile` has it as a node."""
    hook = _LAYOUTS.get(number)
    return hook.redistributed(x) if hook and isinstance(x, DistTensor) else x.clone()


class InputLayout:
    """A forward pre-hook of a module that redistributes its input tensors to one layout."""

    def __init__(self, name: str, layout: Layout):
        self._operator, self._layout = f"layouts, {name or 'the module'}", layout
        self._number = next(_numbers)
        _LAYOUTS[self._number] = self

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if SerialTrace.under_way:
            named = {key: self._traced(x) for key, x in kwargs.items()}
            return tuple([self._traced(x) for x in args]), named
        return self._redistribute(args, kwargs)

    def redistributed(self, x: DistTensor) -> DistTensor:
        """Return `x` in the hook's layout. Collective."""
        return redistribute_once(x, cuts_of_layout(self._layout, x.grid, x.dim()), self._operator)

    @run_eagerly
    def _redistribute(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        recut = {
            id(x): self.redistributed(x)
            for x in tensors_in(args, kwargs)
            if isinstance(x, DistTensor)
        }
        return replaced(args, recut), replaced(kwargs, recut)

    def _traced(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return redistributed_node(self._number, argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)([self._traced(x) for x in argument])
        return argument
