"""Compare cases with their serial runs on the ranks of one job, and write each result as it comes.

`mpiexec -n RANKS python -m tests.networks.worker RESULTS CASE...`; `tests.networks` launches it.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.tensor.base import shards_of, tensors_in
from tests.networks.cases import Case
from tests.networks.losses import LOSSES
from tests.networks.networks import NETWORKS

LARGEST = 1e-6
"""The difference beyond which nothing is taken for rounding, however much a case amplifies it; what
computes in shorter types has the tolerance of `verify`."""

MIXING = re.compile(r"scaled_dot_product|matmul|einsum|linear|lstm|gru|rnn|.*fft|sort|cumsum")
"""Operators that redistribute only where each result takes all positions: attention's keys and
values, fully connected layers and recurrences along positions, transforms, orders."""

_AXES = {
    1: (("sample",), ("sample",)),
    2: (("sample",), ("sample",)),
    3: (("width",), ("width",)),
    4: (("height",), ("height", "width")),
    5: (("depth",), ("depth", "height")),
}
"""The grid axes on two ranks and on four, by the dimensions of the first input."""


@lru_cache
def grid_for(ndim: int) -> dc.ProcessGrid:
    """Return the grid that cuts the space of an input of `ndim` dimensions; collective."""
    size = MPI.COMM_WORLD.size
    axes = _AXES[ndim][size > 2]
    extent = size if len(axes) == 1 else 2
    return dc.ProcessGrid(**dict.fromkeys(axes, extent))


def layouts(inputs: list[Tensor], grid: dc.ProcessGrid) -> list[dc.Layout | None]:
    """Return the layout of each input: labels without a channel lie like the first; collective."""
    first = inputs[0].shape
    bare = (first[0], *first[2:])
    cut = dc.distribute_tensor(inputs[0], grid)
    labels = dc.Layout.like(cut, without="channel") if len(first) > 2 else None
    whole = dc.Layout()
    return [
        None if x.dim() == len(first) else labels if tuple(x.shape) == bare else whole
        for x in inputs
    ]


def in_double(module: nn.Module) -> nn.Module:
    """Return the module with parameters and buffers in double precision."""
    module.double()
    for x in (*module.parameters(), *module.buffers()):
        if x.is_complex():
            x.data = x.data.to(torch.complex128)
    return module


def outcome(case: Case) -> dict[str, Any]:
    """Return the result of a case (right, unsupported, wrong, error) and its reason; collective."""
    torch.manual_seed(0)
    inputs = case.tensors()
    grid = grid_for(inputs[0].dim())
    arranged = layouts(inputs, grid)
    try:
        module = in_double(case.build())
        verification = dc.verify(
            module, inputs, grid, layout=arranged, tolerance=case.tolerance, show=False
        )
    except Exception as error:
        return {"result": "error", "why": f"{type(error).__name__}: {error}"}
    first = verification.first_deviation
    if first is not None and first.kind == "refused":
        return {"result": "unsupported", "why": first.note, "where": first.layer}
    if not any(row.kind == "output" for row in verification.rows):
        return {"result": "error", "why": "returns no tensor to compare"}
    largest = max(verification.rows, key=lambda row: row.difference)
    if first is not None or largest.difference > max(LARGEST, verification.tolerance):
        row = first or largest
        why = f"{row.layer} ({row.kind}) by {row.difference:.1e}, rounding {row.rounding:.1e}"
        return {"result": "wrong", "why": " ".join((why, row.note, *verification.notes))}
    try:
        differs, replays = difference_of_replays(module, inputs, arranged, grid)
    except Exception as error:
        return {"result": "error", "why": f"compiled: {type(error).__name__}: {error}"}
    if differs:
        return {"result": "wrong", "why": f"a replay differs in {differs}"}
    return {"result": "right", "replays": replays, **moved(module, inputs, arranged, grid)}


CALLS = 5
"""The number of calls of a compiled network, of which the last three are replays."""


def difference_of_replays(
    module: nn.Module, inputs: list[Tensor], arranged: list[dc.Layout | None], grid: dc.ProcessGrid
) -> tuple[str, int]:
    """Return the name of a tensor of which a compiled network does not make the same bits as the
    network itself, in training mode, "" if there is none, and the number of replays. Collective.
    """
    called: Any = None

    def run(compiled: bool) -> dict[str, Tensor]:
        nonlocal called
        model = dc.parallelize(copy.deepcopy(module), grid)
        called = dc.compile(model) if compiled else model
        cut = [dc.distribute_tensor(x, grid, how) for x, how in zip(inputs, arranged, strict=True)]
        torch.manual_seed(0)
        for _ in range(CALLS):
            results = tensors_in(called(*cut))
            roots = [x.abs().mean() for x in results if x.requires_grad]
            if roots:
                sum(roots[1:], roots[0]).backward()
        found = {f"result {i}": x for i, x in enumerate(results)}
        found |= {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
        found |= {
            f"gradient of {name}": p.grad
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        return {name: shards_of(x)[0].detach() for name, x in found.items()}

    expected, actual = run(False), run(True)
    differs = next((name for name, x in expected.items() if not _equal(x, actual[name])), "")
    return differs, called.replays


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def moved(
    module: nn.Module, inputs: list[Tensor], arranged: list[dc.Layout | None], grid: dc.ProcessGrid
) -> dict[str, Any]:
    """Return the bytes that a forward pass redistributes, the operator that moves most, and the
    bytes for operators of which no result takes all positions; collective.
    """
    model = dc.parallelize(copy.deepcopy(module), grid)
    cut = [dc.distribute_tensor(x, grid, how) for x, how in zip(inputs, arranged, strict=True)]
    dc.redistributions(reset=True)
    with torch.no_grad():
        model(*cut)
    mine: dict[str, int] = {}
    for entry in dc.redistributions(reset=True):
        mine[entry.operator] = mine.get(entry.operator, 0) + entry.bytes
    everyone = grid.all_gather_object(mine)
    total = {
        name: sum(each.get(name, 0) for each in everyone) for each in everyone for name in each
    }
    most = max(total, key=lambda name: total[name], default=None)
    otherwise = sum(n for name, n in total.items() if not MIXING.match(name))
    return {"redistributed": sum(total.values()), "most": most, "otherwise": otherwise}


def main() -> None:
    """Run the cases that are named; all ranks call it."""
    path, *keys = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    cases = {case.key: case for case in (*NETWORKS, *LOSSES)}
    rank = MPI.COMM_WORLD.rank

    def note(record: dict[str, Any]) -> None:
        if rank == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(record) + "\n")

    for key in keys:
        note({"case": key})
        found = outcome(cases[key])
        # A rank that fails alone waits here for the others, which end the job after a time.
        everyone = MPI.COMM_WORLD.allgather(found)
        unlike = [each for each in everyone if each["result"] != found["result"]]
        if unlike:
            found = {"result": "error", "why": f"ranks differ: {everyone}"}
        inputs = sum(x.numel() * x.element_size() for x in cases[key].tensors())
        shapes = [tuple(x.shape) for x in cases[key].tensors()]
        note({"case": key, "input": inputs, "shapes": shapes, **found})


if __name__ == "__main__":
    main()
