"""Imports between modules, read from their sources, and those that the floors forbid."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

FLOORS = (
    "geometry",
    "torch_private",
    "device",
    "transport",
    "grid",
    "comm",
    "tensor",
    "ops",
    "model",
    "compiling",
    "layers",
    "data",
    "training",
    "horovod",
    "lbann",
    "lightning",
    "planning",
    "tools",
)
"""Folders, and a module, from the bottom up; each imports from itself and from those before it."""

SERIAL = ("torch", "mpi4py")
"""Libraries that index arithmetic does without."""

OF_MERGED = frozenset(
    {
        "compiling/front.py",
        "ops/attention/flex.py",
        "ops/attention/scaled_dot_product.py",
        "ops/math/product.py",
        "ops/recurrent.py",
        "ops/shape/reshape.py",
        "ops/shape/scatter.py",
        "ops/support/dimensions.py",
        "ops/support/expanded.py",
        "ops/support/merged.py",
        "ops/warp/grid_sample.py",
        "tensor/base.py",
        "tensor/dist_tensor.py",
    }
)
"""The files that may mention merged tensors. Other rules say by a decorator of
`ops/support/dimensions.py` how they treat dimensions."""

Sources = Mapping[str, ast.Module]
"""Modules of the package by dotted names; a folder's `__init__` has the name of the folder."""


@functools.cache
def read_sources(root: Path) -> Sources:
    """Parse every module of `distconv/`, and of `layers/`, which is installed as a part of it."""
    sources: dict[str, ast.Module] = {}
    for folder, prefix in (("distconv", ()), ("layers", ("distconv",))):
        for path in (root / folder).rglob("*.py"):
            parts = [*prefix, *path.relative_to(root).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            sources[".".join(parts)] = ast.parse(path.read_text())
    return sources


def files_that_mention_merged(root: Path) -> set[str]:
    """Return the files of `distconv/` with a word on merged tensors, by their paths in it."""
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search("merged|unmerge|merge_as|merging", path.read_text())
    }


def imports_of(name: str, sources: Sources) -> Iterator[tuple[str, int]]:
    """Yield each module that a module imports, also within functions, with the line."""
    for node in ast.walk(sources[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: -node.level or None]
                base = ".".join([*package, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in sources else base), node.lineno


def folder_of(module: str) -> str:
    """Return the folder of `distconv.folder.module`, and "" for what stands above all folders."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""


def upward_imports(sources: Sources) -> list[str]:
    """Return the imports of a module on a higher floor than the importing one."""
    height = {folder: i for i, folder in enumerate(FLOORS)} | {"": len(FLOORS)}
    return [
        f"{name}:{line} imports {target}, which is above it"
        for name in sources
        for target, line in imports_of(name, sources)
        if target.split(".")[0] == "distconv"
        and height[folder_of(target)] > height[folder_of(name)]
    ]


def unsupported_support(sources: Sources) -> list[str]:
    """Return the imports of a family of operators by what lies beneath all families."""
    beneath = "distconv.ops.support"
    return [
        f"{name}:{line} imports {target}, which is above it"
        for name in sources
        if name.startswith(f"{beneath}.")
        for target, line in imports_of(name, sources)
        if target.startswith("distconv.ops") and not target.startswith(beneath)
    ]


def imports_of_libraries(sources: Sources) -> list[str]:
    """Return the imports of torch and MPI by index arithmetic."""
    return [
        f"{name}:{line} imports {target}"
        for name in sources
        if folder_of(name) == "geometry"
        for target, line in imports_of(name, sources)
        if target.split(".")[0] in SERIAL
    ]


def circles(sources: Sources) -> list[list[str]]:
    """Return groups of modules that import each other, directly or by way of others."""
    graph = {
        name: {t for t, _ in imports_of(name, sources) if t in sources and t != name}
        for name in sources
    }
    reached: dict[str, set[str]] = {}
    for name in graph:
        found: set[str] = set()
        waiting = list(graph[name])
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting.extend(graph[module])
        reached[name] = found
    groups = {
        tuple(sorted(m for m in reached[name] if name in reached[m]))
        for name in graph
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def foreign_private_names(sources: Sources) -> list[str]:
    """Return the uses of private names of other modules, and of private fields of other folders."""
    fields: dict[str, set[str]] = {}
    for name, tree in sources.items():
        for field in _private_fields(tree):
            fields.setdefault(field, set()).add(folder_of(name))
    found = []
    for name, tree in sources.items():
        modules = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            ours = (node.module or "").split(".")[0] == "distconv"
            for alias in node.names:
                if ours and is_private(alias.name):
                    found.append(f"{name}:{node.lineno} imports {alias.name} of {node.module}")
                if f"{node.module}.{alias.name}" in sources:
                    modules.add(alias.asname or alias.name)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            if owner in ("self", "cls"):
                continue
            homes = fields.get(node.attr, set())
            foreign = homes and folder_of(name) not in homes and folder_of(name) != "torch_private"
            if owner in modules or foreign:
                found.append(f"{name}:{node.lineno} uses {ast.unparse(node)}")
    return found


def shared_class_names(sources: Sources) -> list[str]:
    """Return the names that several classes or type aliases have, each with its modules."""
    homes: dict[str, list[str]] = {}
    for module, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                homes.setdefault(ast.unparse(node.target), []).append(module)
    return [f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1]


OF_PYTHON = {
    *("_asdict", "_fields", "_make", "_replace"),
    *("_current_frames", "_exit", "_getframe", "_run_exitfuncs"),
}
"""Private names of Python's own library that are documented, or have no public twin."""


def private_names_of_torch(sources: Sources) -> list[str]:
    """Return the uses of private parts of torch outside of the module that holds them all.

    These are imports, whatever hangs on an imported name, and fields of any object that no class,
    function or module of ours defines. Asking for a field by its name as a string is found too.
    """
    ours = set(OF_PYTHON)
    for tree in sources.values():
        ours.update(_private_fields(tree))
        ours.update(x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.ClassDef))
    found = []
    for module, tree in sources.items():
        if module == "distconv.torch_private":
            continue
        of_torch = {"torch"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = (node.module or "").split(".") + [alias.name for alias in node.names]
                of_torch |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [part for a in node.names for part in a.name.split(".")]
                names = names if names[0] == "torch" else []
                of_torch |= {a.asname for a in node.names if a.asname and names}
            else:
                continue
            found += [f"{module}:{node.lineno} imports {n}" for n in names if is_private(n)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                owner = root.id if isinstance(root, ast.Name) else ""
                own = node.attr in ours or owner in ("self", "cls")
                if owner in of_torch or not own:
                    found.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in _BY_NAME:
                for name in node.args[1:2]:
                    value = name.value if isinstance(name, ast.Constant) else ""
                    if is_private(str(value)) and value not in ours:
                        found.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
    return found


_BY_NAME = ("getattr", "hasattr", "setattr")


def _private_fields(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes and methods of the classes of a module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = inner.name
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                name = inner.target.id
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                name = inner.attr
            else:
                continue
            if is_private(name):
                yield name
