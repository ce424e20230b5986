"""The walks of "How it is built" lead through code that is there, and that runs on the way."""

from __future__ import annotations

import re
import sys
import threading
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "building.md"


def walks() -> dict[str, list[tuple[str, str]]]:
    """Return the steps of each walk by its heading: file and function."""
    _, *parts = PAGE.read_text().partition("\n## Folders\n")[0].split("\n### ")
    # A line may end between file and function.
    steps = re.compile(r"`([\w/]+)\.py`,\s+`([\w.]+)`")
    return {part.partition("\n")[0]: steps.findall(part) for part in parts}


def named(path: str, name: str) -> Any:
    """Return the function or class of a step."""
    return reduce(getattr, name.split("."), import_module("distconv." + path.replace("/", ".")))


def test_every_function_of_the_walks_is_in_its_file() -> None:
    steps = [step for walk in walks().values() for step in walk]
    assert len(steps) > 30
    for step in steps:
        named(*step)


def test_every_folder_of_the_table_is_there() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"\w+", row)}
    package = Path(dc.__file__).parent
    assert listed == {path.parent.name for path in package.glob("*/__init__.py")}


def convolution(grid: dc.ProcessGrid) -> None:
    w = dc.distribute_tensor(torch.ones(4, 3, 3, 3), grid, dc.Layout()).requires_grad_()
    for method in ("assembled", "overlapped"):
        for form in (torch.contiguous_format, torch.channels_last):
            x = torch.ones(2, 3, 16, 16).to(memory_format=form)
            x = dc.distribute_tensor(x, grid).requires_grad_()
            with dc.method(method):
                F.conv2d(x, w, padding=1).sum().backward()


def pooling(grid: dc.ProcessGrid) -> None:
    x = dc.distribute_tensor(torch.ones(1, 3, 16, 16), grid).requires_grad_()
    F.max_pool2d(x, 3, 1, 1).sum().backward()


def gradient(grid: dc.ProcessGrid) -> None:
    model = dc.parallelize(nn.Conv2d(3, 4, 3, padding=1), grid)
    model(dc.distribute_tensor(torch.ones(1, 3, 16, 16), grid)).sum().backward()


def mini_batch(grid: dc.ProcessGrid) -> None:
    for cache in (None, "memory"):
        data = dc.data.Dataset(np.zeros((4, 1, 16, 16), "float32"), grid, cache=cache)
        assert len(list(dc.data.Loader(data, 2))) == 2


def compiled_call(grid: dc.ProcessGrid) -> None:
    model = dc.compile(dc.parallelize(nn.Conv2d(3, 4, 3, padding=1), grid))
    for _ in range(4):
        model(dc.distribute_tensor(torch.ones(1, 3, 16, 16), grid)).sum().backward()


PROGRAMS = dict(
    zip(walks(), (convolution, pooling, gradient, mini_batch, compiled_call), strict=True)
)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("walk", PROGRAMS)
def test_every_function_of_a_walk_is_called_on_the_way(walk: str) -> None:
    grid, called = dc.ProcessGrid(height=2), set[CodeType]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        PROGRAMS[walk](grid)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    missing = [
        f"{path}, {name}" for path, name in walks()[walk] if not ran(named(path, name), called)
    ]
    assert missing == []


def ran(step: Any, called: set[CodeType]) -> bool:
    """Return whether a function, one defined in it, or a method of a class was called."""
    if isinstance(step, type):
        return any(ran(method, called) for method in vars(step).values() if callable(method))
    code = getattr(getattr(step, "__wrapped__", step), "__code__", None)
    # A table, such as that of the rules, has no code.
    return code is None or not called.isdisjoint((code, *code.co_consts))
