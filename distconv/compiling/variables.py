"""The variables that the code of a step mentions: with other values a call is another case.

A replay runs no Python. The variables are global ones, those of enclosing functions, and attributes
of objects found there whose names the code mentions.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distconv.grid.program_lines import is_of_program
from distconv.torch_private import parts_and_parameters

_TOLD = {
    *(int, float, complex, bool, str, bytes, type(None), type(...), slice, range, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
"""Types whose values differ in their `repr`."""

_FEW, _DEEP = 256, 4
"""The most elements of a list that are looked at, and the most attributes or lists in a row."""

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"}
_ATTRIBUTES = {"LOAD_ATTR", "STORE_ATTR"}
_METHODS_BY_FLAG = sys.version_info >= (3, 12)
"""Whether LOAD_ATTR loads methods, too, and says so by the lowest bit of its argument."""


class _Same:
    """A wrapper of an object that equals only a wrapper of the same object."""

    __slots__ = ("_it",)

    def __init__(self, it: Any) -> None:
        self._it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._it is other._it

    def __hash__(self) -> int:
        return id(self._it)


def told(x: Any, tensors: bool = False, depth: int = _DEEP) -> Any:
    """Return a hashable key of the value `x`; with equal keys a step computes the same.

    Parameters
    ----------
    tensors: whether different tensors have different keys; otherwise all have the same.
    depth: the number of nested lists that are looked into.
    """
    if type(x) in _TOLD or isinstance(x, Enum):
        return repr(x)
    if isinstance(x, Tensor):
        return _Same(x) if tensors else Tensor
    if isinstance(x, (list, tuple, dict)) and len(x) <= _FEW and depth:
        items = x.items() if isinstance(x, dict) else x
        return type(x), *(told(y, tensors, depth - 1) for y in items)
    if isinstance(x, FunctionType) and depth:
        held = (told(_content(cell), tensors, depth - 1) for cell in x.__closure__ or ())
        return _Same(x.__code__), *held
    return (_Same(x), len(x)) if isinstance(x, (list, tuple, dict, set, deque)) else _Same(x)


def unknown_kind(argument: Any) -> type | None:
    """Return the type of an object in `argument` that may change while its key by `told` does not.

    None if there is no such object.
    """
    if isinstance(argument, (tuple, list)):
        return next(filter(None, map(unknown_kind, argument)), None)
    if isinstance(argument, dict):
        return unknown_kind([*argument, *argument.values()])
    known = (Tensor, Enum, type, FunctionType, nn.Module, Optimizer)
    return None if isinstance(argument, known) or type(argument) in _TOLD else type(argument)


def _content(cell: CellType, name: str = "", default: Any = None) -> Any:
    """Return the value in the cell of a closure; `default` while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


@lru_cache(1024)
def _names_in(code: CodeType) -> tuple[frozenset[str], ...]:
    """Return the names of globals, of attributes and of methods that code mentions."""
    names: tuple[set[str], ...] = set(), set(), set()
    for x in dis.get_instructions(code):
        is_method = _METHODS_BY_FLAG and x.opname == "LOAD_ATTR" and (x.arg or 0) & 1
        if x.opname in _GLOBALS:
            names[0].add(x.argval)
        elif x.opname == "LOAD_METHOD" or is_method:
            names[2].add(x.argval)
        elif x.opname in _ATTRIBUTES:
            names[1].add(x.argval)
        elif isinstance(x.argval, CodeType):
            for some, more in zip(names, _names_in(x.argval), strict=True):
                some |= more
    return tuple(map(frozenset, names))


class Variables:
    """The variables that a function, or a function of the program that it calls, mentions.

    Parameters
    ----------
    function: the step, or a module.
    modules: the modules that the function has called; more may be added later. Their settings are
        compared by `key_of_modules`.

    Attributes
    ----------
    tensors: the tensors among the variables' values when `now` was called last.
    """

    def __init__(self, function: Callable[..., Any], modules: Mapping[nn.Module, None]) -> None:
        self._function, self._modules = function, modules
        self._number = 0
        """The number of modules when they were looked at."""
        self._places: dict[Any, tuple[Callable[..., Any], str, Any]] = {}
        """By which calls the variables are found."""
        self._functions: set[Any] = set()
        """The code of functions that were looked into, each with the id of its owner."""
        self._attributes: set[str] = set()
        self._methods: set[str] = set()
        """The attributes and the methods that they mention."""
        self._roots: list[Any] = []
        self._objects: set[int] = set()
        """The ids of objects that were looked at."""
        self._last: Any = None
        self.tensors: list[Tensor] = []

    def now(self) -> Any:
        """Return a key of the variables' present values, to compare and hash."""
        found = self._told()
        if found != self._last or len(self._modules) != self._number:
            self._find()
            self._last = found = self._told()
        return found

    def _find(self) -> None:
        """Find the variables of the function, and of the program's functions that it calls."""
        self._places, self._functions, self._roots = {}, set(), [self._function]
        self._attributes, self._methods = set(), set()
        self._number, number = len(self._modules), -1
        for m in self._modules:
            self._look_into(type(m).forward, m)
        while number < len(self._functions):
            number = len(self._functions)
            self._objects = set()
            for x in list(self._roots):
                self._look_at(x, _DEEP)

    def values(self) -> list[tuple[str, Callable[[], Any], Any]]:
        """Return for each variable its name, a function that returns its value, and its key."""
        places = self._places.values()
        calls = [(name, partial(get, name, default)) for get, name, default in places]
        return [(name, get, told(get(), tensors=True)) for name, get in calls]

    def _told(self) -> Any:
        values = [get(name, default) for get, name, default in self._places.values()]
        self.tensors = [x for x in values if isinstance(x, Tensor)]
        return tuple(map(told, values))

    def _take(self, of: Any, get: Callable[..., Any], name: str, default: Any = None) -> Any:
        """Add the variable `name` of the object `of`, which `get` reads, and return its value."""
        x = get(name, default)
        if not isinstance(x, (ModuleType, BuiltinFunctionType)):
            self._places[id(of), name] = get, name, default
        return x

    def _look_at(self, x: Any, depth: int) -> None:
        """Add the variables among the attributes of `x`; if it is a function, those it mentions.

        `depth` is the number of further objects within objects that are looked at.
        """
        if isinstance(x, partial):
            for y in (x.func, *x.args, *x.keywords.values()):
                self._look_at(y, depth)
        elif isinstance(x, MethodType):
            self._look_into(x.__func__, x.__self__)
        elif isinstance(x, FunctionType) or hasattr(x, "__wrapped__"):
            self._look_into(x, None)
        elif depth and not isinstance(x, (Tensor, Optimizer)) and type(x) not in _TOLD:
            if id(x) not in self._objects:
                self._objects.add(id(x))
                self._look_at_attributes(x, depth)

    def _look_at_attributes(self, x: Any, depth: int) -> None:
        if isinstance(x, ModuleType) and not is_of_program(getattr(x, "__file__", None) or ""):
            return
        own = getattr(x, "__dict__", {})
        parts = parts_and_parameters(x)[1] if isinstance(x, nn.Module) else {}
        is_called = isinstance(x, nn.Module) and x in self._modules
        for name in sorted(self._attributes | self._methods | {"__call__"}):
            if name in own and type(own[name]) in _TOLD:
                # Such as a counter `step`, where an optimizer's method is mentioned.
                if is_called or name not in self._attributes:
                    continue
            shared = inspect.getattr_static(type(x), name, None)
            if isinstance(shared, property):
                shared = shared.fget
            if name in own or not (shared is None or hasattr(shared, "__get__")):
                self._look_at(self._take(x, own.get, name, shared), depth - 1)
            elif name in parts:
                self._look_at(parts[name], depth - 1)
            elif isinstance(shared, FunctionType):
                self._look_into(shared, x)

    def _look_into(self, function: Any, owner: Any) -> None:
        """Add the variables that the code of a function, or of a method of `owner`, mentions."""
        function = inspect.unwrap(function)
        if isinstance(function, MethodType):
            function, owner = function.__func__, function.__self__
        code = getattr(function, "__code__", None)
        known = (code, id(owner)) in self._functions
        if code is None or known or not is_of_program(code.co_filename):
            return
        self._functions.add((code, id(owner)))
        variables, attributes, methods = _names_in(code)
        self._attributes |= attributes
        self._methods |= methods
        everything = function.__globals__
        self._roots.append(owner)
        for name in sorted(variables):
            if name in everything or not hasattr(builtins, name):
                self._roots.append(self._take(everything, everything.get, name))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._roots.append(self._take(cell, partial(_content, cell), name))


def changed_in(before: Sequence[tuple[str, Callable[[], Any], Any]]) -> str:
    """Return the name of a variable that has changed since `values` returned `before`, or ""."""
    return next((name for name, get, x in before if told(get(), tensors=True) != x), "")
