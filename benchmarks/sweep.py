"""Time every function that computes on blocks, on a tensor cut in two, over the best plain torch.

`mpiexec -n 2 python -m benchmarks.sweep benchmarks/results/sweep.md` writes the page, in about ten
minutes; nothing else should run meanwhile. With names of calls behind the path only these are
timed, and printed. Planes and volumes are cut along their first spatial dimension. Each call runs
forward and backward, where there is a gradient, in both memory formats; plain torch gets this
rank's block, and the faster of its forms is the bound.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from mpi4py import MPI
from torch import Tensor, nn

from benchmarks.layer import step_of
from benchmarks.measuring.plain import best, plain_forms
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.turns import alternate
from benchmarks.record import machine
from benchmarks.sweep_cases import CASES, OF_FORMAT, OF_PLANES, REASONS, SHAPES, Case
from distconv.model.parallelize import parallelize
from distconv.planning.scaling import Contender
from distconv.planning.table import markdown, table
from distconv.tensor.dist_tensor import DistTensor

MOST = 1.3
"""The longest that a call should take, in times of the best plain torch on the block."""

_HEADS = ("call", "plane", "plane, channels last", "volume", "volume, channels last", "reason")

_SECONDS = 1.0
"""About how long a call is timed, in all forms."""


def sweep(names: list[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each family with its rows, of all calls or of those named; all ranks call it."""
    for family, cases in CASES.items():
        dimensions = (2,) if family in OF_PLANES else (2, 3)
        rows = []
        for name, case in cases.items():
            if names and name not in names:
                continue
            ratios = [r for n in dimensions for r in _ratios(case, n)]
            cells = [_cell(*r) for r in ratios] + [""] * (4 - len(ratios))
            rows.append([name.replace("{}", "n"), *cells, _reason(name, ratios)])
        if rows:
            yield family, rows


def _reason(name: str, ratios: Sequence[tuple[float, float]]) -> str:
    """Return why a call takes longer than it should, where it does."""
    if any(min(r) > MOST for r in ratios):
        return REASONS.get(name, "")
    return OF_FORMAT if any(best > MOST for best, _ in ratios) else ""


def _cell(best: float, alike: float) -> str:
    """Return a ratio to the best plain torch; where it is large, that to the same format, too."""
    if best <= MOST:
        return f"{best:.2f}"
    return f"**{best:.2f}**" if alike > best / 1.1 else f"**{best:.2f}** ({alike:.2f})"


def _ratios(case: Case, n: int) -> Iterator[tuple[float, float]]:
    """Yield the times over the best plain torch, and over plain torch in the same format, with
    channels first, then last.
    """
    grid = Settings().grid(n + 2)
    shape = list(SHAPES[n])
    cuts = DistTensor.from_local(torch.empty(shape), grid).cuts
    shape[2] //= grid.size
    torch.manual_seed(0)
    x = 0.1 + 0.8 * torch.rand(shape)
    with torch.no_grad():
        dy = torch.rand_like(case(n)(x), dtype=torch.float32)
    torch.manual_seed(0)
    cut = case(n)
    if any(True for _ in cut.parameters()):
        cut = parallelize(cut, grid)  # whose check of all ranks a network pays once, not each call

    with torch.no_grad():
        made = cut(DistTensor(x, SHAPES[n], cuts, grid))

    def of_blocks(_: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
        whole = DistTensor(x, SHAPES[n], cuts, grid)
        return _step(cut, whole, DistTensor(dy, made.shape, made.cuts, grid))

    dy_cut = torch.rand_like(made.shard, dtype=torch.float32)
    mine = list(plain_forms(nn.Identity, (x, dy_cut), of_blocks).values())[:2]
    plain = list(plain_forms(lambda: case(n), (x, dy), _step).values())
    sides = [Contender(run) for run in (*mine, *plain)]
    times = alternate(grid.comm, sides, _SECONDS)
    bound = best(times[2:])
    for subject, alike in zip(times[:2], times[2:4], strict=True):
        yield _over(subject, bound), _over(subject, alike)


def _over(subject: Sequence[float], bound: Sequence[float]) -> float:
    return median(s / b for s, b in zip(subject, bound, strict=True))


def _step(module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Return a call of the module, and its backward pass where there is one."""
    if module(x.detach().requires_grad_()).requires_grad:
        return step_of(module, x, dy)
    return lambda: module(x)


def _page(families: list[tuple[str, list[list[str]]]], seconds: float) -> str:
    """Return the page of all families."""
    shapes = " and ".join(by(shape) for shape in SHAPES.values())
    parts = [
        f"# Every function on blocks, on {MPI.COMM_WORLD.size} ranks, over the best plain torch\n",
        "Written by `mpiexec -n 2 python -m benchmarks.sweep`: forward and backward of tensors\n"
        f"of {shapes}, partitioned along the first spatial dimension, relative to the same call\n"
        "of plain torch on the rank's block in its fastest memory format. Calls alternate; the\n"
        f"columns are medians of ratios. Ratios above {MOST} are marked. The ratio in brackets\n"
        "is to plain torch in the same format, if torch's own kernels are slower in that\n"
        "format. Known reasons are listed.\n",
        f"```\n{machine()}\ntime      {seconds:.0f} s\n```\n",
    ]
    for family, rows in families:
        parts.append(f"## {family}\n\n{markdown([_HEADS, *rows], right=(1, 2, 3, 4))}\n")
    return "\n".join(parts)


def main() -> None:
    """Time the calls, and write or print them; all ranks call it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("page", type=Path, help="the page that is written")
    parser.add_argument("calls", nargs="*", help="calls that are timed and printed, and no others")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    families = []
    for family, rows in sweep(arguments.calls):
        families.append((family, rows))
        if MPI.COMM_WORLD.rank == 0:
            print(f"{family}, {time.perf_counter() - start:.0f} s", flush=True)
            print(table([_HEADS, *rows]), end="\n\n", flush=True)
    if MPI.COMM_WORLD.rank == 0 and not arguments.calls:
        arguments.page.write_text(_page(families, time.perf_counter() - start))


if __name__ == "__main__":
    main()
