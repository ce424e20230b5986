"""Measure which torch functions are exact, redistribute or are unsupported, and write the page.

`python -m tests.support.supported` on two ranks writes docs/reference/coverage.md; see Makefile.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import get_overridable_functions

import distconv as dc
from distconv.geometry.layout import dimension_names
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import RULES
from distconv.tensor.dist_tensor import DistTensor
from tests.support.samples import HOMES, Sample, bare, function_of, is_random, names, samples_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coverage.md"
RANKS = 2
"""The number of ranks; any number but 1 redistributes the same."""

INTRODUCTION = """\
# Supported torch functions

This page lists every function that torch lets a tensor subclass override, and every other function
with a rule, with its support on a DistTensor. `make coverage` measures it: it calls each function
with sample arguments (`tests/support/samples.py`) on tensors that are partitioned along one
dimension after the other. `tests/ops/test_coverage.py` checks that the page is current, and that
outputs and gradients of every sample equal those of serial torch on random grids and layouts.

- **exact**: the results equal those of serial torch for any partitioned dimension, and the tensor
  keeps its layout. Only halos, sums, and elements that change their owner are sent. Operands with
  different layouts are redistributed to one layout first.
- **redistributes (...)**: exact as well, but if one of the dimensions in brackets is partitioned,
  it is gathered on every rank first, and `dc.redistributions()` counts it. Dimensions are named by
  position, as in `Layout`; `dim` is the dimension that an argument names.
- **unsupported**: raises `UnsupportedOperation` on every rank before any message is sent.
  *Unsupported where partitioned*: works on tensors that are whole on every rank.
- **metadata**: answered from the global shape and type, without any computation.

*Random*: the numbers follow `torch.manual_seed` on rank 0 and are the same on any grid, but not
those of serial torch.

A sample represents a typical call. Other arguments of a supported function are also exact or
unsupported, but may redistribute where the sample does not. A reshape that merges a partitioned
dimension into another sends nothing; the blocks of its result are redistributed when another
function needs them.
"""


def listed() -> dict[str, list[str]]:
    """Return the functions to list under each home: they can be overridden, or have a rule."""
    functions = {f for found in get_overridable_functions().values() for f in found} | {*RULES}
    found = [name for function in functions for name in names().get(function, [])]
    by_home: dict[str, list[str]] = {home: [] for home in HOMES}
    for name in sorted(found):
        by_home[name.rpartition(".")[0]].append(name)
    return by_home


def status(name: str, grid: dc.ProcessGrid) -> str:
    """Return the status of a function on distributed tensors; all ranks call it."""
    samples = samples_of(name)
    if samples:
        return _measured(name, samples, grid)
    own = DistTensor.__mro__[: DistTensor.__mro__.index(Tensor)]
    if name.startswith("torch.Tensor.") and any(bare(name) in vars(each) for each in own):
        return "metadata"
    x = dc.distribute_tensor(torch.ones(3, 5), grid)
    try:
        DistTensor.__torch_function__(function_of(name), (DistTensor,), (x,))
    except dc.UnsupportedOperation:
        return "unsupported"
    return "metadata"


def _measured(name: str, samples: tuple[Sample, ...], grid: dc.ProcessGrid) -> str:
    outcomes: dict[str, str] = {}
    for sample in samples:
        shape = sample.operands(plain=False)[0].shape
        for d, dimension in enumerate(dimension_names(len(shape))):
            outcome = _outcome(name, sample, grid, shape[d])
            key = "dim" if d == sample.dim else dimension
            outcomes[key] = max(outcome, outcomes.get(key, ""), key=_SEVERITY.index)
    if not outcomes or set(outcomes.values()) == {"unsupported"}:
        whole = {_outcome(name, sample, grid, None) for sample in samples}
        if whole != {"exact"}:
            return "unsupported"
        return "exact" if not outcomes else "unsupported where partitioned"
    words = []
    for word in ("redistributes", "unsupported"):
        where = [key for key in sorted(outcomes, key=_ORDER.index) if outcomes[key] == word]
        if where:
            words.append(f"{word} ({', '.join(where)})")
    return ", ".join(words or ["exact"]) + (", random" if is_random(name) else "")


_SEVERITY = ("", "exact", "redistributes", "unsupported")
_ORDER = ("dim", *dimension_names(5))


def _outcome(name: str, sample: Sample, grid: dc.ProcessGrid, size: int | None) -> str:
    """Return the outcome of a sample call whose tensors are cut where they have `size` elements."""
    rng = random.Random(0)
    tensors: list[Tensor] = []
    for operand in sample.operands(plain=False):
        x = operand.values(rng, operand.shape)
        cut = x.shape.index(size) if size in x.shape else None
        cuts = tuple(("height",) * (d == cut) for d in range(x.dim()))
        box = dc.local_box(x.shape, grid, dc.Layout.of(cuts))
        # distribute_tensor would compare the ranks' shapes, thousands of times.
        tensors.append(DistTensor(x[box.slices].clone(), x.shape, cuts, grid))
    tensors += [o.values(rng, o.shape) for o in sample.operands(plain=True)]
    for x in tensors:
        x.requires_grad_(x.is_floating_point())
    dc.redistributions(reset=True)
    try:
        for x in tensors_in(sample.call(name, *tensors)):
            if isinstance(x, DistTensor) and x.pending is not None:
                x.materialize()  # a Fourier transform computes when it is read
    except dc.UnsupportedOperation:
        return "unsupported"
    return "redistributes" if dc.redistributions(reset=True) else "exact"


def release(version: str) -> str:
    """Return the major and minor number of a version of torch."""
    return ".".join(version.split(".")[:2])


def page(grid: dc.ProcessGrid) -> str:
    """Return the text of the page; all ranks call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some functions are deprecated
        found = {home: {n: status(n, grid) for n in known} for home, known in listed().items()}
    words = ("exact", "redistributes", "unsupported", "metadata")
    lines = [INTRODUCTION, f"Measured with torch {release(torch.__version__)}.", ""]
    lines += [f"| | {' | '.join(words)} |", f"|---|{'---:|' * len(words)}"]
    for home, statuses in found.items():
        count = Counter(text.partition(" ")[0].strip(",") for text in statuses.values())
        lines.append(f"| {home} | {' | '.join(str(count[word]) for word in words)} |")
    for home, statuses in found.items():
        lines += ["", f"## {home}", "", "| function | status |", "|---|---|"]
        for name, text in statuses.items():
            lines.append(f"| `{bare(name)}` | {text} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page; all ranks measure, rank 0 writes."""
    grid = dc.ProcessGrid(height=RANKS)
    text = page(grid)
    if grid.rank == 0:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
