"""Imports point down, index arithmetic does without torch and MPI, private names stay at home."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.floors import (
    OF_MERGED,
    SERIAL,
    circles,
    files_that_mention_merged,
    foreign_private_names,
    imports_of_libraries,
    private_names_of_torch,
    read_sources,
    shared_class_names,
    unsupported_support,
    upward_imports,
)

ROOT = Path(__file__).parents[1]

WITHOUT_LIBRARIES = """
import sys, types
for name in {serial!r}:
    sys.modules[name] = None
package = types.ModuleType("distconv")
package.__path__ = [{path!r}]
sys.modules["distconv"] = package
import importlib
for name in {modules!r}:
    importlib.import_module(name)
"""


def parsed(**modules: str) -> dict[str, ast.Module]:
    """Return made-up modules; two underscores stand for a dot."""
    return {f"distconv.{n.replace('__', '.')}": ast.parse(text) for n, text in modules.items()}


def test_imports_point_down() -> None:
    assert upward_imports(read_sources(ROOT)) == []


def test_support_of_operators_lies_beneath_all_families() -> None:
    assert unsupported_support(read_sources(ROOT)) == []


def test_no_modules_import_each_other() -> None:
    assert circles(read_sources(ROOT)) == []


def test_no_private_name_is_used_elsewhere() -> None:
    assert foreign_private_names(read_sources(ROOT)) == []


def test_no_two_classes_share_a_name() -> None:
    assert shared_class_names(read_sources(ROOT)) == []


def test_few_files_know_of_merged_tensors() -> None:
    assert files_that_mention_merged(ROOT / "distconv") == OF_MERGED


def test_a_word_on_merged_tensors_is_found(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/loss.py").write_text("x = y.unmerged\n")
    (tmp_path / "ops/sums.py").write_text("@works_along(reduces=True)\n")
    assert files_that_mention_merged(tmp_path) == {"ops/loss.py"}


def test_private_parts_of_torch_are_named_in_one_module() -> None:
    assert private_names_of_torch(read_sources(ROOT)) == []


def test_geometry_names_neither_torch_nor_mpi() -> None:
    assert imports_of_libraries(read_sources(ROOT)) == []


def test_geometry_is_imported_where_torch_and_mpi_are_missing() -> None:
    modules = sorted(name for name in read_sources(ROOT) if name.startswith("distconv.geometry"))
    assert modules
    path = str(ROOT / "distconv")
    program = WITHOUT_LIBRARIES.format(serial=SERIAL, path=path, modules=modules)
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert end.returncode == 0, end.stderr


@pytest.mark.parametrize(
    ("check", "modules"),
    [
        (upward_imports, {"grid__process_grid": "from distconv.tensor.base import Base"}),
        (upward_imports, {"ops__loss": "def rule():\n    import distconv.model.buckets"}),
        (upward_imports, {"ops__loss": "from distconv import model", "model": ""}),
        (upward_imports, {"ops__loss": "from ..model import buckets", "model__buckets": ""}),
        (upward_imports, {"model__buckets": "import distconv as dc"}),
        (upward_imports, {"tools__explain": "from distconv import ProcessGrid"}),
        (unsupported_support, {"ops__support__types": "from distconv.ops.pool import average"}),
        (imports_of_libraries, {"geometry__plan": "def plan():\n    from torch import Tensor"}),
        (imports_of_libraries, {"geometry__halo__slabs": "import mpi4py.MPI"}),
        (
            circles,
            {
                "ops__one": "from distconv.ops.two import f",
                "ops__two": "from distconv.ops.three import f",
                "ops__three": "def f():\n    from distconv.ops import one",
            },
        ),
        (foreign_private_names, {"ops__loss": "from distconv.ops.norm import _sums"}),
        (
            foreign_private_names,
            {"ops__loss": "from distconv.ops import norm\nnorm._sums()", "ops__norm": ""},
        ),
        (
            foreign_private_names,
            {
                "grid__ranks": "class Grid:\n    def __init__(self):\n        self._ranks = 1",
                "ops__loss": "def loss(grid):\n    return grid._ranks",
            },
        ),
        (shared_class_names, {"grid__a": "class A: ...", "ops__b": "A: TypeAlias = int"}),
        (private_names_of_torch, {"ops__loss": "from torch._C import _nn"}),
        (private_names_of_torch, {"ops__loss": "import torch.utils._pytree as p"}),
        (private_names_of_torch, {"ops__loss": "import torch\ntorch._C._nn.pad()"}),
        (private_names_of_torch, {"ops__loss": "from torch import nn\nnn.init._fan(1)"}),
        (private_names_of_torch, {"ops__loss": "def rule(x):\n    return x._base"}),
        (private_names_of_torch, {"ops__loss": "def rule(x):\n    return hasattr(x, '_base')"}),
    ],
)
def test_what_is_forbidden_is_found(
    check: Callable[..., list[Any]], modules: dict[str, str]
) -> None:
    assert check(parsed(**modules))


@pytest.mark.parametrize(
    ("check", "modules"),
    [
        (upward_imports, {"ops__loss": "from distconv.tensor.base import Base\nimport torch"}),
        (upward_imports, {"__main__": "from distconv.__main__ import main"}),
        (imports_of_libraries, {"grid__devices": "import torch"}),
        (circles, {"ops__one": "from distconv.ops.two import f", "ops__two": ""}),
        (shared_class_names, {"grid__a": "class A: ...", "ops__b": "A = int\nclass B(A): ..."}),
        (private_names_of_torch, {"torch_private": "import torch\ntorch._C._nn.pad()"}),
        (private_names_of_torch, {"grid__a": "class A:\n    _b: int\ndef f(a):\n    return a._b"}),
        (
            foreign_private_names,
            {"grid__a": "class A:\n    _b: int\ndef f(a, x):\n    return a._b, x._version"},
        ),
    ],
)
def test_what_is_allowed_is_not_found(
    check: Callable[..., list[Any]], modules: dict[str, str]
) -> None:
    assert check(parsed(**modules)) == []
