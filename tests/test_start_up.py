"""The packages that a program does not pay for before it uses them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import distconv as dc

UNUSED = (
    *("mpi4py.MPI", "h5py", "zarr", "numpy.random", "matplotlib", "sympy", "scipy", "tqdm"),
    *("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"),
    *("torch.distributed.tensor", "torch.testing", "torch.utils.tensorboard"),
    *("distconv.compiling", "distconv.data", "distconv.horovod", "distconv.lbann"),
    *("distconv.planning", "distconv.training", "distconv.tools.explain", "distconv.tools.verify"),
)
"""Packages that neither `import distconv` nor `parallelize` imports."""

IMPORT = "import sys, torch; before = set(sys.modules); import distconv as dc\n"
PARALLELIZE = """
grid = dc.ProcessGrid()
dc.parallelize(torch.nn.Conv2d(1, 1, 3), grid)
x = dc.distribute_tensor(torch.zeros(1, 1, 8, 8), grid)
"""


@pytest.mark.parametrize(
    ("program", "unused"), [(IMPORT, UNUSED), (IMPORT + PARALLELIZE, UNUSED[1:])]
)
def test_programs_import_no_package_that_they_do_not_use(
    program: str, unused: tuple[str, ...]
) -> None:
    program += "print(*(set(sys.modules) - before), sep='\\n')"
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    imported = end.stdout.split()
    assert "distconv.ops.conv.functions" in imported
    assert [name for name in unused if name in imported] == []


def test_names_that_are_imported_on_demand_are_listed_and_found() -> None:
    assert {*dc.__all__, "planning", "training"} <= {*dir(dc)}
    assert all(getattr(dc, name).__name__.rpartition(".")[2] == name for name in dc._ON_DEMAND)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dc.nonsense  # noqa: B018
