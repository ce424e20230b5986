"""What the tests of the examples share."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from mpi4py import MPI


@pytest.fixture(autouse=True)
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures blank on more than two ranks, where the others wait for the one that draws."""
    if MPI.COMM_WORLD.size > 2:
        monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"blank"))
