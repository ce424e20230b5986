"""The values of a state as plain ones, which `torch.load` accepts with weights_only."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distconv.data.errors import check_alike
from distconv.grid.interface import Grid
from distconv.model.state_dicts import map_state, plain, whole
from distconv.tensor.dist_tensor import DistTensor


def storable(state: Any) -> Any:
    """Return a state of plain values and containers. No communication.

    Dataclasses become dictionaries, deques lists, numbers and arrays of numpy Python's numbers and
    tensors, and paths texts; subclasses of dict, list, tuple and Tensor become these. Other values
    stay as they are, and DistTensors too.
    """
    return map_state(state, _storable)


def _storable(x: Any) -> Any:
    if is_dataclass(x) and not isinstance(x, type):
        return storable({field.name: getattr(x, field.name) for field in fields(x)})
    if isinstance(x, deque):
        return storable(list(x))
    if isinstance(x, PurePath):
        return str(x)
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        return torch.tensor(x.astype(x.dtype.newbyteorder("="), copy=False))
    return x if isinstance(x, DistTensor) else plain(x)


def gathered(state: Any, grid: Grid) -> Any:
    """Return a state with each DistTensor replaced by the whole tensor. Collective.

    Raises DataError on every rank, if the ranks hold different DistTensors in it.
    """
    found: list[str] = []

    def note(x: Any) -> Any:
        if isinstance(x, DistTensor):
            found.append(f"{tuple(x.shape)} of {x.dtype} in {x.layout} on {x.grid}")
        return x

    map_state(state, note)
    check_alike(grid, {"the DistTensors of the state": str(found)}, "Pass the same on every rank.")
    return map_state(state, whole)


def check_loadable(state: dict[Any, Any]) -> None:
    """Raise `ValueError` for a state that `torch.load` would refuse with weights_only.

    The message names the first entry that cannot be loaded.
    """
    for name, part in state.items():
        reason = _unloadable(part)
        if reason:
            raise ValueError(
                f"the state holds objects that cannot be loaded safely: {_first(part, str(name))}; "
                "save plain numbers, texts, paths, tensors, and lists, dictionaries and "
                f"dataclasses of these only ({reason[:300]})"
            )


def _unloadable(state: Any) -> str:
    """Return the error of `torch.load` for a state, in one line; "" if it would be loaded."""

    def small(x: Any) -> Any:
        usual = type(x) is Tensor and x.layout == torch.strided and not x.is_quantized
        return torch.empty(0, dtype=x.dtype) if usual else x

    file = io.BytesIO()
    try:
        torch.save(map_state(state, small), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:  # torch raises any error of its pickler
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _first(state: Any, name: str) -> str:
    """Return a text with the name and type of the first value that makes `state` unloadable."""
    items: Any = ()
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    for key, value in items:
        if _unloadable(value):
            return _first(value, f"{name}[{key!r}]")
    return f"{name} is of type {type(state).__name__}"
