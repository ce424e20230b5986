"""Making the module that a command line names: `package.module:factory`, `./file.py:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distconv.grid.ranks import world
from distconv.tools.arguments import BadArguments


def module_from(factory: str, seed: int) -> nn.Module:
    """Call the factory of this name, with torch's seed set, and return the module that it makes."""
    path, colon, name = factory.rpartition(":")
    if not colon or not name:
        raise BadArguments(
            f"{factory!r} names no factory; write package.module:factory or ./file.py:factory"
        )
    make: Any = _from_file(Path(path)) if path.endswith(".py") else _imported(path)
    for part in name.split("."):
        make = getattr(make, part, None)
    if not callable(make):
        raise BadArguments(
            f"{path} has no function or class {name!r}; name one that makes the module"
        )
    torch.manual_seed(seed)
    try:
        module = make()
    except TypeError as error:
        raise BadArguments(
            f"{factory} raised TypeError: {error}; expected a function that takes no arguments"
        ) from error
    if not isinstance(module, nn.Module):
        raise BadArguments(f"{factory} makes a {type(module).__name__}, not a torch.nn.Module")
    return module


def _imported(path: str) -> Any:
    """Import a Python module by name; raise `BadArguments` if there is none."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise BadArguments(
            f"there is no module {error.name!r}; start from the folder it is in, or install it, "
            "or write its file, ./file.py:factory"
        ) from None


def _from_file(path: Path) -> Any:
    """Import a file as a Python module, with its folder on `sys.path`, as for a script."""
    if not path.is_file():
        raise BadArguments(f"there is no file {str(path)!r}; give its path from the current folder")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_everywhere(factory: str, seed: int) -> nn.Module:
    """Return the result of `module_from` on every rank; all raise if one rank cannot make it."""
    module, problem = None, None
    try:
        module = module_from(factory, seed)
    except BadArguments as error:
        problem = error
    for found in world().allgather(problem):
        if found is not None:
            raise found
    assert module is not None
    return module
